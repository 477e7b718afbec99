"""Polls the Store, and sends its state to clients.

One thread polls for all clients: about once a second while any client is connected, and otherwise every 10 s, so that
charts have no gap for the time when no page was open.

Clients get server-sent events (https://html.spec.whatwg.org/multipage/server-sent-events.html), without a queue: a
client waits for a state that is newer than the last one it received. Even a slow client thus needs only one state in
memory; it skips the states in between. A client that reads nothing for a while is disconnected; it reconnects with the
id of its last event.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
import socket
import time
from collections.abc import Iterator
from typing import Final

from aiohttp import web

from edl.background import BackgroundLoop, start_call
from edl.dashboard.state import DashboardState, StateReader, as_json

logger = logging.getLogger(__name__)

NO_STORE: Final = {"Cache-Control": "no-store"}
"""Header for responses that change each time, or are not public."""
INTERVAL_S: Final = 1.0
"""Poll interval, the same as the interval at which agents write."""
_SHARE: Final = 0.2
"""Maximum share of time spent on polls: a Store with thousands of jobs is polled less often."""
_LONGEST_S: Final = 60.0
"""Maximum poll interval, however long polls take."""
_LONGEST_STALE_S: Final = 3.0
"""Maximum poll interval during an outage of the Store: polls may take the full timeout, and users wait for recovery."""
_IDLE_S: Final = 10.0
"""Poll interval without clients."""


class Published:
    """A state, encoded once for all clients. `boot` distinguishes this process's events from older ones."""

    def __init__(self, boot: str, state: DashboardState, look: int, previous: Published | None) -> None:
        self.state = state
        self.look = look
        self.id: Final = f"{boot}-{look}"
        self.made_at: Final = time.monotonic()
        self._encoded: dict[int, bytes] = {}
        if previous is not None:
            self.encode(previous.look)  # here, in the polling thread, since most clients will need it

    async def encoded(self, after_look: int = -1) -> bytes:
        """Return the state as JSON, encoded in a thread: encoding megabytes must not delay other clients."""
        found = self._encoded.get(after_look)
        if found is None:
            found = await asyncio.wrap_future(start_call("edl-dashboard-encode", lambda: self.encode(after_look)))
        return found

    def encode(self, after_look: int = -1) -> bytes:
        """Return the state as one line of JSON; histories contain points added after read `after_look` (-1: all)."""
        found = self._encoded.get(after_look)
        if found is None:
            text = json.dumps(as_json(self.state, after_look), separators=(",", ":"), allow_nan=False)
            found = self._encoded[after_look] = text.encode()
        return found


class LookLoop:
    """Polls in its own thread and publishes to an event loop, whose thread calls all methods except `close`."""

    def __init__(self, reader: StateReader, loop: asyncio.AbstractEventLoop) -> None:
        self._reader = reader
        self._loop = loop
        self._boot = secrets.token_hex(4)
        self._changed = asyncio.Condition()
        self._asked = False
        self.closed = False
        self.latest: Published | None = None
        self.pause_s = INTERVAL_S
        self.clients = 0
        """Number of connected clients."""
        self._previous: Published | None = None
        self._looked_at = time.monotonic()
        self._background = BackgroundLoop("edl-dashboard-look", self._look)

    async def fresh(self, timeout_s: float) -> Published | None:
        """Return a state no older than the poll interval; after `timeout_s`, the latest state, if any."""
        latest = self.latest
        if latest is not None and time.monotonic() - latest.made_at <= self.pause_s:
            return latest
        self._asked = True
        self._background.wake()
        return await self.newer_than(latest.look if latest is not None else -1, timeout_s) or self.latest

    async def newer_than(self, look: int, timeout_s: float) -> Published | None:
        """Wait for a state newer than `look`; return None if there is none within `timeout_s`, or at `end`."""

        def there() -> bool:
            return self.closed or (self.latest is not None and self.latest.look > look)

        async with self._changed:
            try:
                await asyncio.wait_for(self._changed.wait_for(there), timeout_s)
            except asyncio.TimeoutError:
                return None
        return None if self.closed else self.latest

    @contextlib.contextmanager
    def followed(self) -> Iterator[None]:
        """Poll once a second while a client is connected."""
        self.clients += 1
        self._background.wake()
        try:
            yield
        finally:
            self.clients -= 1

    def look_of(self, event_id: str) -> int | None:
        """Return the number of the read from an event id of this process; None for any other text."""
        boot, _, number = event_id.partition("-")
        if boot != self._boot or not number.isascii() or not number.isdigit() or len(number) > 15:
            return None
        look = int(number)
        return look if self.latest is not None and look <= self.latest.look else None

    async def end(self) -> None:
        """Make all waiting calls return."""
        self.closed = True
        async with self._changed:
            self._changed.notify_all()

    def close(self, timeout_s: float) -> None:
        """Stop the thread, waiting up to `timeout_s` for a running poll, and close the reader."""
        self.latest = self._previous = None  # aiohttp caches ended applications with all they refer to
        if self._background.close(timeout_s):
            self._reader.close()
        else:
            logger.warning("reading the store took over %.0f s; not waiting for it", timeout_s)

    def _look(self) -> float:
        now = time.monotonic()
        idle = not self._asked and not self.clients
        due = self._looked_at + (max(self.pause_s, _IDLE_S) if idle else self.pause_s)
        if now < due and (idle or self._previous is not None):
            return due - now
        self._asked = False
        state = self._reader.read()
        self._previous = Published(self._boot, state, self._reader.looks, self._previous)
        self._looked_at = self._previous.made_at
        look_s = time.monotonic() - now
        longest_s = _LONGEST_STALE_S if state.stale else _LONGEST_S
        self.pause_s = min(longest_s, max(INTERVAL_S - look_s, look_s * (1.0 / _SHARE - 1.0)))
        try:
            self._loop.call_soon_threadsafe(self._publish, self._previous)
        except RuntimeError:  # the server has closed its loop meanwhile
            logger.debug("a poll ended after the server")
        return self.pause_s

    def _publish(self, published: Published) -> None:
        self.latest = published
        self._task = asyncio.ensure_future(self._notify())  # the attribute keeps it from the garbage collector

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


