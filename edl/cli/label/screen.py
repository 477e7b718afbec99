"""Progress while labels are made: a bar in a terminal, else a line from time to time."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, SpinnerColumn, Task, TextColumn
from rich.progress import Progress as Bar
from rich.progress import TimeRemainingColumn as Remaining
from rich.text import Text

__all__ = ["Screen", "ShownProgress", "counted", "open_screen"]

_LINE_EVERY_S = 5.0
"""Between two lines of progress where the output is a file or a pipe."""


@dataclass(frozen=True)
class ShownProgress:
    """What is shown.

    Attributes:
        done: rows that have a label.
        total: rows of the data set, None if unknown.
        rows_per_s: labelled lately.
        left_s: seconds that the rest will take, None if unknown.
        who: who works on it, in words.
    """

    done: int
    total: int | None
    rows_per_s: float
    left_s: float | None
    who: str


Screen: TypeAlias = Callable[[ShownProgress], None]


def counted(number: int, name: str) -> str:
    """Return a number with what it counts."""
    return f"{number:,} {name}{'s' if number != 1 else ''}"


@contextlib.contextmanager
def open_screen(title: str, first: str) -> Iterator[Screen]:
    """Show progress on standard error.

    Args:
        title: of the bar.
        first: who works on it, as long as nothing is known.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _Lines()
        return
    columns: list[ProgressColumn] = [SpinnerColumn(), BarColumn(None), MofNCompleteColumn(), _Rate(), Remaining()]
    with Bar(*columns, TextColumn("{task.fields[who]}"), console=console) as bar:
        task = bar.add_task(title, total=None, who=first)

        def show(progress: ShownProgress) -> None:
            rate = progress.rows_per_s
            bar.update(task, completed=progress.done, total=progress.total, who=progress.who, rate=rate)

        yield show


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(f"{task.fields.get('rate', 0.0):,.0f} rows/s", "progress.data.speed")


class _Lines:
    def __init__(self) -> None:
        self._next = time.monotonic()

    def __call__(self, progress: ShownProgress) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + _LINE_EVERY_S
        done = f"{progress.done:,}"
        parts = [f"{done} of {progress.total:,} rows" if progress.total is not None else f"{done} rows"]
        parts += [f"{progress.rows_per_s:,.0f} rows/s", progress.who]
        if progress.left_s is not None:
            left_s = progress.left_s
            parts.append(f"{left_s / 60:.0f} min left" if left_s >= 120 else f"{left_s:.0f} s left")
        print(", ".join(parts), file=sys.stderr, flush=True)
