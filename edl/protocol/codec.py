"""Requests and responses to bytes and back, without copying tensors twice.

Protobuf copies `raw_input_contents` once to parse and once more to hand them over: at 5 MB a request that costs as much
as the network. Here protobuf sees only the header; the tensors are cut out of, or joined to, the bytes around it.
The wire format is protobuf's (https://protobuf.dev/programming-guides/encoding/), so any peer understands it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
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
_MAX_FIELDS = 10_000  # top-level fields of an honest message are one a tensor; each costs a microsecond here


@functools.lru_cache(maxsize=1024)  # lengths are the same request after request
def varint(value: int) -> bytes:
    """Return a number as protobuf writes it."""
    out = bytearray()
    while value > 0x7F:
        out.append((value & 0x7F) | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def read_varint(data: memoryview, at: int) -> tuple[int, int]:
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


def skip_number(data: memoryview, at: int, wire_type: int) -> int:
    """Index just behind the number at `at`."""
    if wire_type == 0:
        return read_varint(data, at)[1]
    if wire_type in (1, 5):
        end = at + (8 if wire_type == 1 else 4)
    else:
        raise ProtocolError(f"malformed message: wire type {wire_type} at byte {at}")
    if end > len(data):
        raise ProtocolError(f"malformed message: a field ends at byte {end} of {len(data)}")
    return end


def _split(data: Buffer, raw_field: int, id_field: int = -1) -> tuple[bytes, list[memoryview], memoryview | None]:
    """Return the message without its fields `raw_field` and `id_field`, and these fields as views of `data`."""
    view = memoryview(data)
    end = len(view)
    raw_tag, id_tag = raw_field << 3 | _LENGTH_DELIMITED, id_field << 3 | _LENGTH_DELIMITED
    raw: list[memoryview] = []
    found: memoryview | None = None
    kept: list[memoryview] = []
    at = kept_from = fields = 0
    while at < end:
        fields += 1
        if fields > _MAX_FIELDS:
            raise ProtocolError(f"malformed message: more than {_MAX_FIELDS} fields")
        start = at
        tag, at = (view[at], at + 1) if view[at] < 0x80 else read_varint(view, at)
        if tag & 7 != _LENGTH_DELIMITED:
            at = skip_number(view, at, tag & 7)
            continue
        if at < end and view[at] < 0x80:  # most are that short, and a call would cost as much as the rest
            begin, at = at + 1, at + 1 + view[at]
        else:
            length, begin = read_varint(view, at)
            at = begin + length
        if at > end:
            raise ProtocolError(f"malformed message: a field ends at byte {at} of {end}")
        if tag != raw_tag and tag != id_tag:
            continue
        if start > kept_from:
            kept.append(view[kept_from:start])
        kept_from = at
        if tag == raw_tag:
            raw.append(view[begin:at])
        else:
            found = view[begin:at]
    if at > kept_from:
        kept.append(view[kept_from:at])
    return bytes(kept[0]) if len(kept) == 1 else b"".join(kept), raw, found


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
    return _split(data, _RAW_INPUT)[:2]


def is_compressed(data: Buffer) -> bool:
    """Return whether bytes that do not parse may be a compressed message, which gRPC is told not to inflate."""
    return bytes(memoryview(data)[:2]) in _COMPRESSED


def _text(data: memoryview | None) -> str:
    try:
        return "" if data is None else str(data, "utf-8")
    except UnicodeDecodeError as exc:
        raise ProtocolError("malformed message: a string that is no UTF-8") from exc


def parse_request(header: bytes) -> kserve.ModelInferRequest:
    """Parse a header that `split_request` found.

    Raises:
        ProtocolError: it is no `ModelInferRequest`.
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
    return _split(data, _RAW_OUTPUT)[:2]


def split_identified_response(data: Buffer) -> tuple[bytes, list[memoryview], str]:
    """As `split_response`, and the id cut out of the header: what is left of it is the same for many answers.

    Raises:
        ProtocolError: `data` is not a protobuf message, or its id is not UTF-8.
    """
    header, raw, found = _split(data, _RAW_OUTPUT, _ID)
    return header, raw, _text(found)


def parse_response(header: bytes) -> kserve.ModelInferResponse:
    """Parse a header that `split_streamed_response` found.

    Raises:
        ProtocolError: it is no `ModelInferResponse`.
    """
    try:
        return kserve.ModelInferResponse.FromString(header)
    except DecodeError as exc:
        raise ProtocolError(f"malformed ModelInferResponse: {exc}") from exc
