"""Slots as read by another process, or a later one: the format of a slot, and how to find, copy and pin slots.

A reader never makes the worker wait. It copies a slot, then checks that the sequence number is still the same; if not,
it was too slow, and the copy is worthless.
"""

from __future__ import annotations

import contextlib
import io
import mmap
import os
import struct
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

__all__ = [
    "CompleteSlot",
    "HEADER_NBYTES",
    "PinnedSlot",
    "SEQUENCE_AT",
    "SEQUENCE_NBYTES",
    "SlotCopy",
    "SlotHeader",
    "SlotPage",
    "StateVersion",
    "decode_page",
    "find_marked_slots",
    "find_slots",
    "get_sequence",
    "kept_prefix",
    "marked_path",
    "marking_path",
    "meta_offset",
    "read_sequence",
    "read_slot",
    "set_sequence",
    "slot_files",
    "slot_nbytes",
    "slot_paths",
    "spare_path",
    "storing_path",
    "unmark_slot",
    "write_page",
]


HEADER_NBYTES: Final = 4096
"""Offset of the tensors' bytes: the start of a memory page, which is aligned for any type."""
SEQUENCE_AT: Final = 8  # after the magic bytes
SEQUENCE_NBYTES: Final = 8  # a processor's word, which is written in one operation

_MAGIC: Final = b"EDLSLOT1"
_FIELDS: Final = struct.Struct("=qqqqqqQQI")
_FIELDS_AT: Final = SEQUENCE_AT + SEQUENCE_NBYTES
_CRC_AT: Final = _FIELDS_AT + _FIELDS.size
_END: Final = _CRC_AT + 4
_ALIGN: Final = 64  # a cache line, so that metadata and tensors share none

StateVersion = tuple[int, int, int]
"""Generation, step and world of a state. They are the same on all ranks that saved it, and sort from old to new."""


@dataclass(frozen=True, order=True)
class SlotHeader:
    """Identifies the state in a slot. Headers sort from old to new.

    Attributes:
        generation: Generation of the world that saved the state.
        step: Last finished step, counted from 0.
        world: Number of ranks.
        rank: Rank of the worker that saved the state.
        persist: Whether the worker wants it on storage.
        sharded: Whether other ranks' slots hold parts of the same tensors.
    """

    generation: int
    step: int
    world: int
    rank: int
    persist: bool = False
    sharded: bool = False

    @property
    def version(self) -> StateVersion:
        """Generation, step and world of the state."""
        return self.generation, self.step, self.world


@dataclass(frozen=True)
class SlotPage:
    """Contents of the first page of a complete slot.

    Attributes:
        header: The state in the slot.
        sequence: Sequence number, which grows with every save.
        data_nbytes: Bytes of tensors.
        meta_nbytes: Bytes of metadata.
        meta_crc: CRC32 of the metadata.
    """

    header: SlotHeader
    sequence: int
    data_nbytes: int
    meta_nbytes: int
    meta_crc: int

    @property
    def meta_offset(self) -> int:
        """Offset of the metadata in the file."""
        return meta_offset(self.data_nbytes)

    @property
    def end(self) -> int:
        """Number of bytes that the file must have."""
        return self.meta_offset + self.meta_nbytes


def meta_offset(data_nbytes: int) -> int:
    """Return the offset of the metadata after `data_nbytes` bytes of tensors."""
    return -(-(HEADER_NBYTES + data_nbytes) // _ALIGN) * _ALIGN


def decode_page(page: bytes) -> SlotPage | None:
    """Parse the first page of a slot's file. Returns None if the slot is not complete."""
    if len(page) < _END or page[:SEQUENCE_AT] != _MAGIC:
        return None
    sequence = int.from_bytes(page[SEQUENCE_AT:_FIELDS_AT], "little")
    fields = page[_FIELDS_AT:_CRC_AT]
    if sequence % 2 or page[_CRC_AT:_END] != _crc(sequence, fields):
        return None
    generation, step, world, rank, persist, sharded, data_nbytes, meta_nbytes, meta_crc = _FIELDS.unpack(fields)
    header = SlotHeader(generation, step, world, rank, bool(persist), bool(sharded))
    return SlotPage(header, sequence, data_nbytes, meta_nbytes, meta_crc)


def write_page(memory: mmap.mmap, page: SlotPage) -> None:
    """Complete a slot whose tensors and metadata are written; the sequence number is written last."""
    header = page.header
    fields = _FIELDS.pack(
        *(header.generation, header.step, header.world, header.rank, header.persist, header.sharded),
        *(page.data_nbytes, page.meta_nbytes, page.meta_crc),
    )
    memory[_FIELDS_AT:_CRC_AT] = fields
    memory[_CRC_AT:_END] = _crc(page.sequence, fields)
    memory[:SEQUENCE_AT] = _MAGIC
    set_sequence(memory, page.sequence)


def get_sequence(memory: mmap.mmap) -> int:
    """Return the sequence number: odd while the slot is being written, even when it is complete."""
    return int.from_bytes(memory[SEQUENCE_AT:_FIELDS_AT], "little")


def set_sequence(memory: mmap.mmap, sequence: int) -> None:
    """Write the sequence number: odd while the slot is being written, even when it is complete."""
    memory[SEQUENCE_AT:_FIELDS_AT] = sequence.to_bytes(SEQUENCE_NBYTES, "little")


def _crc(sequence: int, fields: bytes) -> bytes:
    return zlib.crc32(fields, zlib.crc32(sequence.to_bytes(SEQUENCE_NBYTES, "little"))).to_bytes(4, "little")


# --- Finding and reading slots ---


@dataclass(frozen=True)
class CompleteSlot(SlotPage):
    """A slot that was complete when it was found.

    Attributes:
        path: The slot's file.
    """

    path: Path

    def map_file(self) -> mmap.mmap:
        """Map the file so that writing to the mapping does not change the file.

        Raises:
            OSError: The file is gone.
        """
        with self.path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)

    def read_metadata(self) -> bytes | None:
        """Return the metadata, or None if the slot was overwritten since."""
        try:
            with self.path.open("rb", buffering=0) as file:
                meta = os.pread(file.fileno(), self.meta_nbytes, self.meta_offset)
        except OSError:
            return None
        return meta if zlib.crc32(meta) == self.meta_crc and len(meta) == self.meta_nbytes else None

    def copy_contents(self) -> SlotCopy | None:
        """Copy the contents as they were when the slot was found; None if it was overwritten since."""
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
        """Give the slot's file a second name, and map it. From then on, `begin_write` does not write to it again.

        A write that began a moment earlier is detected only by `PinnedSlot.is_unchanged`, after the contents were read.
        The memory is held until that name is removed and the mapping is gone.

        Returns:
            The contents as they were when the slot was found, without a copy; None if it was overwritten since.
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
    """A slot's contents in memory to which no other process writes.

    Attributes:
        header: The state.
        meta: The metadata.
        data: The bytes of the tensors.
    """

    header: SlotHeader
    meta: bytes
    data: bytearray | memoryview


@dataclass(frozen=True)
class PinnedSlot(SlotCopy):
    """A slot's contents in place, in a file that is not reused for another state as long as it has this second name.

    Attributes:
        slot: The slot, under its second name.
    """

    slot: CompleteSlot

    def is_unchanged(self) -> bool:
        """Return whether everything read so far is the slot's state, because no write began before it was pinned."""
        return read_slot(self.slot.path) == self.slot


