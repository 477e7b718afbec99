"""Output of commands: a console, text made safe for a terminal, progress bars, and durations in words."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from typing import Final, TypeAlias, TypeVar

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import Progress, ProgressColumn
from rich.table import Table
from rich.text import Text

from edl.errors import EDLError, SettingsError

T = TypeVar("T")

_LINE_EVERY_S: Final = 5.0
"""Time between two lines of progress if the output is a file or a pipe. A terminal shows a bar."""


def console(width: int) -> Console:
    """Return standard output as a console, `width` columns wide unless it is a terminal."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else width)


def printable(text: str) -> str:
    """Replace control characters in `text`: a name from another host could contain escape sequences."""
    return "".join(character if character.isprintable() else "�" for character in text)


def print_note(command: str, words: str) -> None:
    """Print lines about an event to standard error, after the lines that came before it on standard output."""
    sys.stdout.flush()
    for line in words.splitlines():
        print(f"{command}: {printable(line)}", file=sys.stderr, flush=True)


def table(headings: Sequence[str], rows: Iterable[Iterable[str | Text]], numbers: Sequence[str] = ()) -> Table:
    """Return a table without lines; columns in `numbers` are right-aligned. Cells are made `printable`."""
    found = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in headings:
        found.add_column(heading, overflow="fold", justify="right" if heading in numbers else "left")
    for row in rows:
        found.add_row(*(cell if isinstance(cell, Text) else Text(printable(cell)) for cell in row))
    return found


def show_looks(
    read: Callable[[], T],
    view: Callable[[T], RenderableType],
    to_json: Callable[[T], str] | None,
    width: int,
    *,
    every_s: float | None = None,
    is_over: Callable[[T], bool] = lambda look: False,
    facts: Callable[[T], object] = lambda look: look,
) -> None:
    """Show what `read` returns: once or, with `every_s`, at each change of its `facts`, until `is_over` is True.

    With `every_s` on a terminal, each result replaces the previous one. Elsewhere, each is printed below its time or,
    with `to_json`, as a line of JSON. If a later read fails, the reason is shown with the last result (with JSON, on
    standard error). Only SettingsError ends the loop.
    """
    screen = console(width)
    with contextlib.ExitStack() as stack:
        live = None
        if every_s is not None and screen.is_terminal and to_json is None:
            live = stack.enter_context(Live(console=screen, auto_refresh=False))
        look, trouble = read(), ""
        seen: object = None
        while True:
            whole = Group(view(look), *([Text(printable(trouble), "bold red")] if trouble else []))
            if live is not None:
                live.update(whole, refresh=True)
            elif (facts(look), trouble) != seen:
                seen = facts(look), trouble
                if to_json is None:
                    if every_s is not None:
                        screen.print(Text(datetime.now().astimezone().isoformat(" ", "seconds"), "dim"))
                    screen.print(whole)
                elif trouble:
                    print(printable(trouble), file=sys.stderr)
                else:
                    print(to_json(look), flush=True)
            if every_s is None or is_over(look):
                return
            time.sleep(every_s)
            try:
                look, trouble = read(), ""
            except SettingsError:
                raise
            except EDLError as exc:
                trouble = f"last known state: {exc}"


ShowProgress: TypeAlias = Callable[[int, int | None, str], None]
"""Shows the amount done, the total (None if unknown), and a text."""


@contextlib.contextmanager
def open_progress(
    screen: Console, columns: Sequence[ProgressColumn], write_line: Callable[[int, int | None, str], None]
) -> Iterator[ShowProgress]:
    """Show progress: a bar of `columns` on a terminal, otherwise a line every few seconds."""
    if screen.is_terminal:
        with Progress(*columns, console=screen) as bar:
            task = bar.add_task("", total=None)
            yield lambda done, total, words: bar.update(task, completed=done, total=total, description=words)
        return
    next_at = time.monotonic()

    def show(done: int, total: int | None, words: str) -> None:
        nonlocal next_at
        if time.monotonic() >= next_at:
            next_at = time.monotonic() + _LINE_EVERY_S
            write_line(done, total, words)

    yield show


def counted(number: int, name: str) -> str:
    """Return a number and a noun, in the plural if needed."""
    return f"{number:,} {name}{'s' if number != 1 else ''}"


def last_line(message: str) -> str:
    """Return the last line, which in a traceback says what happened."""
    return message.strip().rpartition("\n")[2].strip()


def age(seconds: float | None) -> str:
    """Return a duration as kubectl writes it: 45s, 3m20s, 2h5m, 4d3h; "-" if it is unknown."""
    if seconds is None:
        return "-"
    whole = max(0, round(seconds))
    if whole < 120:
        return f"{whole}s"
    minutes, rest = divmod(whole, 60)
    if minutes < 10:
        return f"{minutes}m{rest}s" if rest else f"{minutes}m"
    if minutes < 120:
        return f"{minutes}m"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours}h{minutes}m" if minutes else f"{hours}h"
    days, hours = divmod(hours, 24)
    return f"{days}d{hours}h" if hours and days < 8 else f"{days}d"
