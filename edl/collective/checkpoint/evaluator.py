"""An evaluation that belongs to a state of training: made once for a planned step, whatever restarts come."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from edl.collective.checkpoint.encoding import Path, decode, dotted, encode, from_json
from edl.collective.checkpoint.memory import transfer
from edl.collective.ranks import world_of
from edl.errors import ProtocolError, SettingsError

__all__ = ["Evaluator", "agree_on_pending", "share_result"]

_VERSION = 1  # of the saved form; another is refused
_NONE_PENDING = -2
"""Below every step, and below -1, which stands for the time before the first."""


class Evaluator:
    """Evaluates a model at planned steps, and remembers the results and which evaluation is under way.

    A field of the `State`, called through the `Checkpointer`::

        evaluator = Evaluator(accuracy, limit_s=3600)
        state = State(model=model, optimizer=optimizer, evaluator=evaluator)
        with Checkpointer(state) as checkpointer:
            step = checkpointer.restore()          # makes an evaluation that a restart broke off
            for step in range(step + 1, 1000):
                ...
                checkpointer.save(step)
                if step % 100 == 99:
                    checkpointer.evaluate(evaluator)

    Args:
        function: called on every rank without arguments; returns a plain value, such as a float or a dict of
            floats. Ranks that return None take the result of the first rank that does not. It
            should log its result itself, since the loop does not come by again after a restart. Random numbers that it
            draws leave those of training as they were.
        limit_s: the longest time in seconds that it may take, before it counts as a hang.
        name: in messages and in `edl status`.
        on_result: called on every rank with the result before that is saved, so that what it changes in the `State` is
            saved with it: a step of a `ReduceLROnPlateau`, the best result so far, whether to stop. What the loop does
            after `evaluate` is left out where a restart comes in between, since the loop goes on with the next step.

    Attributes:
        results: by step.
        pending: the step whose evaluation has begun and has no result yet, None for none.

    Raises:
        SettingsError: `limit_s` is not above 0.
    """

    def __init__(
        self,
        function: Callable[[], Any],
        *,
        limit_s: float,
        name: str = "evaluation",
        on_result: Callable[[Any], object] | None = None,
    ) -> None:
        if not limit_s > 0:
            raise SettingsError(f"limit_s={limit_s}: must be above 0, the longest time that the evaluation may take")
        self.function = function
        self.limit_s = limit_s
        self.name = name
        self.on_result = on_result
        self.results: dict[int, Any] = {}
        self.pending: int | None = None

    def record(self, step: int, result: Any) -> None:
        """Keep the result of the evaluation after `step`, and have `on_result` act on it.

        Args:
            step: whose evaluation it is.
            result: a plain value.
        """
        self.results[step] = result
        self.pending = None
        if self.on_result is not None:
            self.on_result(result)

    def state_dict(self) -> dict[str, Any]:
        """Return plain values: the results, and which evaluation is under way."""
        return {"version": _VERSION, "results": dict(self.results), "pending": self.pending}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with what `state_dict` returned.

        Args:
            state: of an evaluator in this or another process.

        Raises:
            ProtocolError: it is of another version of EDL.
        """
        if state.get("version") != _VERSION:
            raise ProtocolError(f"an evaluator's state of version {state.get('version')!r}: this EDL reads {_VERSION}")
        self.results = dict(state["results"])
        self.pending = state["pending"]


def share_result(evaluator: Evaluator, result: Any, group: transfer.Group) -> Any:
    """Return the result of the first rank that has any, on every rank. Collective.

    Raises:
        SettingsError: the result is of a type that cannot be saved.
    """
    form = encode(result, _refuse_tensor, (evaluator.name,))
    if world_of(group) > 1:
        gathered = transfer.gather_bytes(form, group)
        form = next((form for form in gathered if form != b"null"), form)
    return decode(from_json(form), _no_tensor)


def agree_on_pending(evaluator: Evaluator, group: transfer.Group) -> None:
    """Agree with the other ranks on the evaluation that is to be made again, if there is one. Collective.

    A rank that was lost between two saves may have saved that it is under way where another rank has its result.
    """
    if world_of(group) == 1:
        return
    mine = _NONE_PENDING if evaluator.pending is None else evaluator.pending
    (step,) = transfer.all_reduce_max([mine], group)
    if step == _NONE_PENDING:
        return
    known = encode([evaluator.results[step]] if step in evaluator.results else None, _refuse_tensor)
    results = [from_json(form) for form in transfer.gather_bytes(known, group)]
    found = next((form for form in results if form is not None), None)
    if found is None:
        evaluator.pending = step
    elif step not in evaluator.results:
        evaluator.record(step, decode(found, _no_tensor)[0])


def _refuse_tensor(value: Any, path: Path) -> int:
    raise SettingsError(
        f"{dotted(path)}: the result has a {type(value).__name__}, which would be saved with every step from now on: "
        "return numbers (item(), tolist())"
    )


def _no_tensor(number: int) -> Any:
    raise ProtocolError(f"a result of an evaluation names tensor {number}, and results have none")
