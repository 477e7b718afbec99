"""Requests and responses to bytes and back, without copying tensors twice.

Protobuf copies `raw_input_contents` once to parse and once more to hand them over: at 5 MB a request that costs as much
as the network. Here protobuf sees only the header; the tensors are cut out of, or joined to, the bytes around it.
The wire format is protobuf's (https://protobuf.dev/programming-guides/encoding/), so any peer understands it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import TypeAlias

from google.protobuf.message import DecodeError

from edl.errors import ProtocolError
from edl.protocol import kserve

Buffer: TypeAlias = bytes | bytearray | memoryview

_ID = 3  # field of ModelInferRequest and of ModelInferResponse
_RAW_INPUT = 7  # field of ModelInferRequest
_RAW_OUTPUT = 6  # field of ModelInferResponse
_STREAMED_RESPONSE = 2  # field of ModelStreamInferResponse
_LENGTH_DELIMITED = 2  # protobuf's wire type of bytes, text and messages
_COMPRESSED = (b"\x1f\x8b", b"\x78\x01", b"\x78\x5e", b"\x78\x9c", b"\x78\xda")  # gzip, and deflate by its levels
_MAX_FIELDS = 10_000  # an honest message has some fields for each tensor; each costs a microsecond here


@functools.lru_cache(maxsize=1024)  # lengths are the same request after request
def varint(value: int) -> bytes:
    """Return a number as protobuf writes it."""
    out = bytearray()
    while value > 0x7F:
        out.append((value & 0x7F) | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _read_varint(data: memoryview, at: int) -> tuple[int, int]:
    """Return the number at `at`, and the index just behind it."""
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
    """Yield the tag of each field, and the indexes at which it starts, its value begins, and both end."""
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


def _split(data: Buffer, raw_field: int) -> tuple[bytes, list[memoryview]]:
    """Return the message without its fields `raw_field`, and these fields as views of `data`."""
    view = memoryview(data)
    raw_tag = raw_field << 3 | _LENGTH_DELIMITED
    raw: list[memoryview] = []
    kept: list[memoryview] = []
    kept_from = 0
    for tag, start, begin, end in _fields(view):
        if tag == raw_tag:
            raw.append(view[begin:end])
            if start > kept_from:
                kept.append(view[kept_from:start])
            kept_from = end
    if len(view) > kept_from:
        kept.append(view[kept_from:])
    return bytes(kept[0]) if len(kept) == 1 else b"".join(kept), raw


def _join(header: bytes, raw_field: int, raw: Sequence[Buffer]) -> bytes:
    return b"".join(_parts(header, raw_field, raw)) if raw else header


def _parts(header: bytes, raw_field: int, raw: Sequence[Buffer]) -> list[Buffer]:
    """Return what to join, with the GIL, because releasing and taking it again costs more than other threads gain."""
    tag = varint(raw_field << 3 | _LENGTH_DELIMITED)
    parts: list[Buffer] = [header]
    for tensor in raw:
        view = memoryview(tensor)
        parts.append(tag + varint(view.nbytes))
        parts.append(view.cast("B") if view.nbytes else b"")
    return parts


def join_request(header: bytes, raw: Sequence[Buffer]) -> bytes:
    """Return a `ModelInferRequest` of a serialized header, and `raw` (C-contiguous) as its `raw_input_contents`."""
    return _join(header, _RAW_INPUT, raw)


def join_response(header: bytes, raw: Sequence[Buffer]) -> bytes:
    """Return a `ModelInferResponse` of a serialized header, and `raw` as its `raw_output_contents`."""
    return _join(header, _RAW_OUTPUT, raw)


def id_field(request_id: str) -> bytes:
    """Return the field `id` alone. Before or behind a serialized request or response, it becomes that message's id."""
    data = request_id.encode()
    return varint(_ID << 3 | _LENGTH_DELIMITED) + varint(len(data)) + data


def join_streamed_response(header: bytes, raw: Sequence[Buffer]) -> bytes:
    """Return a `ModelStreamInferResponse` around what `join_response` would give."""
    parts = _parts(header, _RAW_OUTPUT, raw)
    length = varint(sum([len(part) for part in parts]))
    return b"".join((varint(_STREAMED_RESPONSE << 3 | _LENGTH_DELIMITED), length, *parts))


def split_request(data: Buffer) -> tuple[bytes, list[memoryview]]:
    """Return the header of a `ModelInferRequest`, still serialized, and its `raw_input_contents` as views of `data`.

    Raises:
        ProtocolError: `data` is not a protobuf message.
    """
    return _split(data, _RAW_INPUT)


def is_compressed(data: Buffer) -> bool:
    """Return whether bytes that do not parse may be a compressed message, which gRPC is told not to inflate."""
    return bytes(memoryview(data)[:2]) in _COMPRESSED


def parse_request(header: bytes) -> kserve.ModelInferRequest:
    """Parse a header that `split_request` found.

    Raises:
        ProtocolError: It is not a `ModelInferRequest`.
    """
    try:
        return kserve.ModelInferRequest.FromString(header)
    except DecodeError as exc:
        raise ProtocolError(f"malformed ModelInferRequest: {exc}") from exc


def split_response(data: Buffer) -> tuple[bytes, list[memoryview]]:
    """Return the header of a `ModelInferResponse`, still serialized, and its `raw_output_contents` as views of `data`.

    Raises:
        ProtocolError: `data` is not a protobuf message.
    """
    return _split(data, _RAW_OUTPUT)


def parse_response(header: bytes) -> kserve.ModelInferResponse:
    """Parse a header that `split_response` found.

    Raises:
        ProtocolError: It is not a `ModelInferResponse`.
    """
    try:
        return kserve.ModelInferResponse.FromString(header)
    except DecodeError as exc:
        raise ProtocolError(f"malformed ModelInferResponse: {exc}") from exc
