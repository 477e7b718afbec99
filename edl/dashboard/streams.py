"""When the Store is looked at, and how clients follow it.

One thread looks for all clients together: about once a second while there are any, and otherwise every 10 s, so that
pictures have no gap for the time in which no page was open.

Clients get server-sent events (https://html.spec.whatwg.org/multipage/server-sent-events.html), without a queue: a
client waits for a state newer than its last, so even a slow one costs a single state in memory, and misses those in
between. A client that reads nothing for a while is disconnected; it connects again, and names the last event it had.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from typing import Final

from aiohttp import web

from edl.background import BackgroundLoop, start_call
from edl.dashboard.state import DashboardState, StateReader, as_json

logger = logging.getLogger(__name__)

NO_STORE: Final = {"Cache-Control": "no-store"}
"""Header for what changes with each answer, or is not for everybody."""
INTERVAL_S: Final = 1.0
"""Between two looks: agents write what they do as often."""
_SHARE: Final = 0.2
"""Share of the time that looks may take: a Store with thousands of jobs is looked at less often."""
_LONGEST_S: Final = 60.0
"""Between two looks, however long they take."""
_LONGEST_STALE_S: Final = 3.0
"""The same if the Store did not answer, which may take its deadline: a person waits for it to be back."""
_IDLE_S: Final = 10.0
"""Time between two looks while no client follows."""


class Published:
    """A state as clients get it, encoded once for all of them. `boot` tells this process's events from earlier ones."""

    def __init__(self, boot: str, state: DashboardState, look: int, previous: Published | None) -> None:
        self.state = state
        self.look = look
        self.id: Final = f"{boot}-{look}"
        self.made_at: Final = time.monotonic()
        self._encoded: dict[int, bytes] = {}
        if previous is not None:
            self.encode(previous.look)  # here, in the reading thread, since most clients will ask for this

    async def encoded(self, after_look: int = -1) -> bytes:
        """Return the state as JSON, encoded in a thread: it may have megabytes, and must not hold up other clients."""
        found = self._encoded.get(after_look)
        if found is None:
            found = await asyncio.wrap_future(start_call("edl-dashboard-encode", lambda: self.encode(after_look)))
        return found

    def encode(self, after_look: int = -1) -> bytes:
        """Return the state as one line of JSON; histories have only what looks after `after_look` added (-1: all)."""
        found = self._encoded.get(after_look)
        if found is None:
            text = json.dumps(as_json(self.state, after_look), separators=(",", ":"), allow_nan=False)
            found = self._encoded[after_look] = text.encode()
        return found


class LookLoop:
    """Looks in a thread of its own, and publishes into an event loop, whose thread calls all methods but `close`."""

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
        self._looked_at = time.monotonic()
        self._background = BackgroundLoop("edl-dashboard-look", self._look)

    async def fresh(self, timeout_s: float) -> Published | None:
        """Return a state that is not older than a pause between two looks, after a look if need be.

        After `timeout_s`, return what is there: None if no look has ended yet.
        """
        latest = self.latest
        if latest is not None and time.monotonic() - latest.made_at <= self.pause_s:
            return latest
        self._asked = True
        self._background.wake()
        return await self.newer_than(latest.look if latest is not None else -1, timeout_s) or self.latest

    async def newer_than(self, look: int, timeout_s: float) -> Published | None:
        """Wait for a state newer than `look`; return None if there is none within `timeout_s`, or the loop closes."""

        def there() -> bool:
            return self.closed or (self.latest is not None and self.latest.look > look)

        async with self._changed:
            try:
                await asyncio.wait_for(self._changed.wait_for(there), timeout_s)
            except asyncio.TimeoutError:
                return None
        return None if self.closed else self.latest

    def follow(self) -> None:
        """Look once a second from now on, until `unfollow` was called as often."""
        self.followers += 1
        self._background.wake()

    def unfollow(self) -> None:
        """Take a call of `follow` back."""
        self.followers -= 1

    def look_of(self, event_id: str) -> int | None:
        """Return the number of the look in an event id of this process; None for any other text."""
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
        """End the thread, waiting `timeout_s` for a look under way, and close the reader."""
        self.latest = self._previous = None  # aiohttp keeps applications that have ended in a cache, with all they hold
        if self._background.close(timeout_s):
            self._reader.close()
        else:
            logger.warning("reading the store has not ended within %.0f s; not waiting for it", timeout_s)

    def _look(self) -> float:
        now = time.monotonic()
        idle = not self._asked and self.followers <= 0
        due = self._looked_at + (max(self.pause_s, _IDLE_S) if idle else self.pause_s)
        if now < due and (idle or self._previous is not None):
            return due - now
        self._asked = False
        state = self._reader.read()
        self._previous = Published(self._boot, state, self._reader.looks, self._previous)
        self._looked_at = self._previous.made_at
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


