"""How much a greedy student delays a modest one at the same teacher: the 99th percentile of the modest one's latency.

The modest student sends 4 rows at a time; the greedy one sends as many requests of 256 rows as its reader allows. The
teacher sleeps 20 ms per batch of up to 32 rows. `vs_peer` compares with two modest students; `vs_alone` compares
with a single one.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack

from benchmarks._child import Child
from benchmarks._harness import Goal, Options, Spread, divide, main, note, take_turns
from edl.testing import LocalTeacher

GOALS = [Goal("vs_peer", 2.0, "at most")]
_BATCH_S = 0.02
_BATCH_ROWS = 32


def measure(options: Options) -> dict[str, list[float]]:
    """Return the ratios of every round."""
    command = [sys.executable, "-m", "benchmarks._fair_student"]
    with ExitStack() as stack:
        teacher = stack.enter_context(
            LocalTeacher("benchmarks._models:Sleeper", max_batch=_BATCH_ROWS, seconds=_BATCH_S)
        )
        student, other = (stack.enter_context(Child(command)) for _ in range(2))

        def beside(kind: str | None) -> Callable[[], float]:
            def ask() -> float:
                endpoint, seconds = teacher.endpoint, options.seconds
                company = threading.Thread(target=lambda: other.ask(kind=kind, endpoint=endpoint, seconds=seconds))
                if kind is not None:
                    company.start()
                times = sorted(student.ask(kind="modest", endpoint=endpoint, seconds=seconds)["times"])
                if kind is not None:
                    company.join()
                return float(times[int(0.99 * (len(times) - 1))])

            return ask

        sides = {"alone": beside(None), "peer": beside("modest"), "greedy": beside("greedy")}
        rounds = take_turns(sides, options.repeats)
    note("| beside | 99th percentile, ms |")
    note("| --- | ---: |")
    for side, name in (("alone", "none"), ("peer", "a modest student"), ("greedy", "a greedy student")):
        note(f"| {name} | {Spread.of([1e3 * seconds for seconds in rounds[side]])} |")
    return {
        "vs_peer": divide(rounds["greedy"], rounds["peer"]),
        "vs_alone": divide(rounds["greedy"], rounds["alone"]),
    }


if __name__ == "__main__":
    main("fairness", measure, GOALS, __doc__)
