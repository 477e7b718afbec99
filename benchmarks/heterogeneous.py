"""The reader's throughput with unequal and irregular teachers, compared with the sum of the teachers' rates.

Three teachers sleep 10 ms per batch and a fourth sleeps 40 ms; every 33rd batch takes ten times as long. A student at
half pace uses half of the teachers' capacity.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from benchmarks._child import Child
from benchmarks._harness import Goal, Options, Spread, divide, main, note, take_turns
from benchmarks._load import ROWS
from edl.testing import LocalTeacher

GOALS = [Goal("of_sum", 0.95)]
_FAST_S, _SLOW_S = 0.010, 0.040
_STRAGGLE_EVERY, _STRAGGLE_FACTOR = 33, 10.0
_PACE = 0.5
"""Share of the sum of the rates at which latencies are measured."""


def measure(options: Options) -> dict[str, list[float]]:
    """Return the ratio of every round."""
    seconds = 2 * options.seconds  # few batches per second, and one in 33 takes as long as ten
    with ExitStack() as stack:
        teachers = []
        for number, sleep_s in enumerate((_FAST_S, _FAST_S, _FAST_S, _SLOW_S)):
            teacher = LocalTeacher(
                "benchmarks._models:Sleeper",
                serve={"max-batch": ROWS},
                number=number,
                seconds=sleep_s,
                every=_STRAGGLE_EVERY,
                factor=_STRAGGLE_FACTOR,
            )
            teachers.append(stack.enter_context(teacher))
        command = [
            sys.executable,
            "-m",
            "benchmarks._teachers_load",
            ",".join(teacher.endpoint for teacher in teachers),
        ]
        child = stack.enter_context(Child(command))
        pace = _PACE * child.ask(side="bare", seconds=options.seconds)["rows_s"] / ROWS

        def reader(hedging: bool, pace: float) -> Callable[[], dict[str, Any]]:
            return lambda: child.ask(side="reader", hedging=hedging, pace=pace, seconds=seconds)

        rounds = take_turns(
            {
                "sum of rates": lambda: child.ask(side="bare", seconds=seconds),
                "reader": reader(True, 0.0),
                "reader without hedging": reader(False, 0.0),
                "reader, half pace": reader(True, pace),
                "reader without hedging, half pace": reader(False, pace),
            },
            options.repeats,
        )
    _tell(rounds)
    rates = [[figure["rows_s"] for figure in rounds[side]] for side in ("reader", "sum of rates")]
    return {"of_sum": divide(*rates)}


def _tell(rounds: dict[str, list[dict[str, Any]]]) -> None:
    note("| side | batches/s | p50, ms | p99, ms | extra requests |\n| --- | ---: | ---: | ---: | ---: |")
    for name, figures in rounds.items():
        cells = [f"{Spread.of([figure['rows_s'] / ROWS for figure in figures]).median:.0f}"]
        for key in ("p50_s", "p99_s"):
            paced = "pace" in name
            cells.append(str(Spread.of([figure[key] * 1e3 for figure in figures])) if paced else "")
        cells.append(f"{Spread.of([figure['extra'] for figure in figures]).max:.1%}" if "extra" in figures[0] else "")
        note(f"| {name} | {' | '.join(cells)} |")
    note("")


if __name__ == "__main__":
    main("heterogeneous", measure, GOALS, __doc__)