# --- Events ---

_HEARTBEAT_S: Final = 5.0
"""A heartbeat follows after this long without an event: a page that hears nothing for 15 s connects again."""
_HEADERS: Final = {**NO_STORE, "Content-Type": "text/event-stream; charset=utf-8", "X-Accel-Buffering": "no"}
_RETRY_MS: Final = 2000
"""Until a browser connects again: soon for a person, and no storm on a server that restarts."""
_WRITE_S: Final = 30.0
"""Time in which a client must take an event: a sleeping phone does not, and comes back with its last id."""
_MAX_CLIENTS: Final = 200
"""Clients at once: each costs a descriptor and up to a state in memory, and a program may open many in a loop."""
_BUFFER_NBYTES: Final = 128 << 10
"""Kernel buffer of a client: a usual state fits; with less, events reach a distant page in many round trips."""
_FIRST_S: Final = 10.0
"""For the first look: the Store may take its deadline several times over."""


class EventStreams:
    """Answers `/api/events`."""

    def __init__(self, looks: LookLoop) -> None:
        self._looks = looks
        self.clients = 0
        """That are connected."""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Send events until the client goes, or the server ends."""
        if self.clients >= _MAX_CLIENTS:
            raise web.HTTPServiceUnavailable(text="too many clients follow this page\n", headers={"Retry-After": "10"})
        if request.method == "HEAD":
            return web.Response(headers=_HEADERS)
        response = web.StreamResponse(headers=_HEADERS)
        with self._following():
            await response.prepare(request)
            _limit_buffer(request)
            event_id = request.headers.get("Last-Event-ID") or request.query.get("last_event_id", "")
            with contextlib.suppress(ConnectionError):
                await self._send(request, response, self._looks.look_of(event_id))
        return response

    async def _send(self, request: web.Request, response: web.StreamResponse, look: int | None) -> None:
        """Send until the client takes nothing more."""
        opening = b"retry: %d\n\n" % _RETRY_MS
        published = await self._looks.fresh(_FIRST_S)
        if published is not None and published.look != look:
            opening += await _event(published, look)
            look = published.look
        if not await self._write(request, response, opening):
            return
        while not self._looks.closed:
            published = await self._looks.newer_than(-1 if look is None else look, _HEARTBEAT_S)
            if self._looks.closed:
                return
            if published is None:
                beat = json.dumps({"time": round(time.time(), 3)})
                data = f"event: heartbeat\ndata: {beat}\n\n".encode()
            else:
                data, look = await _event(published, look), published.look
            if not await self._write(request, response, data):
                return

    async def _write(self, request: web.Request, response: web.StreamResponse, data: bytes) -> bool:
        """Send bytes; return whether the client took them in time."""
        try:
            await asyncio.wait_for(response.write(data), _WRITE_S)
        except asyncio.TimeoutError:
            if request.transport is not None:
                request.transport.abort()
            return False
        return True

    @contextlib.contextmanager
    def _following(self) -> Iterator[None]:
        self.clients += 1
        self._looks.follow()
        try:
            yield
        finally:
            self.clients -= 1
            self._looks.unfollow()


def _limit_buffer(request: web.Request) -> None:
    """Have the kernel keep little for a slow client: it would hold megabytes, and send them long after."""
    connection = request.transport.get_extra_info("socket") if request.transport is not None else None
    if connection is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_NBYTES)


async def _event(published: Published, look: int | None) -> bytes:
    """Return an event: the whole state, or an update for a client that has the state of `look`."""
    kind = b"state" if look is None else b"update"
    data = await published.encoded(-1 if look is None else look)
    return b"event: %s\nid: %s\ndata: %s\n\n" % (kind, published.id.encode(), data)
