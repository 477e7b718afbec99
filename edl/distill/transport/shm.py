"""Shared memory that a student writes its inputs to once, for teachers on the same host to read where they are.

An `Arena` hands out slots of POSIX shared memory and takes them back. Slots are reused, so their pages are faulted in
once. A region's file is locked for as long as this process, or a child that it forked, has it mapped: what a killed
process left behind is swept by the next reader, and a locked file has a living owner, be it in another container, where
process ids mean something else.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import mmap
import os
import re
import secrets
import threading
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from edl.protocol import names
from edl.protocol.tensors import Array

__all__ = ["Arena", "ShmRegion", "ShmSlot"]

logger = logging.getLogger("edl.distill")

SHM_FOLDER = Path("/dev/shm")
_SLOTS_PER_REGION = 8
"""Slots of a file: few registrations at a teacher, without much memory that no request needs."""
_PAGE = 4096
"""Bytes to which slots are rounded: requests of nearly the same size share slots, aligned for any dtype."""
_NAME = re.compile(names.LOCKED_MEMORY + r"\d+-[0-9a-f]+")


class ShmRegion:
    """A shared-memory file, cut into slots of equal size.

    Args:
        slot_nbytes: bytes of a slot.
        slots: how many.

    Attributes:
        slot_nbytes: as given.
        nbytes: of the file.
        name: of the file in /dev/shm.
        path: of the file.
        memory: uint8 [nbytes].

    Raises:
        OSError: there is no room.
    """

    def __init__(self, slot_nbytes: int, slots: int) -> None:
        self.slot_nbytes = slot_nbytes
        self.nbytes = slot_nbytes * slots
        self.name = f"{names.LOCKED_MEMORY}{os.getpid()}-{secrets.token_hex(6)}"
        self.path = SHM_FOLDER / self.name
        file = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            # Of the open file, which the mapping keeps: the kernel lets go of it with the last process that has it.
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(file).st_nlink == 0:
                raise FileNotFoundError(f"{self.path} was swept before it was locked")
            os.posix_fallocate(file, 0, self.nbytes)  # a full /dev/shm is an error here, not a SIGBUS later
            self._map = mmap.mmap(file, self.nbytes)
        except BaseException:
            self.path.unlink(missing_ok=True)
            raise
        finally:
            os.close(file)
        self.memory: Array = np.frombuffer(self._map, np.uint8)

    @property
    def key(self) -> str:
        """The name as shm_open wants it."""
        return f"/{self.name}"

    def close(self) -> None:
        """Remove the file, and unmap it unless a view is held."""
        self.path.unlink(missing_ok=True)
        del self.memory
        with contextlib.suppress(BufferError):  # a view is still held: the memory goes with it
            self._map.close()


@dataclass(frozen=True)
class ShmSlot:
    """`nbytes` bytes at `offset` of `region`; the owner's alone until given back."""

    region: ShmRegion
    offset: int
    nbytes: int

    @property
    def memory(self) -> Array:
        """The slot as uint8 [nbytes]."""
        return self.region.memory[self.offset : self.offset + self.nbytes]


class Arena:
    """Hands out slots of shared memory. Thread-safe.

    Args:
        limit_bytes: of all slots together.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._regions: list[ShmRegion] = []
        self._free: dict[int, list[ShmSlot]] = {}  # by slot size
        self._closed = False
        self._said = False
        _sweep()

    def take(self, nbytes: int) -> ShmSlot | None:
        """Return a slot of at least `nbytes`; None where the limit or the machine's shared memory is used up."""
        size = max(-(-nbytes // _PAGE), 1) * _PAGE
        with self._lock:
            if self._closed:
                return None
            if not self._free.get(size) and not self._grow(size):
                return None
            slot = self._free[size].pop()
        return ShmSlot(slot.region, slot.offset, nbytes)

    def give(self, slot: ShmSlot) -> None:
        """Take a slot back; its contents may be overwritten from now on."""
        with self._lock:
            if not self._closed:
                self._free[slot.region.slot_nbytes].append(slot)

    def close(self) -> None:
        """Remove all shared memory from the system. Teachers that mapped it keep their mapping until they let go."""
        with self._lock:
            self._closed = True
            regions = self._regions
            self._regions = []
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
                logger.info("no shared memory for teachers on this host, what it lacks room for is sent: %s", exc)
            return False
        self._regions.append(region)
        self._free.setdefault(size, []).extend(ShmSlot(region, index * size, size) for index in range(slots))
        return True


def _sweep() -> None:
    """Remove what killed processes of this user left behind."""
    with contextlib.suppress(OSError):  # what cannot be swept now, the next reader sweeps
        for path in SHM_FOLDER.iterdir():
            if _NAME.fullmatch(path.name):
                with contextlib.suppress(OSError):
                    _remove_abandoned(path)


def _remove_abandoned(path: Path) -> None:
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        if os.fstat(file).st_uid == os.geteuid():
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # an error while its owner lives
            path.unlink()
    finally:
        os.close(file)
