"""What students cost Triton's own clients: the clients' p99 latency with a student, divided by that without one.

A real Triton serves a model with one instance and two priority levels. Its own clients use half of its capacity. A
student takes as much as it can get: without a priority (`default`), with the lowest level (`auto`), or with the lowest
level and few rows and requests at a time (`lowest`). The model takes 40 ms per batch in `batch_...` figures, and 10 ms
plus 5 ms per row in `row_...` figures.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from benchmarks._borrowed import Model, ask_as_its_clients, p99, start, student, undisturbed
from benchmarks._harness import Goal, Options, Spread, divide, main, note, take_turns
from edl.distill.transport.schema import Priority
from tests.plugins_triton import TritonFactory

GOALS = [Goal("batch_auto", 1.2, "at most"), Goal("row_lowest", 1.2, "at most")]
_MODELS = {"batch": Model(0.04, 0.0, 1), "row": Model(0.01, 0.005, 4)}
_PRIORITIES: tuple[Priority, ...] = ("default", "auto", "lowest")


def measure(options: Options) -> dict[str, list[float]]:
    """Return the ratios of every round."""
    ratios: dict[str, list[float]] = {}
    with undisturbed():
        triton = TritonFactory()
        try:
            for name, model in _MODELS.items():
                ratios |= _measure(name, model, start(triton, model).endpoint, options)
        finally:
            triton.close()
    return ratios


def _measure(name: str, model: Model, endpoint: str, options: Options) -> dict[str, list[float]]:
    labelled: dict[Priority, int] = dict.fromkeys(_PRIORITIES, 0)

    def alone() -> float:
        return p99(ask_as_its_clients(endpoint, model, seed=1))

    def beside(priority: Priority) -> float:
        with student(endpoint, priority) as rows:
            before = sum(rows)
            found = alone()
            labelled[priority] += sum(rows) - before
        return found

    alone()  # a warm-up, which is not measured
    sides: dict[str, Callable[[], float]] = {"alone": alone}
    sides |= {str(priority): partial(beside, priority) for priority in _PRIORITIES}
    rounds = take_turns(sides, options.repeats)
    note(f"| {name}: beside | 99th percentile, ms | rows labelled in a round |")
    note("| --- | ---: | ---: |")
    note(f"| none | {Spread.of([1e3 * seconds for seconds in rounds['alone']]).median:.3g} | |")
    for priority in _PRIORITIES:
        median_ms = Spread.of([1e3 * seconds for seconds in rounds[str(priority)]]).median
        note(f"| a student, {priority} | {median_ms:.3g} | {labelled[priority] // options.repeats} |")
    note("")
    return {f"{name}_{priority}": divide(rounds[str(priority)], rounds["alone"]) for priority in _PRIORITIES}


if __name__ == "__main__":
    main("borrowed_triton", measure, GOALS, __doc__)
