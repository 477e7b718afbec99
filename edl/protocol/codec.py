"""Requests and responses to bytes and back, without copying tensors twice.

Protobuf copies `raw_input_contents` once to parse and once more to hand them over: at 5 MB a request that costs as much
as the network. Here protobuf sees only the header; the tensors are cut out of, or joined to, the bytes around it.
The wire format is protobuf's (https://protobuf.dev/programming-guides/encoding/), so any peer understands it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from google.protobuf.message import DecodeError

from edl.errors import ProtocolError
from edl.protocol import kserve

__all__ = [
    "Buffer",
    "decode_request",
    "decode_response",
    "encode_request",
    "encode_response",
    "join_request",
    "join_response",
    "parse_request",
    "split_request",
    "wrap_response",
]

Buffer: TypeAlias = bytes | bytearray | memoryview

_RAW_INPUT = 7
_RAW_OUTPUT = 6
_STREAMED_RESPONSE = 2
_LENGTH_DELIMITED = 2
_MAX_FIELDS = 10_000  # top-level fields of an honest message are one a tensor; each costs a microsecond here


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append((value & 0x7F) | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _read_varint(data: memoryview, at: int) -> tuple[int, int]:
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


def _skip(data: memoryview, at: int, wire_type: int) -> int:
    """Index just behind the value at `at`."""
    if wire_type == 0:
        return _read_varint(data, at)[1]
    if wire_type == _LENGTH_DELIMITED:
        length, at = _read_varint(data, at)
        end = at + length
    elif wire_type in (1, 5):
        end = at + (8 if wire_type == 1 else 4)
    else:
        raise ProtocolError(f"malformed message: wire type {wire_type} at byte {at}")
    if end > len(data):
        raise ProtocolError(f"malformed message: a field ends at byte {end} of {len(data)}")
    return end


def _split(data: Buffer, raw_field: int) -> tuple[bytes, list[memoryview]]:
    """The message without its fields `raw_field`, and those fields as views of `data`."""
    view = memoryview(data)
    raw: list[memoryview] = []
    kept: list[memoryview] = []
    at = kept_from = fields = 0
    while at < len(view):
        fields += 1
        if fields > _MAX_FIELDS:
            raise ProtocolError(f"malformed message: more than {_MAX_FIELDS} fields")
        start = at
        tag, at = _read_varint(view, at)
        at_value = at
        at = _skip(view, at, tag & 7)
        if tag >> 3 == raw_field and tag & 7 == _LENGTH_DELIMITED:
            if start > kept_from:
                kept.append(view[kept_from:start])
            kept_from = at
            raw.append(view[_read_varint(view, at_value)[1] : at])
    if at > kept_from:
        kept.append(view[kept_from:at])
    return b"".join(kept), raw


def _join(header: bytes, raw_field: int, raw: Sequence[Buffer]) -> bytes:
    if not raw:
        return header
    tag = _varint(raw_field << 3 | _LENGTH_DELIMITED)
    parts: list[Buffer] = [header]
    for tensor in raw:
        view = memoryview(tensor)
        parts.append(tag + _varint(view.nbytes))
        parts.append(view)
    return b"".join(parts)  # lets go of the GIL for parts of a megabyte and more


def encode_request(header: kserve.ModelInferRequest, raw: Sequence[Buffer]) -> bytes:
    """A `ModelInferRequest` with `raw` (C-contiguous buffers, one an input) as its `raw_input_contents`."""
    return _join(header.SerializeToString(), _RAW_INPUT, raw)


def join_request(header: bytes, raw: Sequence[Buffer]) -> bytes:
    """`encode_request` for a header that is serialized already."""
    return _join(header, _RAW_INPUT, raw)


def encode_response(header: kserve.ModelInferResponse, raw: Sequence[Buffer]) -> bytes:
    """A `ModelInferResponse` with `raw` as its `raw_output_contents`."""
    return _join(header.SerializeToString(), _RAW_OUTPUT, raw)


def join_response(header: bytes, raw: Sequence[Buffer]) -> bytes:
    """`encode_response` for a header that is serialized already."""
    return _join(header, _RAW_OUTPUT, raw)


def wrap_response(response: bytes) -> bytes:
    """A `ModelStreamInferResponse` around the bytes of a `ModelInferResponse`."""
    return _varint(_STREAMED_RESPONSE << 3 | _LENGTH_DELIMITED) + _varint(len(response)) + response


def split_request(data: Buffer) -> tuple[bytes, list[memoryview]]:
    """The header of a `ModelInferRequest`, still serialized, and its `raw_input_contents` as views of `data`.

    Raises:
        ProtocolError: `data` is no protobuf message.
    """
    return _split(data, _RAW_INPUT)


def parse_request(header: bytes) -> kserve.ModelInferRequest:
    """A header that `split_request` found.

    Raises:
        ProtocolError: it is no `ModelInferRequest`.
    """
    try:
        return kserve.ModelInferRequest.FromString(header)
    except DecodeError as exc:
        raise ProtocolError(f"malformed ModelInferRequest: {exc}") from exc


def decode_request(data: Buffer) -> tuple[kserve.ModelInferRequest, list[memoryview]]:
    """The header of a `ModelInferRequest` and its `raw_input_contents` as views of `data`.

    Raises:
        ProtocolError: `data` is no such message.
    """
    header, raw = split_request(data)
    return parse_request(header), raw


def decode_response(data: Buffer) -> tuple[kserve.ModelInferResponse, list[memoryview]]:
    """The header of a `ModelInferResponse` and its `raw_output_contents` as views of `data`.

    Raises:
        ProtocolError: `data` is no such message.
    """
    header, raw = _split(data, _RAW_OUTPUT)
    try:
        return kserve.ModelInferResponse.FromString(header), raw
    except DecodeError as exc:
        raise ProtocolError(f"malformed ModelInferResponse: {exc}") from exc
