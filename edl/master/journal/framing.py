"""Records as a stream of bytes, and the stream as values that a store can hold."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from typing import Final

from edl.errors import ProtocolError

__all__ = ["cut", "join_records", "split_records"]

_HEAD: Final = struct.Struct("!QI")
"""Before each record: its length, and its CRC-32."""
_MOST_NBYTES: Final = 190_000
"""Of a value: Consul's transactions take 512 KiB of JSON with base64 in it, and a store of EDL 256 KiB."""


def join_records(records: Sequence[bytes]) -> bytes:
    """Return records behind one another, each with its length and checksum."""
    return b"".join(part for record in records for part in (_HEAD.pack(len(record), zlib.crc32(record)), record))


def split_records(data: bytes) -> list[bytes]:
    """Return the records that `join_records` joined.

    Raises:
        ProtocolError: one of them is damaged, or cut off.
    """
    records: list[bytes] = []
    at = 0
    while at < len(data):
        if at + _HEAD.size > len(data):
            raise ProtocolError(f"record {len(records)} is cut off at byte {len(data)}")
        nbytes, checksum = _HEAD.unpack_from(data, at)
        at += _HEAD.size
        record = data[at : at + nbytes]
        if len(record) != nbytes or zlib.crc32(record) != checksum:
            raise ProtocolError(f"record {len(records)} of {nbytes:,} bytes is damaged")
        records.append(record)
        at += nbytes
    return records


def cut(data: bytes) -> list[bytes]:
    """Return data in pieces that a store can hold; a single empty piece for none."""
    return [data[at : at + _MOST_NBYTES] for at in range(0, len(data), _MOST_NBYTES)] or [b""]
