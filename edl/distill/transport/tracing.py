"""Names requests alike on both sides: an id in logs and errors, and the trace that the request is part of.

W3C Trace Context (https://www.w3.org/TR/trace-context/): `traceparent` is `00-TRACE-PARENT-FLAGS`, of 32, 16 and 2
hexadecimal digits. A request's id has 16 as well, so that it can stand for a span.
"""

from __future__ import annotations

import functools
import itertools
import os
import secrets
import sys
from collections.abc import Callable, Iterator

__all__ = ["RequestIds", "current_traceparent"]


class RequestIds(Iterator[str]):
    """Ids of the requests over a connection: 8 hexadecimal digits drawn for it, and the request's number in 8.

    Attributes:
        traceparent: for a request without a span of the user's: the trace of this process, the parent this connection.
    """

    def __init__(self) -> None:
        self._prefix = f"{secrets.randbelow(2**32 - 1) + 1:08x}"  # not 0, which is no valid span
        self._numbers = itertools.count()
        self.traceparent = f"00-{_trace_of(os.getpid())}-{self._prefix}00000000-00"

    def __next__(self) -> str:
        return f"{self._prefix}{next(self._numbers) & 0xFFFFFFFF:08x}"


@functools.lru_cache(maxsize=1)
def _trace_of(pid: int) -> str:
    """Return the id of the trace for requests of this process that belong to no other trace.

    A forked child has another.
    """
    return secrets.token_hex(16)


def current_traceparent() -> str:
    """Return the span of OpenTelemetry that is current in the calling thread; empty where there is none.

    A program without OpenTelemetry has not imported it, so it is not imported here.
    """
    get_current_span: Callable[[], object] | None = getattr(
        sys.modules.get("opentelemetry.trace"), "get_current_span", None
    )
    if get_current_span is None:
        return ""
    context = get_current_span().get_span_context()  # type: ignore[attr-defined]
    if not context.is_valid:
        return ""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"
