"""Pieces of a log, cut into lines; after a connection broke, only those that were not seen before."""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Final

__all__ = ["LineCutter", "terminal_safe"]

_STAMP: Final = re.compile(rb"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.\d{1,9})?(Z|[+-]\d\d:\d\d) ?")
_OVERLAP: Final = timedelta(seconds=1)
"""Of two connections: lines of a container's two streams may be stamped in another order than they are kept."""
_MAX_LINE: Final = 1024 * 1024
"""Bytes: a longer line, which may never end, is shown in parts."""
_HIDDEN: Final = re.compile(r"(\x1b\[[0-9;]*m)|[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class LineCutter:
    """Makes lines of a log in which each begins with its time, as the API writes them if asked to.

    After `restart` the same log may come again from `since` on: what was yielded is left out. Times alone do not tell
    lines apart, since output and errors of a container are stamped side by side; so the last lines are kept.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._last: datetime | None = None
        self._recent: deque[tuple[datetime, bytes]] = deque()
        self._known: Counter[bytes] = Counter()

    @property
    def since(self) -> str:
        """A moment shortly before the last line, for a request that goes on from there; empty before the first line."""
        return "" if self._last is None else (self._last - _OVERLAP).isoformat().replace("+00:00", "Z")

    def restart(self) -> None:
        """Expect the log from `since` on, in a new connection."""
        self._rest = b""
        self._known = Counter(line for _, line in self._recent)

    def cut(self, piece: bytes) -> Iterator[bytes]:
        """Yield lines without their time and end, as far as they are whole.

        Args:
            piece: what came.
        """
        self._rest += piece
        *whole, self._rest = self._rest.split(b"\n")
        for line in whole:
            yield from self._new(line)
        if len(self._rest) > _MAX_LINE:
            line, self._rest = self._rest, b""
            yield from self._new(line)

    def end(self) -> Iterator[bytes]:
        """Yield the last line, where the log did not end with a line's end."""
        line, self._rest = self._rest, b""
        if line:
            yield from self._new(line)

    def _new(self, line: bytes) -> Iterator[bytes]:
        if self._known[line] > 0:
            self._known[line] -= 1
            return
        found = _STAMP.match(line)
        second = _parse_second(found) if found is not None else None
        if found is None or second is None:  # the rest of a line that was too long, or the API server's own words
            yield line
            return
        self._last = second if self._last is None else max(self._last, second)
        self._recent.append((second, line))
        while self._recent[0][0] < self._last - _OVERLAP:
            self._recent.popleft()
        yield line[found.end() :]


def _parse_second(stamp: re.Match[bytes]) -> datetime | None:
    try:
        return datetime.fromisoformat((stamp[1] + stamp[2].replace(b"Z", b"+00:00")).decode())
    except ValueError:  # the 31st of February
        return None


def terminal_safe(text: str) -> str:
    """Return a line without what moves a terminal's cursor or changes its state; colours and tabs stay.

    Args:
        text: of a stranger.
    """
    if text.isprintable():
        return text
    last = text.rstrip("\r").rpartition("\r")[2]  # a progress bar draws over itself: its last picture counts
    return _HIDDEN.sub(lambda match: match[1] or "�", last)
