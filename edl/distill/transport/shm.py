"""Shared memory to which a student writes its inputs once, and from which teachers on the same host read them.

An `Arena` hands out slots of POSIX shared memory and reuses them, so that page faults occur only on first use. A
region's file stays locked while this process, or a child that it forked, has the file mapped. A locked file therefore
has a living owner, even if the owner is in another container with other process ids. The next reader removes the
unlocked files that killed processes left.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import mmap
import os
import re
import secrets
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from edl.distill.dispatch.actions import FailureKind, RequestFailure
from edl.distill.transport.calls import RequestFailed
from edl.protocol import kserve, names
from edl.protocol.tensors import Array
from edl.protocol.transport import grpc

logger = logging.getLogger("edl.distill")

SHM_FOLDER = Path("/dev/shm")
_SLOTS_PER_REGION = 8  # few registrations at a teacher, without much unused memory
_PAGE = 4096  # slot sizes are multiples of this, so that similar requests share slots, aligned for any dtype
_NAME = re.compile(names.LOCKED_MEMORY + r"\d+-[0-9a-f]+")


class ShmRegion:
    """A shared-memory file, cut into slots of equal size. Raises `OSError` if memory is short."""

    def __init__(self, slot_nbytes: int, slots: int) -> None:
        self.slot_nbytes = slot_nbytes
        self.nbytes = slot_nbytes * slots  # of the file
        self.name = f"{names.LOCKED_MEMORY}{os.getpid()}-{secrets.token_hex(6)}"  # of the file in /dev/shm
        self._path = SHM_FOLDER / self.name
        file = os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            # The lock belongs to the open file, which the mapping keeps open; the last process to unmap it releases it.
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(file).st_nlink == 0:
                raise FileNotFoundError(f"{self._path} was swept before it was locked")
            os.posix_fallocate(file, 0, self.nbytes)  # a full /dev/shm is an error here, not a SIGBUS later
            self._map = mmap.mmap(file, self.nbytes)
        except BaseException:
            self._path.unlink(missing_ok=True)
            raise
        finally:
            os.close(file)
        self.memory: Array = np.frombuffer(self._map, np.uint8)  # uint8 [nbytes]

    def close(self) -> None:
        """Remove the file, and unmap it unless a view is held."""
        self._path.unlink(missing_ok=True)
        del self.memory
        with contextlib.suppress(BufferError):  # a view is still held: the memory goes with it
            self._map.close()


class ShmSlot(NamedTuple):
    """`nbytes` bytes at `offset` in `region`. Only the slot's owner uses them until it gives the slot back."""

    region: ShmRegion
    offset: int
    nbytes: int

    @property
    def memory(self) -> Array:
        """The slot as uint8 [nbytes]."""
        return self.region.memory[self.offset : self.offset + self.nbytes]


