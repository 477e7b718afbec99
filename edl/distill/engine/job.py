"""`LabelJob`: a request's worth of rows on its way through the engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from edl.distill.dispatch.actions import FailureKind, GiveUp
from edl.distill.transport.request import Payload
from edl.distill.transport.schema import Outputs
from edl.errors import BadOutputError, EDLError, PermanentError, RejectedError

__all__ = ["LabelJob", "give_up_error"]


@dataclass(eq=False)
class LabelJob:
    """A request's worth of rows.

    Attributes:
        number: rising in the order of delivery.
        payload: the tensors.
        on_done: called on the loop, once, with outputs or an error, and the model's version.
        on_started: called on the loop when the job is sent for the first time.
        open_attempts: requests under way for it.
        sent: whether it was sent at least once.
        finished: whether `on_done` was called, or will not be.
    """

    number: int
    payload: Payload
    on_done: Callable[[Outputs | EDLError, str], None]
    on_started: Callable[[], None]
    open_attempts: int = 0
    sent: bool = False
    finished: bool = False


def give_up_error(action: GiveUp) -> PermanentError:
    """Return the error that the training loop gets for a task that was given up."""
    words = "; ".join(f"{teacher}: {failure.kind.value}: {failure.message}" for teacher, failure in action.failures)
    kinds = {failure.kind for _, failure in action.failures}
    if FailureKind.REJECTED in kinds:
        return RejectedError(f"teachers refuse a request: {words}")
    return BadOutputError(f"no teacher could label a request: {words}")
