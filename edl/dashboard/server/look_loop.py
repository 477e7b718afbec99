"""Looks at the Store for all clients together: about once a second while there are any, and never otherwise.

What does not belong here: what a look reads (`edl.dashboard.state`), and how clients get it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections.abc import Callable
from typing import Final

from edl.background import BackgroundLoop, start_call
from edl.dashboard.state import DashboardState, StateReader, as_json

__all__ = ["LookLoop", "Published"]

logger = logging.getLogger(__name__)

INTERVAL_S: Final = 1.0
"""Between two looks: agents write what they do as often."""
_SHARE: Final = 0.2
"""Of the time that looks may take: a Store with thousands of jobs is looked at less often."""
_LONGEST_S: Final = 60.0
"""Between two looks, however long they take."""
_LONGEST_STALE_S: Final = 3.0
"""Where the Store did not answer, which may take its deadline: a person waits for it to be back."""
_IDLE_S: Final = 3600.0
"""A wait that a request cuts short; any length would do."""


class Published:
    """A state as clients get it: encoded once for all of them.

    Args:
        boot: tells this process's events from those of a process before it.
        state: what a look found.
        look: its number.
        previous: the state before it; None for the first.
    """

    def __init__(self, boot: str, state: DashboardState, look: int, previous: Published | None) -> None:
        self.state = state
        self.look = look
        self.id: Final = f"{boot}-{look}"
        self.made_at: Final = time.monotonic()
        self._encoded: dict[int, bytes] = {}
        if previous is not None:
            self.encode(previous.look)  # in the thread of the look, since most clients will ask for this

    async def encoded(self, after_look: int = -1) -> bytes:
        """Return the state as JSON, encoded in a thread: it may have megabytes, and other clients wait meanwhile.

        Args:
            after_look: as for `encode`.
        """
        found = self._encoded.get(after_look)
        if found is None:
            found = await asyncio.wrap_future(start_call("edl-dashboard-encode", lambda: self.encode(after_look)))
        return found

    def encode(self, after_look: int = -1) -> bytes:
        """Return the state as JSON, in a line.

        Args:
            after_look: histories hold only what looks after it have added; -1 for all.
        """
        found = self._encoded.get(after_look)
        if found is None:
            text = json.dumps(as_json(self.state, after_look), separators=(",", ":"), allow_nan=False)
            found = self._encoded[after_look] = text.encode()
        return found


class LookLoop:
    """Looks in a thread of its own, and publishes into an event loop.

    Args:
        reader: of the state; closed with the loop.
        loop: whose thread calls all methods but `close`.
    """

    def __init__(self, reader: StateReader, loop: asyncio.AbstractEventLoop) -> None:
        self._reader = reader
        self._loop = loop
        self._boot = secrets.token_hex(4)
        self._changed = asyncio.Condition()
        self._asked = False
        self.closed = False
        self.latest: Published | None = None
        self.look_s = 0.0
        self.pause_s = INTERVAL_S
        self.followers = 0
        self._previous: Published | None = None
        self._background = BackgroundLoop("edl-dashboard-look", self._look)

    async def fresh(self, timeout_s: float) -> Published | None:
        """Return a state that is not older than a pause between two looks, after a look if need be.

        Args:
            timeout_s: how long to wait for the look, in seconds; then what is there is returned.

        Returns:
            The state; None where no look has ended yet.
        """
        latest = self.latest
        if latest is not None and time.monotonic() - latest.made_at <= self.pause_s:
            return latest
        self._asked = True
        self._background.wake()
        return await self.newer_than(latest.look if latest is not None else -1, timeout_s) or self.latest

    async def newer_than(self, look: int, timeout_s: float) -> Published | None:
        """Wait for a state.

        Args:
            look: the number of the state that the caller has.
            timeout_s: how long to wait, in seconds.

        Returns:
            The newest state; None if there was none newer within `timeout_s`, or the loop was closed.
        """

        def there() -> bool:
            return self.closed or (self.latest is not None and self.latest.look > look)

        async with self._changed:
            try:
                await asyncio.wait_for(self._changed.wait_for(there), timeout_s)
            except asyncio.TimeoutError:
                return None
        return None if self.closed else self.latest

    def follow(self) -> None:
        """Look once a second from now on, until as many calls of `unfollow`."""
        self.followers += 1
        self._background.wake()

    def unfollow(self) -> None:
        """Take a call of `follow` back."""
        self.followers -= 1

    def look_of(self, event_id: str) -> int | None:
        """Return the number in the id of an event of this process; None for any other text.

        Args:
            event_id: as a client sent it.
        """
        boot, _, number = event_id.partition("-")
        if boot != self._boot or not number.isascii() or not number.isdigit() or len(number) > 15:
            return None
        look = int(number)
        return look if self.latest is not None and look <= self.latest.look else None

    async def end(self) -> None:
        """Let all that wait return."""
        self.closed = True
        async with self._changed:
            self._changed.notify_all()

    def close(self, timeout_s: float) -> None:
        """End the thread, and close the reader.

        Args:
            timeout_s: how long to wait for a look under way, in seconds.
        """
        self.latest = self._previous = None  # aiohttp keeps applications that have ended in a cache, with all they hold
        if self._background.close(timeout_s):
            self._reader.close()
        else:
            logger.warning("a look at the store has not ended within %.0f s, and is left alone", timeout_s)

    def _look(self) -> float:
        now = time.monotonic()
        if self._previous is not None and now < self._previous.made_at + self.pause_s:
            return self._previous.made_at + self.pause_s - now
        if not self._asked and self.followers <= 0:
            return _IDLE_S
        self._asked = False
        state = self._reader.read()
        self._previous = Published(self._boot, state, self._reader.looks, self._previous)
        self.look_s = time.monotonic() - now
        longest_s = _LONGEST_STALE_S if state.stale else _LONGEST_S
        self.pause_s = min(longest_s, max(INTERVAL_S - self.look_s, self.look_s * (1.0 / _SHARE - 1.0)))
        _call_soon(self._loop, self._publish, self._previous)
        return self.pause_s

    def _publish(self, published: Published) -> None:
        self.latest = published
        self._task = asyncio.ensure_future(self._notify())  # the attribute keeps it from the garbage collector

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


def _call_soon(loop: asyncio.AbstractEventLoop, function: Callable[[Published], None], published: Published) -> None:
    try:
        loop.call_soon_threadsafe(function, published)
    except RuntimeError:  # the server has ended its loop meanwhile
        logger.debug("a look ended after the server")
