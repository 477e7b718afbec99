"""A request on its way through the server, from its arrival to its response."""

from __future__ import annotations

import time
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, TypeAlias

from edl_serving.messages.request import DecodedRequest
from edl_serving.request_error import RequestError, quote

__all__ = ["InferenceJob", "Shapes"]

Shapes: TypeAlias = tuple[Hashable, ...]
"""Of a job's inputs, without the rows, and what else jobs of one batch have in common (`RequestPlan.shapes`)."""


@dataclass(eq=False)
class InferenceJob:
    """A request on its way through the server.

    Attributes:
        request: what to compute.
        rows: how many, above 0.
        shapes: of its inputs without the rows; jobs of the same shapes can share a batch.
        arrived: when, in seconds of a monotonic clock.
        deadline: after which the client does not wait for the response, on the same clock.
        reply: the future that is done when `answer` is set, of a job in the queue.
        cancelled: whether the client has cancelled it.
        id_bytes: for a response on a stream, the id that it carries (`codec.id_field`); None for a unary call.
        client: who sent it (`clients.client_of`).
        nbytes: of the message that it came in, of Python objects that were made of it, and of its answer.
        answer_nbytes: of its answer alone.
        done: rows computed so far, of a job with more rows than a batch holds.
        partial: outputs of these rows.
        started: when its computation began, on the clock of `arrived`; 0 until then.
        ended: when its computation ended; 0 until then.
        id: by which its student knows it, empty if it sent none.
        answer: the response's bytes, or the error; None until computed.
    """

    request: DecodedRequest
    rows: int
    shapes: Shapes
    arrived: float
    deadline: float
    reply: Any = None
    cancelled: bool = False
    id_bytes: bytes | None = None
    client: str = ""
    nbytes: int = 0
    answer_nbytes: int = 0
    done: int = 0
    partial: Any = None
    started: float = 0.0
    ended: float = 0.0
    id: str = ""
    answer: bytes | RequestError | None = None

    @property
    def origin(self) -> str:
        """Id and client, for the end of a log line; empty without an id."""
        of = f" of {self.client}" if self.client else ""
        return f" (request {quote(self.id)}{of})" if self.id else ""

    @property
    def unfinished(self) -> bool:
        """Whether it was computed in part, and its client waits for the rest."""
        return self.answer is None and not self.cancelled and 0 < self.done < self.rows

    @classmethod
    def of(
        cls,
        request: DecodedRequest,
        timeout_s: float | None,
        client: str,
        nbytes: int,
        request_id: str,
        id_bytes: bytes | None = None,
    ) -> InferenceJob:
        """Make a job of a request that arrives now.

        Args:
            request: what to compute.
            timeout_s: after which the client does not wait any more; None for never.
            client: who sent it.
            nbytes: of its message.
            request_id: by which its student knows it; may be empty.
            id_bytes: see `InferenceJob`.
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
            nbytes=nbytes + plan.object_bytes + plan.answer_bytes,
            answer_nbytes=plan.answer_bytes,
            id=request_id,
            id_bytes=id_bytes,
        )
