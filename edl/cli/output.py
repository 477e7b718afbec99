"""What commands print: a console, text of others made safe for a terminal, and durations in words."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text


def console(width: int) -> Console:
    """Return standard output, `width` columns wide unless it is a terminal: a program's reader has no width."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else width)


def printable(text: str) -> str:
    """Return `text` without control characters: a name from elsewhere could contain escape sequences."""
    return "".join(character if character.isprintable() else "�" for character in text)


def table(headings: Sequence[str], rows: Iterable[Iterable[str | Text]], numbers: Sequence[str] = ()) -> Table:
    """Return a table without lines; the columns in `numbers` are aligned to the right. Cells are made `printable`."""
    found = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in headings:
        found.add_column(heading, overflow="fold", justify="right" if heading in numbers else "left")
    for row in rows:
        found.add_row(*(cell if isinstance(cell, Text) else Text(printable(cell)) for cell in row))
    return found


def counted(number: int, name: str) -> str:
    """Return a number with the name of what it counts."""
    return f"{number:,} {name}{'s' if number != 1 else ''}"


def last_line(message: str) -> str:
    """Return the last line: the one of a traceback that says what happened."""
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
