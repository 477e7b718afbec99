"""Bytes that are kept by others and read again: what they are, their version, and a checksum."""

from __future__ import annotations

import zlib
from typing import Final, TypeVar

from google.protobuf.message import DecodeError, Message

from edl.errors import ProtocolError

__all__ = ["open_envelope", "seal"]

M = TypeVar("M", bound=Message)

_FORMAT: Final = 1
"""Of what is inside; another version of EDL may refuse it, but never misreads it."""
_CHECKSUM_NBYTES: Final = 4  # a CRC-32


def seal(magic: bytes, message: Message) -> bytes:
    """Return a message as bytes that can be told from others.

    Args:
        magic: what they are.
        message: in them.
    """
    body = magic + bytes([_FORMAT]) + message.SerializeToString(deterministic=True)
    return body + zlib.crc32(body).to_bytes(_CHECKSUM_NBYTES, "big")


def open_envelope(magic: bytes, what: str, data: bytes, kind: type[M]) -> M:
    """Return the message in bytes that `seal` made.

    Args:
        magic: what they should be.
        what: the same in words.
        data: as they were read.
        kind: of the message.

    Raises:
        ProtocolError: they are something else, damaged, or of another version of EDL.
    """
    if data[: len(magic)] != magic:
        raise ProtocolError(f"{len(data):,} bytes that are no {what}")
    body, checksum = data[:-_CHECKSUM_NBYTES], data[-_CHECKSUM_NBYTES:]
    if zlib.crc32(body).to_bytes(_CHECKSUM_NBYTES, "big") != checksum:
        raise ProtocolError(f"{what} of {len(data):,} bytes is damaged: its checksum is another")
    found = body[len(magic)]
    if found != _FORMAT:
        raise ProtocolError(f"{what} of format {found}; this version of EDL reads {_FORMAT}")
    try:
        return kind.FromString(body[len(magic) + 1 :])
    except DecodeError as exc:
        raise ProtocolError(f"{what} cannot be read: {exc}") from exc
