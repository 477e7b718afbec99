"""What all benchmarks share: options, sides that take turns, medians and ranges of ratios, a table and a JSON line.

A machine's speed changes from minute to minute, so figures from one run are divided by one another round by round, and
only the ratios are compared with goals::

    def measure(options: Options) -> dict[str, list[float]]:
        rounds = take_turns({"ours": ours, "peer": peer}, options.repeats)
        return {"vs_peer": divide(rounds["ours"], rounds["peer"])}

    if __name__ == "__main__":
        main("example", measure, [Goal("vs_peer", 0.9)], __doc__)
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

__all__ = ["Goal", "Options", "Spread", "divide", "main", "note", "positive", "progress", "take_turns"]

T = TypeVar("T")


@dataclass(frozen=True)
class Goal:
    """A bound on the figure `key`: at least or at most `value`, for the median of all rounds or for every round."""

    key: str
    value: float
    sense: Literal["at least", "at most"] = "at least"
    always: bool = False

    def met(self, found: Spread) -> bool:
        """Return whether a figure meets the goal."""
        if self.sense == "at least":
            return (found.min if self.always else found.median) >= self.value
        return (found.max if self.always else found.median) <= self.value

    def __str__(self) -> str:
        return f"{self.sense} {self.value:g}{', always' if self.always else ''}"


@dataclass(frozen=True)
class Options:
    """The options on the command line.

    Attributes:
        repeats: Number of rounds. Every side is measured once per round.
        seconds: Seconds for which a side runs in a round.
        quick: Only check that everything works; the figures mean little.
    """

    repeats: int
    seconds: float
    quick: bool


@dataclass(frozen=True)
class Spread:
    """Median, minimum and maximum over the rounds."""

    median: float
    min: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return the spread of one or more values."""
        return cls(statistics.median(values), min(values), max(values))

    def __str__(self) -> str:
        between = "" if self.min == self.max else f" ({self.min:.3g} to {self.max:.3g})"
        return f"{self.median:.3g}{between}"


def take_turns(sides: Mapping[str, Callable[[], T]], repeats: int) -> dict[str, list[T]]:
    """Measure every side once per round. Each round starts with a different side."""
    rounds: dict[str, list[T]] = {name: [] for name in sides}
    order = list(sides)
    for number in range(repeats):
        turn = number % len(order)
        for name in order[turn:] + order[:turn]:
            progress(f"round {number + 1} of {repeats}: {name}")
            rounds[name].append(found := sides[name]())
            if isinstance(found, float):  # on record if the benchmark is stopped early
                progress(f"  {found:.4g}")
    return rounds


def divide(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Return the ratio in each round."""
    return [our / their for our, their in zip(ours, theirs, strict=True)]


_notes: list[str] = []


def note(text: str) -> None:
    """Print a note in Markdown to standard error, since standard output may be one JSON line."""
    _notes.append(text)
    print(text, file=sys.stderr, flush=True)


def progress(text: str) -> None:
    """Print what the benchmark is doing now."""
    print(f"... {text}", file=sys.stderr, flush=True)


def main(
    name: str,
    measure: Callable[[Options], Mapping[str, Sequence[float]]],
    goals: Sequence[Goal],
    description: str | None,
    argv: Sequence[str] | None = None,
    own: Sequence[argparse.ArgumentParser] = (),
) -> None:
    """Run one benchmark from the command line.

    Args:
        measure: Returns the values of all rounds for each key: ratios, or seconds if the key ends in `_s`.
        goals: Goals for some or all of the keys.
        own: Parser of the benchmark's own options, which it has already read; shown in the help.
    """
    parser = argparse.ArgumentParser(
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        prog=f"benchmarks/{name}.py",
        parents=list(own),
    )
    parser.add_argument("--repeats", type=positive, help="rounds (default 5)")
    parser.add_argument("--seconds", type=float, help="seconds for which a side runs in a round (default 4)")
    parser.add_argument("--quick", action="store_true", help="run one short round, only to check that it works")
    parser.add_argument("--json", action="store_true", help="print one JSON line instead of the table")
    parser.add_argument("--notes", type=Path, metavar="FILE", help="also write the notes to this file")
    given = parser.parse_args(argv)
    _notes.clear()
    options = Options(
        repeats=given.repeats or (1 if given.quick else 5),
        seconds=given.seconds or (0.5 if given.quick else 4.0),
        quick=given.quick,
    )
    spreads = {key: Spread.of(values) for key, values in measure(options).items()}
    if given.notes is not None:
        given.notes.write_text("\n".join(_notes))
    if given.json:
        ratios = {
            key: {"median": spread.median, "min": spread.min, "max": spread.max} for key, spread in spreads.items()
        }
        print(json.dumps({"benchmark": name, "ratios": ratios}))
    else:
        print(table(spreads, goals))


def table(spreads: Mapping[str, Spread], goals: Sequence[Goal]) -> str:
    """Return a Markdown table of figures and goals. A goal without a figure is shown as not measured."""
    wanted = {goal.key: goal for goal in goals}
    lines = ["| figure | median (range) | goal |", "| --- | ---: | --- |"]
    for key in [*spreads, *(key for key in wanted if key not in spreads)]:
        goal = wanted.get(key)
        if key not in spreads:
            lines.append(f"| {key} | | {goal}: not measured |")
            continue
        spread = spreads[key]
        verdict = "" if goal is None else f"{goal}: {'met' if goal.met(spread) else '**missed**'}"
        lines.append(f"| {key} | {spread} | {verdict} |")
    return "\n".join(lines)


def positive(text: str) -> int:
    """Return a number from the command line, which must be 1 or more."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return value
