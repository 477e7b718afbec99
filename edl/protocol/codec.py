"""Requests and responses to bytes and back, without copying tensors twice.

Protobuf copies `raw_input_contents` once to parse and once more to hand them over: at 5 MB a request that costs as much
as the network. Here protobuf sees only the header; the tensors are cut out of, or joined to, the bytes around it.
The wire format is protobuf's (https://protobuf.dev/programming-guides/encoding/), so any peer understands it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import numpy as np
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


def _fields(view: memoryview, most: int = _MAX_FIELDS) -> Iterator[tuple[int, int, int, int]]:
    """Yield the tag of each field, and the indexes at which it starts, its value begins, and both end."""
    at = count = 0
    total = len(view)
    while at < total:
        count += 1
        if count > most:
            raise ProtocolError(f"malformed message: more than {most} fields")
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


def _split(data: Buffer, raw_field: int, id_field: int = -1) -> tuple[bytes, list[memoryview], memoryview | None]:
    """Return the message without its fields `raw_field` and `id_field`, and these fields as views of `data`."""
    view = memoryview(data)
    raw_tag, id_tag = raw_field << 3 | _LENGTH_DELIMITED, id_field << 3 | _LENGTH_DELIMITED
    raw: list[memoryview] = []
    found: memoryview | None = None
    kept: list[memoryview] = []
    kept_from = 0
    for tag, start, begin, end in _fields(view):
        if tag == raw_tag:
            raw.append(view[begin:end])
        elif tag == id_tag:
            found = view[begin:end]
        else:
            continue
        if start > kept_from:
            kept.append(view[kept_from:start])
        kept_from = end
    if len(view) > kept_from:
        kept.append(view[kept_from:])
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
    return _split(data, _RAW_OUTPUT)[:2]


def split_identified_response(data: Buffer) -> tuple[bytes, list[memoryview], str]:
    """Return the header of a `ModelInferResponse` (serialized, without id), its `raw_output_contents`, and its id.

    The raw contents are views of `data`. Without its id, the header is the same for many answers.

    Raises:
        ProtocolError: `data` is not a protobuf message, or its id is not UTF-8.
    """
    header, raw, found = _split(data, _RAW_OUTPUT, _ID)
    try:
        return header, raw, str(found or b"", "utf-8")
    except UnicodeDecodeError as exc:
        raise ProtocolError("malformed message: the id is not UTF-8") from exc


def parse_response(header: bytes) -> kserve.ModelInferResponse:
    """Parse a header that `split_identified_response` found.

    Raises:
        ProtocolError: It is not a `ModelInferResponse`.
    """
    try:
        return kserve.ModelInferResponse.FromString(header)
    except DecodeError as exc:
        raise ProtocolError(f"malformed ModelInferResponse: {exc}") from exc


# Typed contents. Of two bytes in a list, protobuf makes a number or a string of 4 to 60 bytes, so a header of megabytes
# is checked in bytes first.

_INPUTS = 5  # field of ModelInferRequest
_CONTENTS = 5  # field of InferInputTensor
_FIXED_NBYTES = {"FP32": 4, "FP64": 8}  # bytes of an element where protobuf does not write varints
CONTENTS_FIELDS = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}
"""The field of `InferTensorContents` that has the elements of each datatype."""


def split_contents(header: bytes) -> tuple[bytes, list[list[memoryview]]]:
    """Return the header of a request without its typed contents, and the pieces of these for each input.

    Raises:
        ProtocolError: The header is not a protobuf message, or has more fields than an honest message.
    """
    view = memoryview(header)
    rest: list[bytes | memoryview] = []
    contents: list[list[memoryview]] = []
    fields = 0
    for tag, start, begin, end in _fields(view):
        if tag != _INPUTS << 3 | _LENGTH_DELIMITED:
            rest.append(view[start:end])
            continue
        tensor = view[begin:end]
        kept: list[memoryview] = []
        found: list[memoryview] = []
        for inner_tag, inner_start, inner_begin, inner_end in _fields(tensor, _MAX_FIELDS - fields):
            fields += 1
            if inner_tag == _CONTENTS << 3 | _LENGTH_DELIMITED:
                found.append(tensor[inner_begin:inner_end])
            else:
                kept.append(tensor[inner_start:inner_end])
        rest += [varint(_INPUTS << 3 | _LENGTH_DELIMITED), varint(sum([len(part) for part in kept])), *kept]
        contents.append(found)
    return b"".join(rest), contents


def check_contents(datatype: str, count: int, contents: Sequence[memoryview]) -> None:
    """Check that typed contents have `count` elements, where elements of `datatype` belong, and nothing else.

    Raises:
        ProtocolError: They do not, or their elements are neither packed nor few.
    """
    name = CONTENTS_FIELDS.get(datatype)
    if name is None:
        raise ProtocolError(f"{datatype} cannot be sent as typed contents; send raw_input_contents")
    number = kserve.InferTensorContents.DESCRIPTOR.fields_by_name[name].number
    found = 0
    for part in contents:
        for tag, _, begin, end in _fields(part, count if datatype == "BYTES" else _MAX_FIELDS):
            if tag >> 3 != number:
                raise ProtocolError(f"{datatype} belongs in {name} alone, and the contents have field {tag >> 3}")
            if tag & 7 != _LENGTH_DELIMITED or datatype == "BYTES":
                found += 1
            elif datatype in _FIXED_NBYTES:
                found += (end - begin) // _FIXED_NBYTES[datatype]
            else:  # count the last bytes of varints
                found += int(np.count_nonzero(np.frombuffer(part[begin:end], np.uint8) < 0x80))
    if found != count:
        raise ProtocolError(f"{datatype} of this shape takes {count} elements, {name} has {found}")
