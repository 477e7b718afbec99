"""What the demo shows while it runs: a live bar in a terminal, plain lines elsewhere."""

from __future__ import annotations

import abc
import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.text import Text

__all__ = ["EVENT_STYLES", "Bar", "Screen"]

EVENT_STYLES = {"kill": "bold red", "join": "bold green", "drain": "bold yellow"}

# Not a terminal: a line of progress so often.
_PLAIN_S = 5.0


class Screen:
    """Prints for people. `console` is rich's."""

    def __init__(self, console: Console | None = None) -> None:
        # Not a terminal: lines must not be wrapped at a width that nobody has.
        self.console = console or Console(highlight=False, width=None if sys.stdout.isatty() else 110)
        self._step = 0

    def step(self, text: str) -> None:
        """Say what comes next."""
        self._step += 1
        self.console.print(Text(f"{self._step}. {text}", "bold"))

    def say(self, text: str, style: str = "") -> None:
        """Something about the present step."""
        self.console.print(Text(f"   {text}", style))

    def event(self, kind: str, text: str) -> None:
        """Something that happens to a teacher."""
        self.say(f"{kind.upper():<5} {text}", EVENT_STYLES[kind])

    @contextmanager
    def words_of(self, logger: str) -> Iterator[None]:
        """Show what the library itself logs meanwhile."""
        handler, log = _Words(self), logging.getLogger(logger)
        log.addHandler(handler)
        try:
            yield
        finally:
            log.removeHandler(handler)

    @contextmanager
    def bar(self, total: int) -> Iterator[Bar]:
        """Progress towards `total`; `say` and `event` print above it."""
        if not self.console.is_terminal:
            yield _Lines(self, total)
            return
        columns = (
            TextColumn("  "),
            BarColumn(bar_width=28),
            TaskProgressColumn(),
            TextColumn("{task.description}"),
            TimeRemainingColumn(compact=True),
        )
        with Progress(*columns, console=self.console, transient=True, refresh_per_second=8) as progress:
            yield _Live(progress, progress.add_task("", total=total))


class _Words(logging.Handler):
    def __init__(self, screen: Screen) -> None:
        super().__init__()
        self._screen = screen

    def emit(self, record: logging.LogRecord) -> None:
        self._screen.say(f"{record.name}: {record.getMessage()}", "dim")


class Bar(abc.ABC):
    """Progress of a step."""

    @abc.abstractmethod
    def update(self, done: int, text: str) -> None:
        """So much of the total is done; `text` says more."""


class _Live(Bar):
    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress = progress
        self._task = task

    def update(self, done: int, text: str) -> None:
        self._progress.update(self._task, completed=done, description=text)


class _Lines(Bar):
    def __init__(self, screen: Screen, total: int) -> None:
        self._screen = screen
        self._total = total
        self._next = time.monotonic() + _PLAIN_S

    def update(self, done: int, text: str) -> None:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + _PLAIN_S
            self._screen.say(f"{done / self._total:4.0%}  {text}")
