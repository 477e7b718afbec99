"""What readers need beside a data set's location, as bytes: parts, which a source that grows adds to by appending.

A part is a header in JSON and columns of whole numbers. A column is written in as few bytes a number as its largest one
needs, all lowest bytes first, then all second ones (the shuffle filter of HDF5 and Blosc), and then compressed: offsets
of shards, as differences, take about two bytes a shard.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from edl.errors import ProtocolError, SettingsError

__all__ = ["MOST_NBYTES", "IndexPart", "Numbers", "check_size", "pack_part", "unpack_parts"]

Numbers: TypeAlias = npt.NDArray[np.int64]

MOST_NBYTES: Final = 48 << 20
"""Of an index: what the master's messages (64 MiB) carry with some to spare; about eight million shards of text."""
_MOST_UNPACKED: Final = 1 << 30
"""Bytes of a part when unpacked: far above any index of `MOST_NBYTES`; without it a few hostile kilobytes would fill
the memory."""
_MAGIC: Final = b"EDLX\x01"
_HEAD: Final = struct.Struct("<5sII")
_WIDTHS: Final = (1, 2, 4, 8)
"""Bytes of a number, as NumPy has types for them."""


@dataclass(frozen=True)
class IndexPart:
    """A part of an index.

    Attributes:
        head: a JSON object.
        columns: whole numbers from 0 on, by name.
    """

    head: Mapping[str, Any]
    columns: Mapping[str, Numbers] = field(default_factory=dict)

    def get_text(self, name: str) -> str:
        """Return a text of the head.

        Raises:
            ProtocolError: there is none of this name.
        """
        found = self.head.get(name)
        if not isinstance(found, str):
            raise ProtocolError(f"the index of the data set has no text {name!r}")
        return found

    def get_texts(self, name: str) -> list[str]:
        """Return a list of texts of the head.

        Raises:
            ProtocolError: there is none of this name.
        """
        found = self.head.get(name)
        if not isinstance(found, list) or not all(isinstance(text, str) for text in found):
            raise ProtocolError(f"the index of the data set has no texts {name!r}")
        return found

    def get_options(self, types: Mapping[str, tuple[type, ...]]) -> dict[str, Any]:
        """Return the options of the head.

        Args:
            types: of the options there are, by name.

        Raises:
            ProtocolError: an option is missing, or of another type.
        """
        found = self.head.get("options")
        if not isinstance(found, dict) or found.keys() != types.keys():
            raise ProtocolError("the index of the data set has other options than this version of EDL")
        for name, value in found.items():
            if not isinstance(value, types[name]):
                raise ProtocolError(f"the index of the data set has the option {name}={value!r}")
        return found


def pack_part(part: IndexPart) -> bytes:
    """Return a part as bytes. Parts one after another are an index."""
    shapes, planes = [], []
    for name, numbers in part.columns.items():
        most = int(numbers.max(initial=0))
        width = next(width for width in _WIDTHS if most < 1 << (8 * width))
        shapes.append([name, len(numbers), width])
        planes.append(numbers.astype(f"<u{width}").view(np.uint8).reshape(-1, width).T.tobytes())
    text = json.dumps([dict(part.head), shapes], separators=(",", ":"), sort_keys=True).encode()
    body = zlib.compress(b"".join([struct.pack("<I", len(text)), text, *planes]), 6)
    return _HEAD.pack(_MAGIC, len(body), zlib.crc32(body)) + body


def unpack_parts(data: bytes) -> list[IndexPart]:
    """Return the parts of an index.

    Raises:
        ProtocolError: the bytes are not an index, or another version's.
    """
    parts = []
    at = 0
    while at < len(data):
        try:
            magic, length, crc = _HEAD.unpack_from(data, at)
            body = data[at + _HEAD.size : at + _HEAD.size + length]
            if magic != _MAGIC or len(body) != length or zlib.crc32(body) != crc:
                raise ProtocolError("the index of the data set is damaged, or of another version of EDL")
            parts.append(_unpack(body))
        except (struct.error, zlib.error, ValueError, TypeError, KeyError) as exc:
            raise ProtocolError(f"the index of the data set cannot be read: {exc}") from exc
        at += _HEAD.size + length
    return parts


def _unpack(body: bytes) -> IndexPart:
    inflater = zlib.decompressobj()
    plain = inflater.decompress(body, _MOST_UNPACKED)
    if not inflater.eof:
        raise ProtocolError(f"a part of the data set's index has more than {_MOST_UNPACKED >> 20} MiB")
    (length,) = struct.unpack_from("<I", plain)
    head, shapes = json.loads(plain[4 : 4 + length])
    if not isinstance(head, dict):
        raise ProtocolError("a part of the data set's index has no head")
    at = 4 + length
    columns = {}
    for name, count, width in shapes:
        planes = np.frombuffer(plain, np.uint8, count * width, at).reshape(width, count)
        columns[str(name)] = np.ascontiguousarray(planes.T).view(f"<u{width}").reshape(count).astype(np.int64)
        at += count * width
    return IndexPart(head, columns)


def check_size(index: bytes, advice: str) -> None:
    """Refuse an index that the master's messages cannot carry.

    Args:
        index: all parts.
        advice: what the user may do about it.

    Raises:
        SettingsError: it is larger.
    """
    if len(index) > MOST_NBYTES:
        raise SettingsError(f"the index would have {len(index) >> 20} MiB, at most {MOST_NBYTES >> 20}: {advice}")
