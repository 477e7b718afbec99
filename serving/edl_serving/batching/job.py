"""A request on its way through the server, from its arrival to its answer."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, TypeAlias

from edl_serving.messages.request import Request
from edl_serving.request_error import quote

__all__ = ["Job", "Shapes"]

Shapes: TypeAlias = tuple[tuple[int, ...], ...]
"""Of a job's inputs, without the rows."""


@dataclass(eq=False)
class Job:
    """A request on its way through the server.

    Attributes:
        request: what to compute.
        rows: how many, above 0.
        shapes: of its inputs without the rows; jobs with the same ones can share a batch.
        arrived: when, in seconds of a monotonic clock.
        deadline: after which nobody waits for the answer.
        reply: whatever the owner needs to hand the answer over.
        cancelled: nobody waits any more.
        id_bytes: for an answer on a stream, the id that it carries (`codec.id_field`); None for a call of its own.
        client: who sent it (`clients.client_of`).
        nbytes: of the message that it came in, and of Python objects that were made of it.
        done: rows computed so far, of a job with more than a batch holds.
        partial: their outputs.
        started, ended: when its computation did, on the clock of `arrived`; 0 until then.
        id: by which its student knows it, empty if it told none.
        answer: the response's bytes, or the error; None until computed.
    """

    request: Request
    rows: int
    shapes: Shapes
    arrived: float
    deadline: float
    reply: Any = None
    cancelled: bool = False
    id_bytes: bytes | None = None
    client: str = ""
    nbytes: int = 0
    done: int = 0
    partial: Any = None
    started: float = 0.0
    ended: float = 0.0
    id: str = ""
    answer: bytes | Exception | None = None

    @property
    def origin(self) -> str:
        """Where it comes from, in words for a log line; empty where that is not known."""
        of = f" of {self.client}" if self.client else ""
        return f" (request {quote(self.id)}{of})" if self.id else ""

    @property
    def unfinished(self) -> bool:
        """Whether it was computed in part, and somebody waits for the rest."""
        return self.answer is None and not self.cancelled and 0 < self.done < self.rows

    @classmethod
    def of(
        cls,
        request: Request,
        timeout_s: float | None,
        client: str,
        nbytes: int,
        request_id: str,
        id_bytes: bytes | None = None,
    ) -> Job:
        """A job that arrives now.

        Args:
            timeout_s: after which nobody waits any more; None for never.
        """
        now = time.monotonic()
        deadline = float("inf") if timeout_s is None else now + timeout_s
        plan = request.plan
        return cls(
            request,
            plan.rows,
            plan.shapes,
            now,
            deadline,
            client=client,
            nbytes=nbytes + plan.object_bytes,
            id=request_id,
            id_bytes=id_bytes,
        )
