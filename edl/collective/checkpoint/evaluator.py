"""Evaluates the state at planned steps. Each evaluation is completed once, however often training restarts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from edl.collective.checkpoint.encoding import Path, decode, dotted, encode, from_json
from edl.collective.ranks import Group, all_reduce_max, gather_bytes, world_of
from edl.errors import ProtocolError, SettingsError

_VERSION = 1  # of the saved form; any other version is refused
_NONE_PENDING = -2  # smaller than any step, and than -1, which means before the first step


class Evaluator:
    """Evaluate a model at planned steps, and remember the results and which evaluation is in progress.

    Make the evaluator a field of the `State`, and call it through the `Checkpointer`::

        evaluator = Evaluator(accuracy, limit_s=3600)
        state = State(model=model, optimizer=optimizer, evaluator=evaluator)
        with Checkpointer(state) as checkpointer:
            step = checkpointer.restore()          # repeats an evaluation that a restart interrupted
            for step in range(step + 1, 1000):
                ...
                checkpointer.save(step)
                if step % 100 == 99:
                    checkpointer.evaluate(evaluator)

    Args:
        function: Function without arguments that every rank calls. It returns a plain value, such as a float or a dict
            of floats; a rank that returns None takes the result of the first rank that returns something else. It
            should log its result itself, because after a restart the loop does not reach this step again. The random
            numbers that it draws do not affect those of the training.
        limit_s: Longest time in seconds that an evaluation may take before it counts as a hang.
        name: Name of the evaluation in messages and in `edl status`.
        on_result: Function that every rank calls with the result, before the result is saved, so that its changes to
            the `State` are saved too: a step of a `ReduceLROnPlateau`, the best result so far, whether to stop. Don't
            make such changes in the loop after `evaluate`: if a restart happens in between, the loop continues with the
            next step, and the changes are never made.

    Attributes:
        results: Results by step.
        pending: Step whose evaluation has begun but has not produced a result yet, or None.

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
            raise SettingsError(f"limit_s={limit_s}: the longest time that the evaluation may take must be above 0")
        self.function = function
        self.limit_s = limit_s
        self.name = name
        self.on_result = on_result
        self.results: dict[int, Any] = {}
        self.pending: int | None = None

    def record(self, step: int, result: Any) -> None:
        """Record the result of the evaluation after `step`, then call `on_result`.

        Args:
            step: The step after which the model was evaluated.
            result: The result, a plain value.
        """
        self.results[step] = result
        self.pending = None
        if self.on_result is not None:
            self.on_result(result)

    def state_dict(self) -> dict[str, Any]:
        """Return the results, and which evaluation is in progress, as plain values."""
        return {"version": _VERSION, "results": dict(self.results), "pending": self.pending}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a saved state.

        Args:
            state: A state that `state_dict` returned, in this or another process.

        Raises:
            ProtocolError: The state was saved by another version of EDL.
        """
        if state.get("version") != _VERSION:
            raise ProtocolError(f"an Evaluator's state has version {state.get('version')!r}: this EDL reads {_VERSION}")
        self.results = dict(state["results"])
        self.pending = state["pending"]


def share_result(evaluator: Evaluator, result: Any, group: Group) -> Any:
    """Return, on every rank, the result of the first rank that has a result. Collective."""
    form = encode(result, _refuse_tensor, (evaluator.name,))
    if world_of(group) > 1:
        gathered = gather_bytes(form, group)
        form = next((form for form in gathered if form != b"null"), form)
    return decode(from_json(form), _no_tensor)


def agree_on_pending(evaluator: Evaluator, group: Group) -> None:
    """Agree on the evaluation to repeat. A rank that was lost may lack a result that other ranks have. Collective."""
    if world_of(group) == 1:
        return
    mine = _NONE_PENDING if evaluator.pending is None else evaluator.pending
    (step,) = all_reduce_max([mine], group)
    if step == _NONE_PENDING:
        return
    known = encode([evaluator.results[step]] if step in evaluator.results else None, _refuse_tensor)
    results = [from_json(form) for form in gather_bytes(known, group)]
    found = next((form for form in results if form is not None), None)
    if found is None:
        evaluator.pending = step
    elif step not in evaluator.results:
        evaluator.record(step, decode(found, _no_tensor)[0])


def _refuse_tensor(value: Any, path: Path) -> int:
    raise SettingsError(
        f"{dotted(path)}: the result contains a {type(value).__name__}, which would be saved with every step: "
        "return numbers (item(), tolist())"
    )


def _no_tensor(number: int) -> Any:
    raise ProtocolError(f"a result of an evaluation names tensor {number}, but results contain none")
