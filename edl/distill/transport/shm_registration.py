"""Registers a student's shared memory with a teacher, and keeps the names under which the teacher knows it.

What does not belong here: the memory itself (`shm`), and what is asked of a teacher.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import Any

from edl.distill.dispatch.actions import FailureKind, RequestFailure
from edl.distill.transport.grpc_status import RequestFailed
from edl.distill.transport.shm import ShmRegion
from edl.protocol import kserve
from edl.protocol.transport import grpc

__all__ = ["RegionNames", "ShmRegistrations", "is_about_memory"]

logger = logging.getLogger("edl.distill")

_UNREGISTER_S = 0.5
"""How long the end of a connection waits for the teacher to let go: a teacher of ours sweeps what is left then."""
_UNREGISTER_AGAIN_S = 0.02  # Triton refuses while it computes a request in the region, which takes about as long

RegionNames = dict[str, str]
"""By the region's own name in /dev/shm: under which name a teacher knows it."""


class ShmRegistrations:
    """Registrations of a connection, on the event loop.

    A name is random, so that only its holder can name the memory, and differs from teacher to teacher, so that two
    which share a server do not take each other's away.

    Args:
        call: calls a method of KServe v2 by name, with its request and deadline, and raises `RequestFailed`.
        endpoint: for messages.
        names: of this teacher, also on connections before this. Triton takes no memory under a second name.
    """

    def __init__(self, call: Callable[[str, Any, float], Awaitable[Any]], endpoint: str, names: RegionNames) -> None:
        self._call = call
        self._endpoint = endpoint
        self._names = names
        self._known: RegionNames = {}
        self._registering = asyncio.Lock()

    def name_of(self, region: ShmRegion) -> str | None:
        """Return the name under which the teacher knows a region, None if it does not."""
        return self._known.get(region.name)

    async def register(self, region: ShmRegion, deadline: float) -> str | None:
        """Tell the teacher of a region, once.

        Returns:
            The name under which it knows it. None if it cannot have it, because it runs in another container, say.

        Raises:
            RequestFailed: LOST, the teacher cannot be reached.
        """
        async with self._registering:
            known = self._known.get(region.name)
            return known if known is not None else await self._register(region, deadline)

    async def register_again(self, region: ShmRegion, lost: str, deadline: float) -> str | None:
        """Register a region as `register`, after the teacher said that it knows none of the name `lost`.

        Registers once, however many requests hear that.
        """
        async with self._registering:
            known = self._known.get(region.name)
            if known is not None and known != lost:
                return known
            logger.info("%s has lost shared memory of this student; registering it again", self._endpoint)
            self._known.pop(region.name, None)
            self._names.pop(region.name, None)
            with contextlib.suppress(RequestFailed):  # if it does know it, it need not keep it
                await self._unregister(lost, deadline)
            return await self._register(region, deadline)

    async def close(self) -> None:
        """Have the teacher let go of the memory, as far as it does within half a second."""
        names = list(self._known.values())
        self._known = {}
        self._names.clear()
        deadline = time.monotonic() + _UNREGISTER_S
        await asyncio.gather(*(self._let_go(name, deadline) for name in names))

    async def _register(self, region: ShmRegion, deadline: float) -> str | None:
        name = self._names.setdefault(region.name, f"edl-{secrets.token_hex(12)}")
        request = kserve.SystemSharedMemoryRegisterRequest(name=name, key=region.key, byte_size=region.nbytes)
        try:
            await self._call("SystemSharedMemoryRegister", request, deadline)
        except RequestFailed as exc:
            if exc.failure.kind is FailureKind.LOST:
                raise
            if not _is_known_already(exc):
                logger.info("%s does not take shared memory: %s", self._endpoint, exc)
                return None
        self._known[region.name] = name
        return name

    async def _unregister(self, name: str, deadline: float) -> None:
        request = kserve.SystemSharedMemoryUnregisterRequest(name=name)
        await self._call("SystemSharedMemoryUnregister", request, deadline)

    async def _let_go(self, name: str, deadline: float) -> None:
        while time.monotonic() < deadline:
            try:
                await self._unregister(name, deadline)
            except RequestFailed as exc:
                if exc.failure.kind is FailureKind.LOST:
                    return
                await asyncio.sleep(_UNREGISTER_AGAIN_S)
            else:
                return
        logger.info("%s has not let go of shared memory of this student in time", self._endpoint)


def is_about_memory(failure: RequestFailure, name: str) -> bool:
    """Return whether a request may have failed because the teacher lost the region `name`, and not for what it asks.

    Servers use various codes, but say what it is about: "Unable to find shared memory region: 'edl-…'" (Triton).
    """
    words = failure.message.lower()
    if failure.kind is FailureKind.LOST:  # so is a request for a model that is not there any more, of the same code
        return name in words
    return failure.kind in (FailureKind.REJECTED, FailureKind.ERROR) and (name in words or "shared memory" in words)


def _is_known_already(exc: RequestFailed) -> bool:
    """Return whether the name is registered, by this student on a connection before: it is known to no other."""
    cause = exc.__cause__
    return isinstance(cause, grpc.aio.AioRpcError) and cause.code() is grpc.StatusCode.ALREADY_EXISTS