def slot_paths(prefix: Path) -> tuple[Path, Path]:
    """Return the files of a worker's slots."""
    return prefix.with_name(prefix.name + ".0"), prefix.with_name(prefix.name + ".1")


def kept_prefix(prefix: Path) -> Path:
    """Return the prefix of the second names of slots kept for replicas, given the prefix of the usual slots."""
    return prefix.with_name(prefix.name + "-kept")


def marked_path(prefix: Path) -> Path:
    """Return the second name of the slot that the worker wants on storage."""
    return prefix.with_name(prefix.name + ".marked")


def marking_path(prefix: Path) -> Path:
    """Return the temporary name of a mark, before it replaces the previous mark."""
    return prefix.with_name(prefix.name + ".marked.new")


def storing_path(prefix: Path) -> Path:
    """Return the second name of the slot that is currently being stored."""
    return prefix.with_name(prefix.name + ".storing")


def spare_path(prefix: Path) -> Path:
    """Return the name of a file that no state needs any longer, for the next slot that must not be overwritten."""
    return prefix.with_name(prefix.name + ".spare")


def slot_files(prefix: Path) -> tuple[Path, ...]:
    """Return all names that the files of a worker's slots may have."""
    marks = marked_path(prefix), marking_path(prefix)
    return (*slot_paths(prefix), *marks, storing_path(prefix), spare_path(prefix))


def find_marked_slots(prefix: Path) -> list[CompleteSlot]:
    """Return the slot that a worker wants on storage, if there is one; it does not change until it is stored."""
    found = read_slot(marked_path(prefix))
    return [found] if found is not None else []


def unmark_slot(prefix: Path, stored: StateVersion) -> None:
    """Remove a worker's mark for storage if the marked state is `stored` or older.

    The worker may mark a newer state at any moment. So the mark is renamed before it is read, and put back if it is
    newer: a mark that is read and then removed by name might not be the one that was read.
    """
    marked, taken = marked_path(prefix), storing_path(prefix)
    taken.unlink(missing_ok=True)  # renaming to another name of the same file would do nothing
    try:
        marked.rename(taken)
    except FileNotFoundError:
        return
    found = read_slot(taken)
    if found is not None and found.header.version > stored:
        with contextlib.suppress(FileExistsError):  # the worker has marked a still newer one
            os.link(taken, marked)
    taken.unlink(missing_ok=True)


def find_slots(prefix: Path) -> list[CompleteSlot]:
    """Return the complete slots of a worker, newest first; incomplete and missing slots are left out."""
    found = [slot for slot in map(read_slot, slot_paths(prefix)) if slot is not None]
    return sorted(found, key=lambda slot: (slot.header, slot.sequence), reverse=True)


def slot_nbytes(prefix: Path) -> int:
    """Return the size in bytes of the larger of a worker's slots, 0 if there is none."""
    return max((path.stat().st_size for path in slot_paths(prefix) if path.exists()), default=0)


def read_slot(path: Path) -> CompleteSlot | None:
    """Return the slot in `path` if it is complete."""
    try:
        with path.open("rb", buffering=0) as file:
            page = file.read(HEADER_NBYTES)
            size = os.fstat(file.fileno()).st_size
    except OSError:
        return None
    content = decode_page(page)
    return CompleteSlot(**vars(content), path=path) if content is not None and size >= content.end else None


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
