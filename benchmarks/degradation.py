"""What soft labels from remote teachers cost a student: its steps a second with them, against those alone.

The student really computes, on one core. Two teachers sleep for as long as one that keeps three times the student's
pace would compute; what crosses between them is real (32 uint8 images of 3x224x224 a step, 1,000 float32 a row back,
without shared memory, since teachers are elsewhere as a rule). On a machine of two cores the teachers' side of the
network, and theirs of gRPC, is charged to the student.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack

from benchmarks._child import Child
from benchmarks._harness import Goal, Options, Spread, divide, main, note, take_turns
from benchmarks._load import CLASSES, KEEP_MEMORY, ROWS
from edl.testing import LocalTeacher

GOALS = [Goal("student", 0.97)]
_TEACHERS = 2
_HEADROOM = 3.0


def measure(options: Options) -> dict[str, list[float]]:
    """The ratio of every round."""
    command = [sys.executable, "-m", "benchmarks._student"]
    with ExitStack() as stack:
        alone = stack.enter_context(Child(command, KEEP_MEMORY))
        pace_s = ROWS / alone.ask(seconds=min(2.0, options.seconds))["rows_s"]
        sleep_s = pace_s * _TEACHERS / _HEADROOM
        teachers = [
            stack.enter_context(
                LocalTeacher(
                    "benchmarks._models:Sleeper",
                    serve={"max-batch": ROWS, "shared-memory": False},
                    number=number,
                    seconds=sleep_s,
                    classes=CLASSES,
                )
            )
            for number in range(_TEACHERS)
        ]
        endpoints = ",".join(teacher.endpoint for teacher in teachers)
        distilled = stack.enter_context(Child([*command, "--teachers", endpoints], KEEP_MEMORY))
        rounds = take_turns(
            {
                "alone": lambda: alone.ask(seconds=options.seconds),
                "distilled": lambda: distilled.ask(seconds=options.seconds),
            },
            options.repeats,
        )
    steps = {name: [one["rows_s"] / ROWS for one in figures] for name, figures in rounds.items()}
    note("| student | steps/s |\n| --- | ---: |")
    for name, rates in steps.items():
        note(f"| {name} | {Spread.of(rates)} |")
    note(f"\nA step takes {pace_s * 1e3:.0f} ms, each of {_TEACHERS} teachers {sleep_s * 1e3:.0f} ms a batch.\n")
    return {"student": divide(steps["distilled"], steps["alone"])}


if __name__ == "__main__":
    main("degradation", measure, GOALS, __doc__)
