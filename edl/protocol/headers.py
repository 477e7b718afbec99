"""The contents of a request's header, found before protobuf makes objects of it.

Protobuf takes two bytes of a list for a number or a string, and makes 4 to 60 of them: a header of megabytes is looked
at here first, in bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from edl.errors import ProtocolError
from edl.protocol import kserve
from edl.protocol.codec import read_varint, skip_number, varint
from edl.protocol.tensors import CONTENTS_FIELDS

_INPUTS = 5  # of ModelInferRequest
_CONTENTS = 5  # of InferInputTensor
_LENGTH_DELIMITED = 2  # protobuf's wire type of bytes, text and messages
_MAX_FIELDS = 10_000  # as `codec` has it: an honest header has some for each tensor; each costs a microsecond here
_FIXED = {"FP32": 4, "FP64": 8}
"""Bytes of an element where protobuf does not write whole numbers."""


class Outline(NamedTuple):
    """A header in two.

    Attributes:
        rest: the header without its typed contents.
        contents: by input, the pieces of its `InferTensorContents`; none where it has none.
    """

    rest: bytes
    contents: list[list[memoryview]]


class _Field(NamedTuple):
    """A field of a message: its number, and where it starts, and where its value does and ends."""

    number: int
    wire_type: int
    start: int
    begin: int
    end: int


def outline(header: bytes) -> Outline:
    """Cut the typed contents out of a header.

    Raises:
        ProtocolError: it is not a protobuf message, or has more fields than an honest message.
    """
    view = memoryview(header)
    rest: list[bytes | memoryview] = []
    contents: list[list[memoryview]] = []
    fields = 0
    for field in _fields(view, _MAX_FIELDS):
        if field.number != _INPUTS or field.wire_type != _LENGTH_DELIMITED:
            rest.append(view[field.start : field.end])
            continue
        tensor = view[field.begin : field.end]
        kept: list[memoryview] = []
        found: list[memoryview] = []
        for inner in _fields(tensor, _MAX_FIELDS - fields):
            fields += 1
            if inner.number == _CONTENTS and inner.wire_type == _LENGTH_DELIMITED:
                found.append(tensor[inner.begin : inner.end])
            else:
                kept.append(tensor[inner.start : inner.end])
        rest += [varint(_INPUTS << 3 | _LENGTH_DELIMITED), varint(sum([len(part) for part in kept])), *kept]
        contents.append(found)
    return Outline(b"".join(rest), contents)


def check_contents(datatype: str, count: int, contents: Sequence[memoryview]) -> None:
    """Check that typed contents have `count` elements, where elements of `datatype` belong, and nothing else.

    Raises:
        ProtocolError: they do not, or their elements are neither packed nor few.
    """
    name = CONTENTS_FIELDS.get(datatype)
    if name is None:
        raise ProtocolError(f"{datatype} cannot be sent as typed contents; send raw_input_contents")
    number = kserve.InferTensorContents.DESCRIPTOR.fields_by_name[name].number
    found = 0
    for part in contents:
        for field in _fields(part, count if datatype == "BYTES" else _MAX_FIELDS):
            if field.number != number:
                raise ProtocolError(f"{datatype} belongs in {name} alone, and the contents have field {field.number}")
            packed = field.wire_type == _LENGTH_DELIMITED and datatype != "BYTES"
            found += _packed(datatype, part[field.begin : field.end]) if packed else 1
    if found != count:
        raise ProtocolError(f"{datatype} of this shape takes {count} elements, {name} has {found}")


def _packed(datatype: str, data: memoryview) -> int:
    """How many elements a packed field has."""
    if datatype in _FIXED:
        return len(data) // _FIXED[datatype]
    return int(np.count_nonzero(np.frombuffer(data, np.uint8) < 0x80))  # the last byte of each number


def _fields(view: memoryview, most: int) -> Iterator[_Field]:
    at = count = 0
    while at < len(view):
        count += 1
        if count > most:
            raise ProtocolError(f"malformed message: more than {most} fields")
        start = at
        tag, begin = read_varint(view, at)
        if tag & 7 == _LENGTH_DELIMITED:
            length, begin = read_varint(view, begin)
            at = begin + length
            if at > len(view):
                raise ProtocolError(f"malformed message: a field ends at byte {at} of {len(view)}")
        else:
            at = skip_number(view, begin, tag & 7)
        yield _Field(tag >> 3, tag & 7, start, begin, at)
