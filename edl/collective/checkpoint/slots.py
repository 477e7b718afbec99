"""Two slots of shared memory that hold a worker's last two saved states, and outlive the worker.

A slot is a file in memory: a page of header, then the bytes of the tensors, then the metadata (JSON). Saving fills
the slot that does not hold the newest complete state::

    odd sequence number -> tensors -> metadata -> label and checksums -> even sequence number

so that a worker killed at any instant leaves one slot complete. The stores of a killed process are all in memory, in
the order in which it made them; that is why the sequence number says whether the tensors are complete, and why their
bytes need no checksum here, which at a gigabyte a second would cost far more than the copy. The header and the
metadata have one each. Tensors get theirs when they leave memory (`edl.collective.checkpoint.storage`).

A reader in another process copies a slot and then looks whether the sequence number is still the one before: it never
makes the worker wait. This module knows nothing of torch.

Where there is no agent, a process makes slots of its own, which go with it. If it is killed, the next one removes them.
It knows them by a lock that their owner holds on a file beside them: process ids say nothing across containers that
share `/dev/shm`.
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
import threading
import weakref
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from edl.errors import ClosedError, SettingsError
from edl.settings import read

__all__ = ["HEADER_NBYTES", "Copy", "Found", "Label", "SlotPair", "find", "make_room", "nbytes_of"]

HEADER_NBYTES: Final = 4096
"""Where the tensors' bytes begin."""

_MAGIC: Final = b"EDLSLOT1"
_FIELDS: Final = struct.Struct("=qqqqqqQQI")
_SEQUENCE_AT, _FIELDS_AT = 8, 16
_CRC_AT: Final = _FIELDS_AT + _FIELDS.size
_ALIGN: Final = 64
_POPULATE_WRITE: Final = 23  # MADV_POPULATE_WRITE of Linux 5.14, which Python has no name for
_SHM_FOLDER: Final = Path("/dev/shm")
_PRIVATE: Final = "edl-slots-"
_LOCK: Final = ".lock"


@dataclass(frozen=True, order=True)
class Label:
    """Which state a slot holds. Labels sort from old to new.

    Attributes:
        generation: of the world that saved it.
        step: the last one finished, from 0.
        world: number of ranks.
        rank: of the worker that saved it.
        persist: whether the worker wants it on storage.
        sharded: whether other ranks' slots hold parts of the same tensors.
    """

    generation: int
    step: int
    world: int
    rank: int
    persist: bool = False
    sharded: bool = False


@dataclass(frozen=True)
class Found:
    """A slot that was complete when looked at."""

    path: Path
    label: Label
    sequence: int
    data_nbytes: int
    meta_nbytes: int
    meta_crc: int

    @property
    def meta_offset(self) -> int:
        """Where the metadata begins in the file."""
        return _after(self.data_nbytes)

    def map(self) -> mmap.mmap:
        """The file, mapped so that writing to the mapping changes nobody's bytes.

        Raises:
            OSError: it is gone.
        """
        with self.path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)

    def meta(self) -> bytes | None:
        """The metadata, or None where the slot was overwritten since."""
        return _meta(self)

    def copy(self) -> Copy | None:
        """The slot's contents as they were when it was found, or None where it was overwritten since."""
        meta = _meta(self)
        if meta is None:
            return None
        data = bytearray(self.data_nbytes)
        try:
            with self.path.open("rb", buffering=0) as file:
                file.seek(HEADER_NBYTES)
                got = _read_into(file, data)
        except OSError:
            return None
        return Copy(self.label, meta, data) if got == self.data_nbytes and _look(self.path) == self else None


@dataclass(frozen=True)
class Copy:
    """A slot's contents in memory of the reader's own."""

    label: Label
    meta: bytes
    data: bytearray


def find(prefix: Path) -> list[Found]:
    """The complete slots of one worker, newest first. Torn ones and missing ones are left out.

    Args:
        prefix: what `EDL_SLOTS` says; the files end in `.0` and `.1`.
    """
    found = [one for one in map(_look, _paths(prefix)) if one is not None]
    return sorted(found, key=lambda one: (one.label, one.sequence), reverse=True)


def nbytes_of(prefix: Path) -> int:
    """How large the larger of one worker's slots is, 0 where there is none."""
    return max((path.stat().st_size for path in _paths(prefix) if path.exists()), default=0)


def make_room(prefix: Path, nbytes: int) -> None:
    """Give both slots of a worker that is still to come their memory, so that nobody has to wait for it then.

    Where there is not enough, the worker will say so.
    """
    for path in _paths(prefix):
        with contextlib.suppress(OSError):
            file = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(file, 0, nbytes)
            finally:
                os.close(file)


