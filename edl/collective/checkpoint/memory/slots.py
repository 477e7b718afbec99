"""Two slots of shared memory that hold a worker's last two saved states, and outlive the worker.

A slot is a file in memory: a header page, then the bytes of the tensors, then the metadata (JSON). A save fills the
slot that does not hold the newest complete state, in this order::

    odd sequence number -> tensors -> metadata -> header and checksums -> even sequence number

So a worker that is killed at any instant leaves one slot complete. A slot file with a second hard link is being read or
will be read, so it is not overwritten. Instead, the next write goes to the spare file, if there is one. A reader never
makes the worker wait: it copies a slot, then checks that the sequence number is still the same.

A killed process's stores to memory all take effect, in order, so the sequence number shows whether the tensors are
complete. The tensors' bytes need no checksum here, because computing it would take far longer than the copy. A checksum
is added when the bytes leave memory.

Without an agent, a process creates its own private slots. They are removed when the process exits or, if the process is
killed, when the next process creates its slots. The next process recognizes abandoned slots by a lock file that is no
longer locked, not by process ids, which mean nothing across containers that share `/dev/shm`. Nothing here uses torch.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import mmap
import os
import secrets
import struct
import weakref
import zlib
from collections.abc import Callable
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Final

from edl.errors import ClosedError, SettingsError
from edl.settings import read

HEADER_NBYTES: Final = 4096  # offset of the tensors' bytes: a memory page, which is aligned for any type
SEQUENCE_AT: Final = 8  # after the magic bytes
SEQUENCE_NBYTES: Final = 8  # a processor's word, which is written in one operation

_MAGIC: Final = b"EDLSLOT1"
_FIELDS: Final = struct.Struct("=qqqqqqQQI")
_FIELDS_AT: Final = SEQUENCE_AT + SEQUENCE_NBYTES
_CRC_AT: Final = _FIELDS_AT + _FIELDS.size
_END: Final = _CRC_AT + 4
_ALIGN: Final = 64  # a cache line, so that metadata and tensors share none

StateVersion = tuple[int, int, int]  # generation, step and world of a state: the same on all ranks, sorted by age


@dataclass(frozen=True, order=True)
class SlotHeader:
    """Identifies the state in a slot. Headers sort from old to new."""

    generation: int  # generation of the world that saved the state
    step: int  # last finished step, counted from 0
    world: int  # number of ranks
    rank: int  # rank of the worker that saved the state
    persist: bool = False  # whether the worker wants it on storage
    sharded: bool = False  # whether other ranks' slots hold parts of the same tensors

    @property
    def version(self) -> StateVersion:
        return self.generation, self.step, self.world


def meta_offset(data_nbytes: int) -> int:
    return -(-(HEADER_NBYTES + data_nbytes) // _ALIGN) * _ALIGN


def set_sequence(memory: mmap.mmap, sequence: int) -> None:
    memory[SEQUENCE_AT:_FIELDS_AT] = sequence.to_bytes(SEQUENCE_NBYTES, "little")


def _crc(sequence: int, fields: bytes) -> bytes:
    return zlib.crc32(fields, zlib.crc32(sequence.to_bytes(SEQUENCE_NBYTES, "little"))).to_bytes(4, "little")


# --- Finding and reading slots ---


@dataclass(frozen=True)
class CompleteSlot:
    """A slot that was complete when it was found."""

    header: SlotHeader
    sequence: int
    data_nbytes: int
    meta_nbytes: int
    meta_crc: int
    path: Path

    def map_file(self) -> mmap.mmap:
        """Map the file so that writing to the mapping does not change the file."""
        with self.path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)

    def read_metadata(self) -> bytes | None:
        """Return the metadata, or None if the slot has been overwritten since it was found."""
        try:
            with self.path.open("rb", buffering=0) as file:
                meta = os.pread(file.fileno(), self.meta_nbytes, meta_offset(self.data_nbytes))
        except OSError:
            return None
        return meta if zlib.crc32(meta) == self.meta_crc and len(meta) == self.meta_nbytes else None

    def copy_contents(self) -> SlotCopy | None:
        """Copy the contents as they were when the slot was found; None if the slot has been overwritten since."""
        meta = self.read_metadata()
        if meta is None:
            return None
        data = bytearray(self.data_nbytes)
        try:
            with self.path.open("rb", buffering=0) as file:
                file.seek(HEADER_NBYTES)
                got = _read_into(file, data)
        except OSError:
            return None
        return SlotCopy(self.header, meta, data) if got == self.data_nbytes and read_slot(self.path) == self else None

    def pin_file(self, name: Path) -> PinnedSlot | None:
        """Give the slot's file a second name, and map the file. From then on, `begin_write` does not write to it.

        A write that began a moment earlier is detected only by `PinnedSlot.is_unchanged`, after the contents were read.
        Returns the contents without copying them, or None if the slot has been overwritten since it was found.
        """
        name.unlink(missing_ok=True)  # left behind by a killed process; it may even be this file
        try:
            os.link(self.path, name)
        except FileNotFoundError:
            return None
        pinned = replace(self, path=name)
        meta = pinned.read_metadata()
        if meta is None or read_slot(name) != pinned:
            name.unlink(missing_ok=True)
            return None
        memory = memoryview(pinned.map_file())
        return PinnedSlot(self.header, meta, memory[HEADER_NBYTES : HEADER_NBYTES + self.data_nbytes], pinned)


@dataclass(frozen=True)
class SlotCopy:
    """A slot's contents, in memory that no other process writes to."""

    header: SlotHeader
    meta: bytes
    data: bytearray | memoryview


