"""The index of a data set: what readers need beside its location, as bytes that the master keeps and hands out.

An index is one or more parts; a source that grows gets further parts appended. A part is a header in JSON and columns
of whole numbers. A column takes as few bytes per number as its largest number needs. All lowest bytes come first, then
all second bytes (the shuffle filter of HDF5 and Blosc), and the whole is compressed: the lengths of shards take about
two bytes each. An index comes over the network, so nothing in it is trusted.
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
from edl.quoting import quote

__all__ = ["MOST_NBYTES", "IndexPart", "Numbers", "check_size", "pack_part", "unpack_parts"]

Numbers: TypeAlias = npt.NDArray[np.int64]

MOST_NBYTES: Final = 48 << 20
"""Largest index: the master's messages carry 64 MiB. That is enough for about eight million shards of text."""
_MOST_UNPACKED: Final = 1 << 30
"""Largest part when unpacked, far above any real one. Without a limit a few hostile kilobytes would fill the memory."""
_MAGIC: Final = b"EDLX\x01"
_HEAD: Final = struct.Struct("<5sII")
_WIDTHS: Final = (1, 2, 4, 8)
"""Bytes per number for which NumPy has types."""


@dataclass(frozen=True)
class IndexPart:
    """A part of an index.

    Attributes:
        head: A JSON object.
        columns: Arrays of whole numbers, 0 or larger, by name.
    """

    head: Mapping[str, Any]
    columns: Mapping[str, Numbers] = field(default_factory=dict)

    def get_text(self, name: str) -> str:
        """Return the text called `name` in the head, or raise `ProtocolError`."""
        if not isinstance(found := self.head.get(name), str):
            raise ProtocolError(f"the index of the data set has {name}={quote(found)} instead of a text")
        return found

    def get_texts(self, name: str) -> list[str]:
        """Return the list of texts called `name` in the head, or raise `ProtocolError`."""
        found = self.head.get(name)
        if not isinstance(found, list) or not all(isinstance(text, str) for text in found):
            raise ProtocolError(f"the index of the data set has {name}={quote(found)} instead of a list of texts")
        return found


def pack_part(part: IndexPart) -> bytes:
    """Return a part as bytes. Concatenated parts are an index."""
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
        ProtocolError: The bytes are not an index, or one of another version of EDL.
    """
    parts = []
    at = 0
    while at < len(data):
        try:
            magic, length, crc = _HEAD.unpack_from(data, at)
            body = data[at + _HEAD.size : at + _HEAD.size + length]
            if magic != _MAGIC or len(body) != length or zlib.crc32(body) != crc:
                raise ProtocolError("the index of the data set is damaged, or from another version of EDL")
            parts.append(_unpack(body))
        except (struct.error, zlib.error, ValueError, TypeError, KeyError, RecursionError) as exc:
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
        numbers = np.ascontiguousarray(planes.T).view(f"<u{width}").reshape(count).astype(np.int64)
        if (numbers < 0).any():
            raise ProtocolError(f"the index of the data set has numbers of more than 63 bits in {quote(name)}")
        columns[str(name)] = numbers
        at += count * width
    return IndexPart(head, columns)


def check_size(index: bytes, advice: str) -> bytes:
    """Return an index that the master's messages can carry.

    Raises:
        SettingsError: It is too large; the message ends in `advice`.
    """
    if len(index) > MOST_NBYTES:
        raise SettingsError(f"the index would have {len(index) >> 20} MiB, at most {MOST_NBYTES >> 20}: {advice}")
    return index