class SlotPair:
    """A worker's two slots, for writing. One thread at a time."""

    def __init__(self, prefix: Path, *, private: bool = False) -> None:
        """Use the files `prefix`.0 and .1, which are made when first needed.

        Args:
            private: remove them when this object is closed or the process exits, and hold a lock on `prefix`.lock until
                then. Processes that are forked meanwhile hold it as well, for as long as they live.
        """
        self.prefix = prefix
        self._paths = _paths(prefix)
        self._maps: list[mmap.mmap | None] = [None, None]
        self._writing: int | None = None
        self._closed = False
        owned = (self._paths, *_locked(prefix), os.getpid()) if private else ()
        self._remove = weakref.finalize(self, _remove, *owned) if private else None

    @classmethod
    def from_env(cls) -> SlotPair:
        """The slots named by `EDL_SLOTS`, or private ones where there is no agent."""
        prefix = read("EDL_SLOTS", Path)
        if prefix is not None:
            return cls(prefix)
        _sweep()
        return cls(_SHM_FOLDER / f"{_PRIVATE}{os.getpid()}-{secrets.token_hex(6)}", private=True)

    def find(self) -> list[Found]:
        """The complete ones, newest first."""
        return find(self.prefix)

    def begin(self, data_nbytes: int, meta_nbytes: int, *, hurry: bool = False) -> tuple[int, mmap.mmap]:
        """Begin to overwrite the slot that does not hold the newest complete state.

        The first time, and whenever more room is needed, both slots are given their memory, so that no later save
        pays for the pages.

        Args:
            hurry: somebody waits: the slot that is not written now gets its memory in the background.

        Returns:
            The slot's number, and the mapping: tensors go at `HEADER_NBYTES`. It is the same mapping as the last time
            while the sizes fit.

        Raises:
            SettingsError: there is not enough shared memory. The newest complete state is as it was.
            ClosedError: after `close`.
        """
        if self._closed:
            raise ClosedError(f"the slots {self.prefix} are closed")
        newest = max((one for one in map(_look, self._paths) if one), key=lambda one: one.sequence, default=None)
        number = 1 if newest is not None and newest.path == self._paths[0] else 0
        room = _after(data_nbytes) + meta_nbytes
        memory = self._room(number, room)
        if hurry:
            self._ask_for_room(1 - number, room)
        else:
            self._room(1 - number, room)
        # Above every number that was ever here, complete or not: a reader knows by it that a slot is still the same.
        highest = max(map(_raw_sequence, self._paths))
        _set_sequence(memory, highest + highest % 2 + 1)
        self._writing = number
        return number, memory

    def commit(self, label: Label, data_nbytes: int, meta: bytes) -> None:
        """The tensors are in place: add the metadata, and make the slot the newest complete one."""
        if self._writing is None:
            raise ClosedError("commit() without begin()")
        memory = self._maps[self._writing]
        assert memory is not None
        self._writing = None
        begin = _after(data_nbytes)
        memory[begin : begin + len(meta)] = meta
        fields = _FIELDS.pack(
            *(label.generation, label.step, label.world, label.rank, label.persist, label.sharded),
            *(data_nbytes, len(meta), zlib.crc32(meta)),
        )
        sequence = _sequence(memory) + 1
        memory[_FIELDS_AT:_CRC_AT] = fields
        memory[_CRC_AT : _CRC_AT + 4] = _header_crc(sequence, fields)
        memory[:_SEQUENCE_AT] = _MAGIC
        _set_sequence(memory, sequence)

    def retract(self) -> None:
        """Make the newest complete slot count as incomplete: what it holds is not to be trusted."""
        newest = max((one for one in map(_look, self._paths) if one), key=lambda one: one.sequence, default=None)
        if newest is not None:
            _spoil(newest)

    def keep_only(self, kept: Found) -> None:
        """Forget the other slot: the world went on from `kept`, so the next save must not overwrite that one."""
        other = self._paths[1 - self._paths.index(kept.path)]
        found = _look(other)
        if found is not None and found.sequence > kept.sequence:
            _spoil(found)

    def close(self) -> None:
        """Let go of the memory; private slots are removed."""
        self._closed = True
        self._maps = [None, None]
        if self._remove is not None:
            self._remove()

    def _room(self, number: int, nbytes: int) -> mmap.mmap:
        """The mapping of a slot with at least `nbytes`, its pages in place."""
        memory = self._maps[number]
        if memory is not None and len(memory) >= nbytes:
            return memory
        path = self._paths[number]
        file = self._open(number)
        try:
            wanted = max(_whole_pages(nbytes), os.fstat(file).st_size)
            os.posix_fallocate(file, 0, wanted)  # a full /dev/shm is an error here, not a SIGBUS later
            memory = mmap.mmap(file, wanted)
        except OSError as exc:
            if exc.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
                raise
            raise SettingsError(
                f"no room for {nbytes:,} bytes of state in {path.parent}, twice of which is needed: enlarge it (for a "
                "container --shm-size, in Kubernetes an emptyDir with medium Memory)"
            ) from exc
        finally:
            os.close(file)
        with contextlib.suppress(OSError, ValueError):
            memory.madvise(_POPULATE_WRITE)
        self._maps[number] = memory
        return memory

    def _ask_for_room(self, number: int, nbytes: int) -> None:
        """Have the kernel give a slot its pages; if it cannot, `_room` will say so when they are needed."""

        def allocate(file: int) -> None:
            with contextlib.suppress(OSError):
                os.posix_fallocate(file, 0, _whole_pages(nbytes))
            os.close(file)

        threading.Thread(target=allocate, args=(self._open(number),), name="edl-room", daemon=True).start()

    def _open(self, number: int) -> int:
        return os.open(self._paths[number], os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)