class Arena:
    """Hands out slots of shared memory. Thread-safe."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._regions: list[ShmRegion] = []
        self._free: dict[int, list[ShmSlot]] = {}  # by slot size
        self._closed = False
        self._said = False
        _sweep()

    def take(self, nbytes: int) -> ShmSlot | None:
        """Return a slot of at least `nbytes`; None if the limit or the machine's shared memory is used up."""
        size = max(-(-nbytes // _PAGE), 1) * _PAGE
        with self._lock:
            if self._closed:
                return None
            if not self._free.get(size) and not self._grow(size):
                return None
            slot = self._free[size].pop()
        return slot._replace(nbytes=nbytes)

    def give(self, slot: ShmSlot) -> None:
        """Take a slot back; its contents may be overwritten from now on."""
        with self._lock:
            if not self._closed:
                self._free[slot.region.slot_nbytes].append(slot)

    def close(self) -> None:
        """Remove the arena's memory from the system. Teachers that have mapped it keep it until they unmap it."""
        with self._lock:
            self._closed = True
            regions, self._regions = self._regions, []
            self._free.clear()
        for region in regions:
            region.close()

    def _grow(self, size: int) -> bool:
        used = sum(region.nbytes for region in self._regions)
        slots = min(_SLOTS_PER_REGION, (self.limit_bytes - used) // size)
        if slots < 1:
            return False
        try:
            region = ShmRegion(size, slots)
        except OSError as exc:
            if not self._said:
                self._said = True
                logger.info("no shared memory for teachers on this host; sending tensors in messages: %s", exc)
            return False
        self._regions.append(region)
        self._free.setdefault(size, []).extend(ShmSlot(region, index * size, size) for index in range(slots))
        return True


def _sweep() -> None:
    with contextlib.suppress(OSError):  # the next reader sweeps the rest
        for path in SHM_FOLDER.iterdir():
            if _NAME.fullmatch(path.name):
                with contextlib.suppress(OSError):
                    _remove_abandoned(path)


def _remove_abandoned(path: Path) -> None:
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        if os.fstat(file).st_uid == os.geteuid():
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while its owner is alive
            path.unlink()
    finally:
        os.close(file)


_UNREGISTER_S = 0.5  # how long closing waits for the teacher to unregister memory; EDL's own server sweeps the rest
_UNREGISTER_AGAIN_S = 0.02  # Triton refuses while it computes a request in the region, for about this long

RegionNames = dict[str, str]  # a teacher's name for each region, by the region's own name in /dev/shm


class ShmRegistrations:
    """Registers shared memory with a teacher, on the event loop.

    A name is random, so that only those who know it can refer to the memory. It differs for each teacher, so that two
    teachers on the same server do not remove each other's memory. `names` includes the names from earlier connections.
    """

    def __init__(self, call: Callable[[str, Any, float], Awaitable[Any]], endpoint: str, names: RegionNames) -> None:
        self._call = call
        self._endpoint = endpoint
        self._names = names
        self._known: RegionNames = {}
        self._registering = asyncio.Lock()

    def name_of(self, region: ShmRegion) -> str | None:
        """Return the teacher's name for a region; None if the teacher does not know the region."""
        return self._known.get(region.name)

    async def register(self, region: ShmRegion, deadline: float, lost: str | None = None) -> str | None:
        """Register a region with the teacher, if it is not registered yet, and return the teacher's name for it.

        If the teacher no longer knows the name `lost`, register the region under a new name. This happens only once,
        even if several requests report the loss. Returns None if the teacher cannot use the region, for example because
        the teacher is in a different container. Raises `RequestFailed` with kind LOST if the teacher cannot be reached.
        """
        async with self._registering:
            known = self._known.get(region.name)
            if known is not None and known != lost:
                return known
            if lost is not None:
                logger.info("%s has lost shared memory of this student; registering it again", self._endpoint)
                self._known.pop(region.name, None)
                self._names.pop(region.name, None)
                with contextlib.suppress(RequestFailed):  # unregister it in case the teacher still knows it
                    await self._unregister(lost, deadline)
            name = self._names.setdefault(region.name, f"edl-{secrets.token_hex(12)}")
            request = kserve.SystemSharedMemoryRegisterRequest(  # the key is the name for shm_open
                name=name, key=f"/{region.name}", byte_size=region.nbytes
            )
            try:
                await self._call("SystemSharedMemoryRegister", request, deadline)
            except RequestFailed as exc:
                if exc.failure.kind is FailureKind.LOST:
                    raise
                if not _is_known_already(exc):
                    logger.info("%s does not accept shared memory: %s", self._endpoint, exc)
                    return None
            self._known[region.name] = name
            return name

    async def close(self) -> None:
        """Unregister all memory from the teacher, if the teacher answers within half a second."""
        names = list(self._known.values())
        self._known = {}
        self._names.clear()
        deadline = time.monotonic() + _UNREGISTER_S
        await asyncio.gather(*(self._let_go(name, deadline) for name in names))

    async def _unregister(self, name: str, deadline: float) -> None:
        request = kserve.SystemSharedMemoryUnregisterRequest(name=name)
        await self._call("SystemSharedMemoryUnregister", request, deadline)

    async def _let_go(self, name: str, deadline: float) -> None:
        while time.monotonic() < deadline:
            try:
                await self._unregister(name, deadline)
                return
            except RequestFailed as exc:
                if exc.failure.kind is FailureKind.LOST:
                    return
                await asyncio.sleep(_UNREGISTER_AGAIN_S)
        logger.info("%s still holds shared memory of this student", self._endpoint)


def is_about_memory(failure: RequestFailure, name: str) -> bool:
    """Return whether a request may have failed because the teacher lost the region `name`.

    Servers use various status codes, but their messages state the cause, such as "Unable to find shared memory region:
    'edl-…'" (Triton).
    """
    words = failure.message.lower()
    if failure.kind is FailureKind.LOST:  # a request for a missing model has the same status code
        return name in words
    return failure.kind in (FailureKind.REJECTED, FailureKind.ERROR) and (name in words or "shared memory" in words)


def _is_known_already(exc: RequestFailed) -> bool:
    """Return whether a name is registered already, by an earlier connection. No other student knows the name."""
    cause = exc.__cause__
    return isinstance(cause, grpc.aio.AioRpcError) and cause.code() is grpc.StatusCode.ALREADY_EXISTS
