"""Converts requests and responses to bytes and back, without a second copy of the tensors.

Protobuf copies `raw_input_contents` once to parse them and once more to return them: at 5 MB per request, this takes as
long as the network transfer. In this module, protobuf processes only the header; the module splits the tensors from the
header's bytes, or joins the tensors to these bytes. The wire format is protobuf's
(https://protobuf.dev/programming-guides/encoding/), so any peer understands it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Generic, TypeAlias, TypeVar

from google.protobuf.message import DecodeError, Message

from edl.errors import ProtocolError
from edl.protocol import kserve

Buffer: TypeAlias = bytes | bytearray | memoryview

_ID = 3  # field of ModelInferRequest and of ModelInferResponse
_STREAMED_RESPONSE = 2  # field of ModelStreamInferResponse
_LENGTH_DELIMITED = 2  # protobuf's wire type of bytes, text and messages
_COMPRESSED = (b"\x1f\x8b", b"\x78\x01", b"\x78\x5e", b"\x78\x9c", b"\x78\xda")  # gzip, and deflate by its levels
_MAX_FIELDS = 10_000  # a valid message has a few fields per tensor; each costs a microsecond here


@functools.lru_cache(maxsize=1024)  # lengths rarely change between requests
def varint(value: int) -> bytes:
    """Encode a number as a protobuf varint."""
    out = bytearray()
    while value > 0x7F:
        out.append((value & 0x7F) | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _read_varint(data: memoryview, at: int) -> tuple[int, int]:
    """Return the number at index `at`, and the index just after the number."""
    value = shift = 0
    while True:
        if at >= len(data) or shift > 63:
            raise ProtocolError(f"malformed message: bad varint at byte {at} of {len(data)}")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7


def _fields(view: memoryview) -> Iterator[tuple[int, int, int, int]]:
    """Yield each field's tag, and the indexes at which the field starts, its value starts, and the field ends."""
    at = count = 0
    total = len(view)
    while at < total:
        count += 1
        if count > _MAX_FIELDS:
            raise ProtocolError(f"malformed message: more than {_MAX_FIELDS} fields")
        start = at
        tag, begin = (view[at], at + 1) if view[at] < 0x80 else _read_varint(view, at)
        wire_type = tag & 7
        if wire_type == _LENGTH_DELIMITED:
            if begin < total and view[begin] < 0x80:  # most are that short, and a call would cost as much as the rest
                at = begin + 1 + view[begin]
                begin += 1
            else:
                length, begin = _read_varint(view, begin)
                at = begin + length
        elif wire_type == 0:
            at = _read_varint(view, begin)[1]
        elif wire_type in (1, 5):
            at = begin + (8 if wire_type == 1 else 4)
        else:
            raise ProtocolError(f"malformed message: wire type {wire_type} at byte {begin}")
        if at > total:
            raise ProtocolError(f"malformed message: a field ends at byte {at} of {total}")
        yield tag, start, begin, at


M = TypeVar("M", bound=Message)


class MessageCodec(Generic[M]):
    """Joins and splits messages of one type; `raw_field` is the number of the field with the raw tensors."""

    def __init__(self, kind: type[M], raw_field: int) -> None:
        self._kind = kind
        self._raw_tag = raw_field << 3 | _LENGTH_DELIMITED

    def join(self, header: bytes, raw: Sequence[Buffer]) -> bytes:
        """Return the message for a serialized header and the C-contiguous tensors `raw`."""
        return b"".join(self.parts(header, raw))

    def parts(self, header: bytes, raw: Sequence[Buffer]) -> list[Buffer]:
        """Return the pieces of the message that `join` returns, without copying the tensors."""
        tag = varint(self._raw_tag)
        parts: list[Buffer] = [header]
        for tensor in raw:
            view = memoryview(tensor)
            parts.append(tag + varint(view.nbytes))
            parts.append(view.cast("B") if view.nbytes else b"")
        return parts

    def split(self, data: Buffer) -> tuple[bytes, list[memoryview]]:
        """Return a message's serialized header, and its raw tensors as views of `data`; ProtocolError if malformed."""
        view = memoryview(data)
        raw: list[memoryview] = []
        kept: list[memoryview] = []
        kept_from = 0
        for tag, start, begin, end in _fields(view):
            if tag == self._raw_tag:
                raw.append(view[begin:end])
                if start > kept_from:
                    kept.append(view[kept_from:start])
                kept_from = end
        if len(view) > kept_from:
            kept.append(view[kept_from:])
        return bytes(kept[0]) if len(kept) == 1 else b"".join(kept), raw

    def parse(self, header: bytes) -> M:
        """Parse a header that `split` returned; raise `ProtocolError` if it is invalid."""
        try:
            return self._kind.FromString(header)
        except DecodeError as exc:
            raise ProtocolError(f"malformed {self._kind.__name__}: {exc}") from exc


REQUEST = MessageCodec(kserve.ModelInferRequest, 7)
RESPONSE = MessageCodec(kserve.ModelInferResponse, 6)


def id_field(request_id: str) -> bytes:
    """Return the serialized field `id`. Added before or after a message's bytes, the field sets the message's id."""
    data = request_id.encode()
    return varint(_ID << 3 | _LENGTH_DELIMITED) + varint(len(data)) + data


def join_streamed_response(header: bytes, raw: Sequence[Buffer]) -> bytes:
    """Return a `ModelStreamInferResponse` that contains the result of `RESPONSE.join`."""
    parts = RESPONSE.parts(header, raw)
    return b"".join((varint(_STREAMED_RESPONSE << 3 | _LENGTH_DELIMITED), varint(sum(map(len, parts))), *parts))


def is_compressed(data: Buffer) -> bool:
    """Return whether bytes that do not parse may be a compressed message: gRPC is configured not to decompress it."""
    return bytes(memoryview(data)[:2]) in _COMPRESSED