_SPARE_NBYTES: Final = 64 << 10  # the metadata's length varies a little from step to step


def _whole_pages(nbytes: int) -> int:
    return -(-(nbytes + _SPARE_NBYTES) // mmap.PAGESIZE) * mmap.PAGESIZE


def _paths(prefix: Path) -> tuple[Path, Path]:
    return prefix.with_name(prefix.name + ".0"), prefix.with_name(prefix.name + ".1")


def _after(data_nbytes: int) -> int:
    return -(-(HEADER_NBYTES + data_nbytes) // _ALIGN) * _ALIGN


def _look(path: Path) -> Found | None:
    """The slot in `path` if it is complete."""
    try:
        with path.open("rb", buffering=0) as file:
            header = file.read(_CRC_AT + 4)
            size = os.fstat(file.fileno()).st_size
    except OSError:
        return None
    if len(header) < _CRC_AT + 4 or header[:_SEQUENCE_AT] != _MAGIC:
        return None
    sequence = int.from_bytes(header[_SEQUENCE_AT:_FIELDS_AT], "little")
    fields = header[_FIELDS_AT:_CRC_AT]
    if sequence % 2 or header[_CRC_AT:] != _header_crc(sequence, fields):
        return None
    generation, step, world, rank, persist, sharded, data_nbytes, meta_nbytes, meta_crc = _FIELDS.unpack(fields)
    if size < _after(data_nbytes) + meta_nbytes:
        return None
    label = Label(generation, step, world, rank, bool(persist), bool(sharded))
    return Found(path, label, sequence, data_nbytes, meta_nbytes, meta_crc)


def _raw_sequence(path: Path) -> int:
    """The sequence number that stands in `path`, whatever it means; 0 where there is none."""
    try:
        with path.open("rb", buffering=0) as file:
            return int.from_bytes(os.pread(file.fileno(), 8, _SEQUENCE_AT), "little")
    except OSError:
        return 0


def _meta(found: Found) -> bytes | None:
    try:
        with found.path.open("rb", buffering=0) as file:
            meta = os.pread(file.fileno(), found.meta_nbytes, found.meta_offset)
    except OSError:
        return None
    return meta if zlib.crc32(meta) == found.meta_crc and len(meta) == found.meta_nbytes else None


def _spoil(found: Found) -> None:
    with found.path.open("r+b", buffering=0) as file:
        os.pwrite(file.fileno(), (found.sequence + 1).to_bytes(8, "little"), _SEQUENCE_AT)


def _read_into(file: io.FileIO, data: bytearray) -> int:
    view, got = memoryview(data), 0
    while got < len(data):  # one read ends at 2 GiB
        more = file.readinto(view[got:])
        if not more:
            break
        got += more
    return got


def _header_crc(sequence: int, fields: bytes) -> bytes:
    return zlib.crc32(fields, zlib.crc32(sequence.to_bytes(8, "little"))).to_bytes(4, "little")


def _sequence(memory: mmap.mmap) -> int:
    return int.from_bytes(memory[_SEQUENCE_AT:_FIELDS_AT], "little")


def _set_sequence(memory: mmap.mmap, sequence: int) -> None:
    memory[_SEQUENCE_AT:_FIELDS_AT] = sequence.to_bytes(8, "little")


def _locked(prefix: Path) -> tuple[Path, int]:
    """The lock file of private slots, and its descriptor, by which this process holds the lock."""
    path = prefix.with_name(prefix.name + _LOCK)
    while True:
        file = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file).st_nlink:
            return path, file
        os.close(file)  # somebody swept between these two lines


def _remove(paths: tuple[Path, Path], lock: Path, file: int, owner: int) -> None:
    if os.getpid() == owner:  # not in a fork
        for path in (*paths, lock):
            path.unlink(missing_ok=True)
        os.close(file)


def _sweep() -> None:
    """Remove what killed processes of this user left behind, the lock last: what has none is nobody's to judge."""
    for lock in _SHM_FOLDER.glob(f"{_PRIVATE}*{_LOCK}"):
        with contextlib.suppress(OSError):  # somebody else's, or held, or just removed
            file = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                for path in (*_paths(lock.with_suffix("")), lock):
                    path.unlink(missing_ok=True)
            finally:
                os.close(file)
