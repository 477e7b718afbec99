"""Checks of large headers before they are parsed: they may be as large as their typed contents make them."""

from __future__ import annotations

import math

from edl.errors import ProtocolError
from edl.protocol import codec
from edl.protocol.headers import check_contents, outline
from edl_serving.messages.request_plan import plan_request
from edl_serving.model import ServedModel
from edl_serving.request_error import invalid_argument, quote

__all__ = ["check_large_header"]

_MAX_REST = 1 << 20
"""Bytes of names, shapes and parameters: a hundred inputs take some ten thousand."""

_NUMBER_NBYTES = 16
"""Of an element of typed contents: up to 8 as protobuf keeps it, and as many in the array that it becomes."""

_STRING_NBYTES = 64
"""Of one of BYTES, beside its own: 16 as protobuf keeps it, and 41 of CPython's object and the array."""


def check_large_header(header: bytes, model: ServedModel, max_rows: int, max_bytes: int) -> None:
    """Check what can be known of a header without parsing its typed contents.

    Args:
        header: the request without its raw tensors.
        model: that is served.
        max_rows: of a request.
        max_bytes: what typed contents may become in memory.

    Raises:
        RequestError: a part is too large, or is not what the model takes.
        ProtocolError: the header is malformed.
    """
    rest, contents = outline(header)
    if len(rest) > _MAX_REST:
        raise invalid_argument(
            f"{len(rest):,} bytes of names, shapes and parameters, at most {_MAX_REST:,}: "
            "tensors belong into raw_input_contents"
        )
    parsed = codec.parse_request(rest)
    plan_request(parsed, model, max_rows)
    total = 0
    for tensor, parts in zip(parsed.inputs, contents, strict=True):
        if not parts:
            continue
        count = math.prod(tensor.shape)
        is_bytes = tensor.datatype == "BYTES"
        total += count * (_STRING_NBYTES if is_bytes else _NUMBER_NBYTES)
        if total > max_bytes:
            raise invalid_argument(
                f"input {quote(tensor.name)}: {count:,} elements as typed contents would take {total:,} bytes of "
                f"memory, at most {max_bytes:,} (edl serve --max-message): send raw_input_contents"
            )
        if is_bytes and sum([len(part) for part in parts]) // 2 * _STRING_NBYTES <= max_bytes:
            continue  # an element takes two bytes at least, so these cannot be too many
        try:
            check_contents(tensor.datatype, count, parts)
        except ProtocolError as exc:
            raise invalid_argument(f"input {quote(tensor.name)}: {exc}") from exc