@dataclass(frozen=True)
class PinnedSlot(SlotCopy):
    """A slot's contents, not copied. The slot's file is not reused for another state while it has this second name."""

    slot: CompleteSlot  # the slot, under its second name

    def is_unchanged(self) -> bool:
        """Return whether everything read so far is the slot's state: no write began before the slot was pinned."""
        return read_slot(self.slot.path) == self.slot


def slot_paths(prefix: Path) -> tuple[Path, Path]:
    return prefix.with_name(prefix.name + ".0"), prefix.with_name(prefix.name + ".1")


def kept_prefix(prefix: Path) -> Path:
    """Return the prefix of kept slots' second names (for replicas), given the prefix of the usual slots."""
    return prefix.with_name(prefix.name + "-kept")


def marked_path(prefix: Path) -> Path:
    """Return the second name (a hard link) of the slot that the worker wants stored."""
    return prefix.with_name(prefix.name + ".marked")


def marking_path(prefix: Path) -> Path:
    """Return the temporary name that a mark has before it replaces the previous mark."""
    return prefix.with_name(prefix.name + ".marked.new")


def storing_path(prefix: Path) -> Path:
    """Return the second name of the slot that is currently being stored."""
    return prefix.with_name(prefix.name + ".storing")


def spare_path(prefix: Path) -> Path:
    """Return the name of the file that no state needs now. It replaces the next slot that must not be overwritten."""
    return prefix.with_name(prefix.name + ".spare")


def slot_files(prefix: Path) -> tuple[Path, ...]:
    """Return all names that the files of a worker's slots may have."""
    marks = marked_path(prefix), marking_path(prefix)
    return (*slot_paths(prefix), *marks, storing_path(prefix), spare_path(prefix))


def find_marked_slots(prefix: Path) -> list[CompleteSlot]:
    """Return the slot that a worker wants stored, if there is one; the slot does not change until it is stored."""
    found = read_slot(marked_path(prefix))
    return [found] if found is not None else []


