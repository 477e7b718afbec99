"""One request's worth of rows on its way through the engine, and the error that it ends with if nobody labels it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from edl.distill.actions import FailureKind, GiveUp
from edl.distill.request import Outputs, Payload
from edl.errors import BadOutputError, EDLError, PermanentError, RejectedError

__all__ = ["Job", "error_of"]


@dataclass(eq=False)
class Job:
    """One request's worth of rows.

    Attributes:
        done: called on the loop, once, with outputs or an error, and the model's version.
        started: called on the loop when the job is sent for the first time.
    """

    number: int
    payload: Payload
    done: Callable[[Outputs | EDLError, str], None]
    started: Callable[[], None]
    running: int = 0
    sent: bool = False
    finished: bool = False


def error_of(action: GiveUp, rows: int, max_rows: int) -> PermanentError:
    """What the training loop is told of a task that was given up.

    Args:
        rows: of the request.
        max_rows: that the teachers take in one request, 0 if they do not say.
    """
    words = "; ".join(f"{teacher}: {failure.kind.value}: {failure.message}" for teacher, failure in action.failures)
    kinds = {failure.kind for _, failure in action.failures}
    if FailureKind.REJECTED in kinds:
        if 0 < max_rows < rows:
            words += (
                f"; the request has {rows} rows, and they take {max_rows}: set batch_rows (set_teacher_batch_size) to "
                "that or less, or leave it out"
            )
        return RejectedError(f"teachers refuse a request: {words}")
    return BadOutputError(f"no teacher could label a request: {words}")
