"""One teacher as the engine sees it: connect, check, and connect again until it is told to stop."""

from __future__ import annotations

import asyncio
import functools
import logging
import random
import time
from collections.abc import Callable

from edl.discovery.registry import Instance
from edl.distill.actions import Failure, FailureKind
from edl.distill.client import RequestFailed, TeacherClient
from edl.distill.request import Ask, ModelSpec, Outputs, Payload

__all__ = ["Link"]

logger = logging.getLogger("edl.distill")

_CONNECT_TIMEOUT_S = 5.0
_FIRST_BACKOFF_S = 0.1
_LAST_BACKOFF_S = 2.0
_STEADY_S = 2.0
"""A connection that breaks sooner than this counts as a failed attempt to connect."""


class Link:
    """Keeps one instance connected, on the event loop.

    Args:
        accept: called with the model's metadata; returns why this teacher cannot be used, or an empty string.
        up, down: called when requests may be sent, and when they no longer may.
        not_up: called when an attempt to connect came to nothing.
    """

    def __init__(
        self,
        instance: Instance,
        ask: Ask,
        *,
        shared_memory: bool,
        accept: Callable[[Instance, ModelSpec], str],
        up: Callable[[Link], None],
        down: Callable[[Link], None],
        not_up: Callable[[Link], None],
    ) -> None:
        self.instance = instance
        self.state = "connecting"
        self.why = ""
        self._ask = ask if ask.model or not instance.model else _with_model(ask, instance.model)
        self._shared_memory = shared_memory
        self._accept, self._up, self._down, self._not_up = accept, up, down, not_up
        self._client: TeacherClient | None = None
        self._using: dict[TeacherClient, int] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._broken = asyncio.Event()
        self._tried = asyncio.Event()  # whether an attempt to connect has ended since the connection was lost
        self._task = asyncio.get_running_loop().create_task(self._run())

    @property
    def shares_memory(self) -> bool:
        return self._client is not None and self._client.shares_memory

    @property
    def takes_bundles(self) -> bool:
        """Whether requests are small, and several of them can go in one message."""
        return self._client is not None and self._client.takes_bundles

    @property
    def spec(self) -> ModelSpec | None:
        """What the teacher's model looks like, None while it is not connected."""
        return self._client.spec if self._client is not None else None

    def start(
        self, payload: Payload, timeout_s: float, done: Callable[[Outputs | Failure | None], None]
    ) -> Callable[[], None] | None:
        """See `TeacherClient.start`."""
        client = self._client
        cancel = client.start(payload, timeout_s, functools.partial(self._done, client, done)) if client else None
        if client is not None and cancel is not None:
            self._using[client] = self._using.get(client, 0) + 1
        return cancel

    async def infer(self, payload: Payload, timeout_s: float) -> Outputs:
        """See `TeacherClient.infer`. A lost connection is noticed here and made anew in the background."""
        client = self._client
        if client is None:
            raise RequestFailed(FailureKind.LOST, f"{self.instance.endpoint}: {self.why or 'not connected'}")
        self._using[client] = self._using.get(client, 0) + 1
        failure: Failure | None = None
        try:
            return await client.infer(payload, timeout_s)
        except RequestFailed as exc:
            failure = exc.failure
            raise
        finally:
            self._ended(client, failure)

    def _done(
        self,
        client: TeacherClient,
        done: Callable[[Outputs | Failure | None], None],
        result: Outputs | Failure | None,
    ) -> None:
        self._ended(client, result if isinstance(result, Failure) else None)
        done(result)

    def _ended(self, client: TeacherClient, failure: Failure | None) -> None:
        """One request less on a connection, which may have been lost, or left for another one before."""
        if failure is not None and failure.kind is FailureKind.LOST and client is self._client:
            self.why = failure.message
            self._leave()
        self._using[client] -= 1
        if not self._using[client]:
            del self._using[client]
            if client is not self._client:
                self._close_soon(client)

    def _close_soon(self, client: TeacherClient) -> None:
        task = asyncio.get_running_loop().create_task(client.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def look_again(self) -> None:
        """See whether the model still is what it was, and connect anew if not: a server may load another one, and gRPC
        connects by itself to a server that took the address of the one before. Returns when that has been tried.
        """
        client = self._client
        if client is not None:
            try:
                spec = await client.look(_CONNECT_TIMEOUT_S)
                changed = "" if spec == client.spec else f"its model is another one now, of version {spec.version!r}"
            except RequestFailed as exc:
                changed = exc.failure.message
            if changed and client is self._client:
                self.why = changed
                self._leave()
        await self._tried.wait()

    async def close(self) -> None:
        """Disconnect; requests under way end with LOST."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        clients = {*self._using, *([self._client] if self._client is not None else [])}
        self._client = None
        for client in clients:
            await client.close()
        await asyncio.gather(*self._closing)

    def _leave(self) -> None:
        """Stop using the present connection; requests under way on it may still end well."""
        client, self._client = self._client, None
        self.state = "connecting"
        self._tried.clear()
        self._down(self)
        self._broken.set()
        if client is not None and client not in self._using:
            self._close_soon(client)

    async def _run(self) -> None:
        backoff_s = _FIRST_BACKOFF_S
        while True:
            client = TeacherClient(self.instance.endpoint, self._ask, shared_memory=self._shared_memory)
            connected = False
            try:
                spec = await client.open(_CONNECT_TIMEOUT_S)
                refused = self._accept(self.instance, spec)
                connected = not refused
                self.state = "ready" if connected else "set aside"
            except RequestFailed as exc:
                refused = exc.failure.message
                self.state = "set aside" if exc.failure.kind is FailureKind.REJECTED else "connecting"
            except Exception as exc:
                # Whatever it was, others wait to hear that this teacher does not come.
                logger.debug("connecting to teacher %s failed in a way not foreseen", self.instance.id, exc_info=True)
                refused = f"{self.instance.endpoint}: {type(exc).__name__}: {exc}"
                self.state = "set aside"
            finally:
                if not connected:
                    await client.close()
            self._tried.set()
            if connected:
                connected_at = time.monotonic()
                self._client, self.why = client, ""
                self._broken.clear()
                self._up(self)
                await self._broken.wait()
                if time.monotonic() - connected_at > _STEADY_S:
                    backoff_s = _FIRST_BACKOFF_S
                    continue  # at once: the process may be back already, and the next failure waits
            elif refused != self.why:
                level = logging.WARNING if self.state == "set aside" else logging.INFO
                logger.log(level, "teacher %s is not used: %s", self.instance.id, refused)
                self.why = refused
            if not connected:
                self._not_up(self)
            await asyncio.sleep(backoff_s * random.uniform(0.8, 1.2))
            backoff_s = min(backoff_s * 2, _LAST_BACKOFF_S)


def _with_model(ask: Ask, model: str) -> Ask:
    return Ask(ask.outputs, model, ask.top_k, ask.temperature, ask.dtype)
