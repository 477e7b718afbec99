"""By how much remote teachers slow down a student: its steps per second with soft labels, divided by those without.

The students compute on one core: `student` at the pace of a ResNet50 on a V100 (230 images/s), `fast_student` four to
five times as fast, and `lm_student`, a small language model. For each student, two teachers sleep instead of computing;
their pace is set so that they are three times as fast as that student. Images and labels really travel over TCP.
`..._limit` is the ratio for a student that has no teachers, but runs while bare gRPC passes the same bytes on the same
two cores.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

from benchmarks._child import Child
from benchmarks._harness import Goal, Options, Spread, divide, main, note, take_turns
from benchmarks._load import CLASSES, KEEP_MEMORY, MAX_TOKENS, ROWS
from edl.testing import LocalTeacher

GOALS = [Goal("student", 0.98), Goal("fast_student", 0.95), Goal("lm_student", 0.95)]
_STUDENTS = ("student", "fast_student", "lm_student")
_TEACHERS = 2
_HEADROOM = 3.0


def measure(options: Options) -> dict[str, list[float]]:
    """Return the ratios of every round."""
    note("| student | alone, steps/s | distilled, steps/s | CPU alone, ms/step | distilled |")
    note("| --- | ---: | ---: | ---: | ---: |")
    found: dict[str, list[float]] = {}
    for name in _STUDENTS:
        found |= _one(name, options)
    return found


def _one(name: str, options: Options) -> dict[str, list[float]]:
    command = [sys.executable, "-m", "benchmarks._student", name]
    seconds = 2 * options.seconds if name == "student" else options.seconds  # only a few steps per second
    with ExitStack() as stack:
        alone = stack.enter_context(Child(command, KEEP_MEMORY))
        pace_s = ROWS / alone.ask(seconds=min(2.0, options.seconds))["rows_s"]
        start = _start_language_model if name == "lm_student" else _start_classifier
        teachers = [stack.enter_context(start(number, pace_s)) for number in range(_TEACHERS)]
        endpoints = ",".join(teacher.endpoint for teacher in teachers)
        distilled = stack.enter_context(Child([*command, "--teachers", endpoints], KEEP_MEMORY))

        bare = stack.enter_context(Child([sys.executable, "-m", "benchmarks._bare_grpc"], KEEP_MEMORY))
        threads = stack.enter_context(ThreadPoolExecutor(1))

        def ask(child: Child) -> Callable[[], dict[str, Any]]:
            return lambda: child.ask(seconds=seconds)

        def ask_beside() -> dict[str, Any]:
            passing = threads.submit(bare.ask, dtype="uint8", in_flight=1, seconds=seconds, pace_s=pace_s)
            figures = alone.ask(seconds=seconds)
            passing.result()
            return figures

        sides = {"alone": ask(alone), "distilled": ask(distilled)}
        if name != "lm_student":  # the bare client passes images
            sides["beside"] = ask_beside
        rounds = take_turns(sides, options.repeats)
    steps = {side: [figure["rows_s"] / ROWS for figure in figures] for side, figures in rounds.items()}
    cpu_ms = {side: [figure["cpu_us_row"] * ROWS / 1e3 for figure in figures] for side, figures in rounds.items()}
    cells = [f"{Spread.of(figures[side]).median:.3g}" for figures in (steps, cpu_ms) for side in ("alone", "distilled")]
    note(f"| {name} | {' | '.join(cells)} |")
    found = {name: divide(steps["distilled"], steps["alone"])}
    if "beside" in steps:
        found[f"{name}_limit"] = divide(steps["beside"], steps["alone"])
    return found


def _start_language_model(number: int, pace_s: float) -> LocalTeacher:
    return LocalTeacher(
        "benchmarks._models:TokenSleeper",
        serve={"max-batch": MAX_TOKENS, "shared-memory": False},
        seconds=pace_s * _TEACHERS / _HEADROOM,
    )


def _start_classifier(number: int, pace_s: float) -> LocalTeacher:
    return LocalTeacher(
        "benchmarks._models:Sleeper",
        serve={"max-batch": ROWS, "shared-memory": False},
        number=number,
        seconds=pace_s * _TEACHERS / _HEADROOM,
        classes=CLASSES,
    )


if __name__ == "__main__":
    main("degradation", measure, GOALS, __doc__)