def unmark_slot(prefix: Path, stored: StateVersion) -> None:
    """Remove a worker's mark for storage if the marked state is `stored` or older."""
    # The worker may mark a newer state at any moment: rename the mark before reading it, and put a newer one back.
    marked, taken = marked_path(prefix), storing_path(prefix)
    taken.unlink(missing_ok=True)  # renaming to another name of the same file would do nothing
    try:
        marked.rename(taken)
    except FileNotFoundError:
        return
    found = read_slot(taken)
    if found is not None and found.header.version > stored:
        with contextlib.suppress(FileExistsError):  # the worker has marked a still newer state
            os.link(taken, marked)
    taken.unlink(missing_ok=True)


def find_slots(prefix: Path) -> list[CompleteSlot]:
    """Return the complete slots of a worker, newest first; incomplete and missing slots are left out."""
    found = [slot for slot in map(read_slot, slot_paths(prefix)) if slot is not None]
    return sorted(found, key=lambda slot: (slot.header, slot.sequence), reverse=True)


def slot_nbytes(prefix: Path) -> int:
    return max((path.stat().st_size for path in slot_paths(prefix) if path.exists()), default=0)


def read_slot(path: Path) -> CompleteSlot | None:
    """Return the slot in a file, or None if the file is missing or the slot is not complete."""
    try:
        with path.open("rb", buffering=0) as file:
            page = file.read(HEADER_NBYTES)
            size = os.fstat(file.fileno()).st_size
    except OSError:
        return None
    sequence, fields = int.from_bytes(page[SEQUENCE_AT:_FIELDS_AT], "little"), page[_FIELDS_AT:_CRC_AT]
    if len(page) < _END or page[:SEQUENCE_AT] != _MAGIC or sequence % 2 or page[_CRC_AT:_END] != _crc(sequence, fields):
        return None
    generation, step, world, rank, persist, sharded, data_nbytes, meta_nbytes, meta_crc = _FIELDS.unpack(fields)
    if size < meta_offset(data_nbytes) + meta_nbytes:
        return None
    header = SlotHeader(generation, step, world, rank, bool(persist), bool(sharded))
    return CompleteSlot(header, sequence, data_nbytes, meta_nbytes, meta_crc, path)


def read_sequence(path: Path) -> int:
    """Return the sequence number in `path`, whether or not the slot is complete; 0 if there is none."""
    try:
        with path.open("rb", buffering=0) as file:
            return int.from_bytes(os.pread(file.fileno(), SEQUENCE_NBYTES, SEQUENCE_AT), "little")
    except OSError:
        return 0


def _read_into(file: io.FileIO, data: bytearray) -> int:
    view, got = memoryview(data), 0
    while got < len(data):  # a single read stops at 2 GiB
        more = file.readinto(view[got:])
        if not more:
            break
        got += more
    return got


# --- Writing slots ---


_POPULATE_WRITE: Final = 23  # Linux 5.14's MADV_POPULATE_WRITE, which Python does not define
_SPARE_NBYTES: Final = 64 << 10  # room for metadata, whose length varies a little from step to step


def preallocate_slots(prefix: Path, nbytes: int) -> None:
    """Allocate memory for both slots of a worker that has not started yet, if there is enough memory."""
    for path in slot_paths(prefix):
        with contextlib.suppress(OSError):
            file = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(file, 0, nbytes)
            finally:
                os.close(file)


