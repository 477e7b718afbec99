"""Server-sent events: every client gets the newest state, and what it was too slow for is left out.

There is no queue: a client waits for a state newer than its last, so that it costs a single state in memory, however
slow it is. A client that takes nothing at all for a while is let go; it connects again, and says what it had.

The format is that of https://html.spec.whatwg.org/multipage/server-sent-events.html.

What does not belong here: when the Store is looked at (`look_loop`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import Iterator
from typing import Final

from aiohttp import web

from edl.dashboard.server.headers import NO_STORE
from edl.dashboard.server.look_loop import LookLoop, Published

__all__ = ["EventStreams"]

HEARTBEAT_S: Final = 5.0
"""Without an event for so long, a heartbeat follows: a page that hears nothing for 15 s connects again."""
_HEADERS: Final = {**NO_STORE, "Content-Type": "text/event-stream; charset=utf-8", "X-Accel-Buffering": "no"}
_RETRY_MS: Final = 2000
"""Until a browser connects again: soon for a person, and no storm on a server that restarts."""
_WRITE_S: Final = 30.0
"""In which a client must take an event: a phone that sleeps does not, and comes back with its last id."""
_MAX_CLIENTS: Final = 200
"""At once: each costs a descriptor and up to a state in memory, and a program may open them in a loop."""
_BUFFER_NBYTES: Final = 128 << 10
"""Of the kernel, for a client: a usual state fits; with less, a page far away gets its events in many round trips."""
_FIRST_S: Final = 10.0
"""For the first look: the Store may take its deadline several times over."""


class EventStreams:
    """Answers `/api/events`.

    Args:
        looks: whose states are sent.
        heartbeat_s: between two heartbeats.
        write_s: in which a client must take an event.
    """

    def __init__(self, looks: LookLoop, *, heartbeat_s: float = HEARTBEAT_S, write_s: float = _WRITE_S) -> None:
        self._looks = looks
        self._heartbeat_s = heartbeat_s
        self._write_s = write_s
        self.clients = 0
        """That are connected."""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Send events until the client goes, or the server ends.

        Args:
            request: with the id of the last event, in `Last-Event-ID` or `?last_event_id=`.

        Raises:
            HTTPServiceUnavailable: there are too many clients.
        """
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
            published = await self._looks.newer_than(-1 if look is None else look, self._heartbeat_s)
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
            await asyncio.wait_for(response.write(data), self._write_s)
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
    """Have the kernel keep little for a client that is slow: it would hold megabytes, and send them long after."""
    connection = request.transport.get_extra_info("socket") if request.transport is not None else None
    if connection is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_NBYTES)


async def _event(published: Published, look: int | None) -> bytes:
    """Return an event: the whole state, or what is new in its histories for a client that has a look's state."""
    kind = b"state" if look is None else b"update"
    data = await published.encoded(-1 if look is None else look)
    return b"event: %s\nid: %s\ndata: %s\n\n" % (kind, published.id.encode(), data)