# --- Events ---

_HEARTBEAT_S: Final = 5.0
"""A heartbeat is sent after this long without an event: a page that receives nothing for 15 s reconnects."""
_HEADERS: Final = {**NO_STORE, "Content-Type": "text/event-stream; charset=utf-8", "X-Accel-Buffering": "no"}
_RETRY_MS: Final = 2000
"""Delay before a browser reconnects: short for a user, but long enough not to overload a restarting server."""
_WRITE_S: Final = 30.0
"""Timeout for sending an event: a sleeping phone exceeds it, and reconnects with its last id."""
_MAX_CLIENTS: Final = 200
"""Maximum number of clients: each needs a file descriptor and up to one state in memory; a program may open many
connections."""
_BUFFER_NBYTES: Final = 128 << 10
"""Kernel buffer per client: a typical state fits into it. An event that does not fit takes many round trips to a
distant page."""
_FIRST_S: Final = 10.0
"""Timeout for the first poll, which may take several times as long as the timeout of one request to the Store."""


class EventStreams:
    """Serves `/api/events`."""

    def __init__(self, looks: LookLoop) -> None:
        self._looks = looks

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Send events until the client disconnects or the server stops."""
        if self._looks.clients >= _MAX_CLIENTS:
            raise web.HTTPServiceUnavailable(text="too many clients follow this page\n", headers={"Retry-After": "10"})
        if request.method == "HEAD":
            return web.Response(headers=_HEADERS)
        response = web.StreamResponse(headers=_HEADERS)
        with self._looks.followed():
            await response.prepare(request)
            _limit_buffer(request)
            event_id = request.headers.get("Last-Event-ID") or request.query.get("last_event_id", "")
            with contextlib.suppress(ConnectionError):
                await self._send(request, response, self._looks.look_of(event_id))
        return response

    async def _send(self, request: web.Request, response: web.StreamResponse, look: int | None) -> None:
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
        """Send bytes; return whether the client read them in time."""
        try:
            await asyncio.wait_for(response.write(data), _WRITE_S)
        except asyncio.TimeoutError:
            if request.transport is not None:
                request.transport.abort()
            return False
        return True


def _limit_buffer(request: web.Request) -> None:
    """Limit the kernel's buffer for a slow client: it could hold megabytes, and send them much later."""
    connection = request.transport.get_extra_info("socket") if request.transport is not None else None
    if connection is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_NBYTES)


async def _event(published: Published, look: int | None) -> bytes:
    """Return an event: the whole state, or an update for a client that has the state of `look`."""
    kind = b"state" if look is None else b"update"
    data = await published.encoded(-1 if look is None else look)
    return b"event: %s\nid: %s\ndata: %s\n\n" % (kind, published.id.encode(), data)