class SlotPair:
    """A worker's two slots, for writing. Only one thread may use it at a time.

    If `private`, the files are removed when this object is closed or the process exits. Until then, the process holds a
    lock on `prefix`.lock, as do processes that it has forked in the meantime.
    """

    def __init__(self, prefix: Path, *, private: bool = False) -> None:
        self.prefix = prefix
        self._paths = slot_paths(prefix)
        self._maps: list[mmap.mmap | None] = [None, None]
        self._by_inode: dict[int, mmap.mmap] = {}
        self._writing: int | None = None
        self._closed = False
        self._remove = lock_private_slots(self, prefix) if private else None

    @classmethod
    def from_env(cls) -> SlotPair:
        """Return the slots named by `EDL_SLOTS`, or private slots if there is no agent."""
        prefix = read("EDL_SLOTS", Path)
        return cls(prefix) if prefix is not None else cls(new_private_prefix(), private=True)

    def find_complete(self) -> list[CompleteSlot]:
        return find_slots(self.prefix)

    def begin_write(self, data_nbytes: int, meta_nbytes: int) -> tuple[int, mmap.mmap]:
        """Begin to overwrite the slot that does not hold the newest complete state. Returns its number and mapping.

        The first time, and whenever more room is needed, memory is allocated for both slots, so that no later save has
        to allocate pages. Tensors begin at `HEADER_NBYTES` in the mapping. The mapping is the same as last time as long
        as the sizes fit.

        Raises:
            SettingsError: There is not enough shared memory. The newest complete state is unchanged.
            ClosedError: The slots are closed.
        """
        if self._closed:
            raise ClosedError(f"the slots {self.prefix} are closed")
        newest = self.newest_slot()
        number = 1 if newest is not None and newest.path == self._paths[0] else 0
        self._replace_pinned_file(number)
        room = meta_offset(data_nbytes) + meta_nbytes
        memory = self._map_slot(number, room)
        self._map_slot(1 - number, room)
        # Above all earlier numbers, of complete slots or not: a reader relies on it to see that a slot has not changed.
        highest = max(map(read_sequence, self._paths))
        set_sequence(memory, highest + highest % 2 + 1)
        self._writing = number
        return number, memory

    def commit_write(self, header: SlotHeader, data_nbytes: int, meta: bytes) -> None:
        """Add the metadata after the tensors have been written, and make this slot the newest complete slot."""
        if self._writing is None:
            raise ClosedError("commit_write() without begin_write()")
        memory, path = self._maps[self._writing], self._paths[self._writing]
        assert memory is not None
        self._writing = None
        begin = meta_offset(data_nbytes)
        memory[begin : begin + len(meta)] = meta
        sequence = int.from_bytes(memory[SEQUENCE_AT:_FIELDS_AT], "little") + 1
        fields = _FIELDS.pack(*astuple(header), data_nbytes, len(meta), zlib.crc32(meta))
        memory[_FIELDS_AT:_CRC_AT] = fields
        memory[_CRC_AT:_END] = _crc(sequence, fields)
        memory[:SEQUENCE_AT] = _MAGIC
        set_sequence(memory, sequence)  # last: it makes the slot complete
        if header.persist:
            self._mark_slot(path)

    @property
    def has_marked_slot(self) -> bool:
        return marked_path(self.prefix).exists()

    def remove_mark(self) -> None:
        """Remove all marks for storage: when a world ends, its ranks may have marked different states."""
        for path in (marked_path(self.prefix), marking_path(self.prefix)):
            path.unlink(missing_ok=True)

    def keep_only_slot(self, kept: CompleteSlot) -> None:
        """Invalidate a newer state in the other slot: the next save must spare `kept`, from which the world resumed."""
        other = self._paths[1 - self._paths.index(kept.path)]
        found = read_slot(other)
        if found is not None and found.sequence > kept.sequence:
            with other.open("r+b", buffering=0) as file:
                os.pwrite(file.fileno(), (found.sequence + 1).to_bytes(SEQUENCE_NBYTES, "little"), SEQUENCE_AT)

    def close(self) -> None:
        self._closed = True
        self._maps = [None, None]
        self._by_inode.clear()
        if self._remove is not None:
            self._remove()

    def _mark_slot(self, path: Path) -> None:
        """Link a slot to the name that the persister looks for. Replaces an earlier mark that is not stored yet."""
        new = marking_path(self.prefix)
        new.unlink(missing_ok=True)
        os.link(path, new)
        new.replace(marked_path(self.prefix))

    def _replace_pinned_file(self, number: int) -> None:
        path = self._paths[number]
        try:
            pinned = path.stat().st_nlink > 1
        except FileNotFoundError:
            return
        if pinned:
            path.unlink(missing_ok=True)
            with contextlib.suppress(FileNotFoundError):
                spare_path(self.prefix).rename(path)
            self._maps[number] = None
            self._drop_stale_maps()

    def _drop_stale_maps(self) -> None:
        """Drop mappings of files that no longer have a name here: such mappings would keep the memory allocated."""
        left = set()
        for path in (*slot_files(self.prefix), *slot_paths(kept_prefix(self.prefix))):
            with contextlib.suppress(FileNotFoundError):
                left.add(path.stat().st_ino)
        self._by_inode = {inode: memory for inode, memory in self._by_inode.items() if inode in left}

    def newest_slot(self) -> CompleteSlot | None:
        return max((slot for slot in map(read_slot, self._paths) if slot), key=lambda slot: slot.sequence, default=None)

    def _map_slot(self, number: int, nbytes: int) -> mmap.mmap:
        """Return a mapping of a slot with at least `nbytes` bytes, with its pages allocated."""
        memory = self._maps[number]
        if memory is not None and len(memory) >= nbytes:
            return memory
        path = self._paths[number]
        file = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        inode = os.fstat(file).st_ino
        memory = self._by_inode.get(inode)
        if memory is not None and len(memory) >= nbytes:
            os.close(file)
            self._maps[number] = memory
            return memory
        try:
            pages = -(-(nbytes + _SPARE_NBYTES) // mmap.PAGESIZE)
            wanted = max(pages * mmap.PAGESIZE, os.fstat(file).st_size)
            os.posix_fallocate(file, 0, wanted)  # raises if /dev/shm is full, instead of a SIGBUS later
            memory = mmap.mmap(file, wanted)
        except OSError as exc:
            if exc.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
                raise
            raise SettingsError(
                f"no room for {nbytes:,} bytes of state in {path.parent}; it must hold twice that: enlarge it (for a "
                "container --shm-size, in Kubernetes an emptyDir with medium Memory)"
            ) from exc
        finally:
            os.close(file)
        with contextlib.suppress(OSError, ValueError):
            memory.madvise(_POPULATE_WRITE)
        self._maps[number] = self._by_inode[inode] = memory
        return memory


_SHM_FOLDER: Final = Path("/dev/shm")
_PRIVATE: Final = "edl-slots-"
_LOCK: Final = ".lock"


def new_private_prefix() -> Path:
    """Return a prefix for this process's private slots, after removing slots that killed processes left behind."""
    _remove_orphans()
    return _SHM_FOLDER / f"{_PRIVATE}{os.getpid()}-{secrets.token_hex(6)}"


def lock_private_slots(owner: object, prefix: Path) -> Callable[[], object]:
    """Lock `prefix`.lock. Returns a finalizer of `owner` (`weakref.finalize`) that removes the slots and the lock."""
    return weakref.finalize(owner, _remove_slots, slot_files(prefix), *_open_lock(prefix), os.getpid())


def _open_lock(prefix: Path) -> tuple[Path, int]:
    """Return the lock file of private slots, and the open descriptor by which this process holds the lock."""
    path = prefix.with_name(prefix.name + _LOCK)
    while True:
        file = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file).st_nlink:
            return path, file
        os.close(file)  # another process removed the file between opening and locking it


def _remove_slots(paths: tuple[Path, ...], lock: Path, file: int, owner: int) -> None:
    if os.getpid() == owner:  # a forked process must not remove them
        for path in (*paths, lock):
            path.unlink(missing_ok=True)
        os.close(file)


def _remove_orphans() -> None:
    """Remove this user's slots left by killed processes, lock file last: slots without a lock file may be in use."""
    for lock in _SHM_FOLDER.glob(f"{_PRIVATE}*{_LOCK}"):
        with contextlib.suppress(OSError):  # the lock is another user's, is held, or was just removed
            file = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                for path in (*slot_files(lock.with_suffix("")), lock):
                    path.unlink(missing_ok=True)
            finally:
                os.close(file)
