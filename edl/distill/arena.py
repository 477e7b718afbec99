"""Shared memory that a student writes its inputs to once, for teachers on the same host to read where they are.

An `Arena` hands out slots of POSIX shared memory and takes them back. Slots are reused, so their pages are faulted in
once. The names in /dev/shm carry the process id: what a killed process left behind is swept by the next one.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import secrets
import threading
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from edl.protocol.tensors import Array

__all__ = ["Arena", "Region", "Slot"]

SHM_FOLDER = Path("/dev/shm")
_SLOTS_PER_REGION = 8
_PAGE = 4096
_NAME = re.compile(r"edl-arena-(\d+)-[0-9a-f]+")


class Region:
    """One shared-memory file, cut into slots of one size."""

    def __init__(self, slot_nbytes: int, slots: int) -> None:
        self.slot_nbytes = slot_nbytes
        self.nbytes = slot_nbytes * slots
        self.name = f"edl-arena-{os.getpid()}-{secrets.token_hex(6)}"
        self.path = SHM_FOLDER / self.name
        file = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(file, 0, self.nbytes)  # a full /dev/shm is an error here, not a SIGBUS later
            self._map = mmap.mmap(file, self.nbytes)
        except OSError:
            self.path.unlink()
            raise
        finally:
            os.close(file)
        self.memory: Array = np.frombuffer(self._map, np.uint8)

    @property
    def key(self) -> str:
        """The name as shm_open wants it."""
        return f"/{self.name}"

    def close(self) -> None:
        self.path.unlink(missing_ok=True)
        del self.memory
        with contextlib.suppress(BufferError):  # a view is still held: the memory goes with it
            self._map.close()


@dataclass(frozen=True)
class Slot:
    """`nbytes` bytes at `offset` of `region`; the owner's alone until given back."""

    region: Region
    offset: int
    nbytes: int

    @property
    def memory(self) -> Array:
        """The slot as uint8 [nbytes]."""
        return self.region.memory[self.offset : self.offset + self.nbytes]


class Arena:
    """Slots of shared memory, `limit_bytes` in all at most. Thread-safe."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._regions: list[Region] = []
        self._free: dict[int, list[Slot]] = {}  # by slot size
        self._closed = False
        _sweep()

    def take(self, nbytes: int) -> Slot | None:
        """A slot of at least `nbytes`; None where the limit or the machine's shared memory is used up."""
        size = max(-(-nbytes // _PAGE), 1) * _PAGE
        with self._lock:
            if self._closed:
                return None
            if not self._free.get(size) and not self._grow(size):
                return None
            slot = self._free[size].pop()
        return Slot(slot.region, slot.offset, nbytes)

    def give(self, slot: Slot) -> None:
        """Take a slot back; its contents may be overwritten from now on."""
        with self._lock:
            if not self._closed:
                self._free[slot.region.slot_nbytes].append(slot)

    def close(self) -> None:
        """Remove all shared memory from the system. Teachers that mapped it keep their mapping until they let go."""
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
            region = Region(size, slots)
        except OSError:
            return False
        self._regions.append(region)
        self._free.setdefault(size, []).extend(Slot(region, index * size, size) for index in range(slots))
        return True


def _sweep() -> None:
    """Remove what killed processes of this user left behind."""
    if not SHM_FOLDER.is_dir():
        return
    for path in SHM_FOLDER.iterdir():
        match = _NAME.fullmatch(path.name)
        if match is None:
            continue
        try:
            os.kill(int(match.group(1)), 0)
        except ProcessLookupError:
            with contextlib.suppress(OSError):
                path.unlink()
        except PermissionError:
            pass  # alive, and somebody else's
