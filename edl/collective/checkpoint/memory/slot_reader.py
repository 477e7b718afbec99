"""Slots as another process reads them, or a later one: it never makes the worker wait, and sees when it was too slow.

A reader copies a slot and then looks whether the sequence number is still the one before.
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
"""Where the tensors' bytes begin: at a page of memory, so that they are aligned for any type."""
SEQUENCE_AT: Final = 8  # behind the magic bytes
SEQUENCE_NBYTES: Final = 8  # a processor's word, which is stored at once

_MAGIC: Final = b"EDLSLOT1"
_FIELDS: Final = struct.Struct("=qqqqqqQQI")
_FIELDS_AT: Final = SEQUENCE_AT + SEQUENCE_NBYTES
_CRC_AT: Final = _FIELDS_AT + _FIELDS.size
_END: Final = _CRC_AT + 4
_ALIGN: Final = 64  # a cache line, so that metadata shares none with tensors

StateVersion = tuple[int, int, int]
"""Generation, step and world of a state, which sort from old to new: the same on all ranks that saved it."""


@dataclass(frozen=True, order=True)
class SlotHeader:
    """Which state a slot holds. Headers sort from old to new.

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

    @property
    def version(self) -> StateVersion:
        """Generation, step and world of the state."""
        return self.generation, self.step, self.world


@dataclass(frozen=True)
class SlotPage:
    """What the first page of a complete slot says.

    Attributes:
        header: which state the slot holds.
        sequence: the sequence number, which grows with every save.
        data_nbytes: bytes of tensors.
        meta_nbytes: bytes of metadata.
        meta_crc: CRC32 of the metadata.
    """

    header: SlotHeader
    sequence: int
    data_nbytes: int
    meta_nbytes: int
    meta_crc: int

    @property
    def meta_offset(self) -> int:
        """Where the metadata begins in the file."""
        return meta_offset(self.data_nbytes)

    @property
    def end(self) -> int:
        """Bytes that the file must have."""
        return self.meta_offset + self.meta_nbytes


def meta_offset(data_nbytes: int) -> int:
    """Return where the metadata begins behind so many bytes of tensors."""
    return -(-(HEADER_NBYTES + data_nbytes) // _ALIGN) * _ALIGN


def decode_page(page: bytes) -> SlotPage | None:
    """Read the first page of a slot's file. Returns None where the slot is not complete."""
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
    """Make a slot complete whose tensors and metadata are in place: the sequence number is stored last."""
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
    """Return the sequence number: odd while the slot is written, even when it is complete."""
    return int.from_bytes(memory[SEQUENCE_AT:_FIELDS_AT], "little")


def set_sequence(memory: mmap.mmap, sequence: int) -> None:
    """Store the sequence number: odd says that the slot is being written, even that it is complete."""
    memory[SEQUENCE_AT:_FIELDS_AT] = sequence.to_bytes(SEQUENCE_NBYTES, "little")


def _crc(sequence: int, fields: bytes) -> bytes:
    return zlib.crc32(fields, zlib.crc32(sequence.to_bytes(SEQUENCE_NBYTES, "little"))).to_bytes(4, "little")


# --- Slots as another process reads them, or a later one ---


@dataclass(frozen=True)
class CompleteSlot(SlotPage):
    """A slot that was complete when it was found.

    Attributes:
        path: the slot's file.
    """

    path: Path

    def map_file(self) -> mmap.mmap:
        """Map the file so that writing to the mapping does not change the file.

        Raises:
            OSError: it is gone.
        """
        with self.path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)

    def read_metadata(self) -> bytes | None:
        """Return the metadata, or None where the slot was overwritten since."""
        try:
            with self.path.open("rb", buffering=0) as file:
                meta = os.pread(file.fileno(), self.meta_nbytes, self.meta_offset)
        except OSError:
            return None
        return meta if zlib.crc32(meta) == self.meta_crc and len(meta) == self.meta_nbytes else None

    def copy_contents(self) -> SlotCopy | None:
        """Copy the contents as they were when the slot was found; None where it was overwritten since."""
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
        """Give the slot's file a second name, and map it: from then on no write to it begins (`begin_write`).

        A write that had begun a moment before is only known by `PinnedSlot.is_unchanged`, after the contents were read.
        The memory is held until that name is removed and the mapping is gone.

        Returns:
            The contents as they were when the slot was found, without a copy; None where it was overwritten since.
        """
        name.unlink(missing_ok=True)  # what a killed process left; it may be this very file
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
    """A slot's contents in memory that no other process writes to.

    Attributes:
        header: which state it is.
        meta: the metadata.
        data: the bytes of the tensors.
    """

    header: SlotHeader
    meta: bytes
    data: bytearray | memoryview


@dataclass(frozen=True)
class PinnedSlot(SlotCopy):
    """A slot's contents where they are, in a file that is not used for another state while it has this second name.

    Attributes:
        slot: the slot, by that name.
    """

    slot: CompleteSlot

    def is_unchanged(self) -> bool:
        """Return whether what was read until now is the slot's state: no write had begun before the file was pinned."""
        return read_slot(self.slot.path) == self.slot


def slot_paths(prefix: Path) -> tuple[Path, Path]:
    """Return the files of a worker's slots."""
    return prefix.with_name(prefix.name + ".0"), prefix.with_name(prefix.name + ".1")


def kept_prefix(prefix: Path) -> Path:
    """Return the prefix of the second names of what is kept for replicas, beside the usual slots' `prefix`."""
    return prefix.with_name(prefix.name + "-kept")


def marked_path(prefix: Path) -> Path:
    """Return the second name of the slot that the worker wants on storage."""
    return prefix.with_name(prefix.name + ".marked")


def marking_path(prefix: Path) -> Path:
    """Return the name that a mark has for a moment, before it takes the place of the one before."""
    return prefix.with_name(prefix.name + ".marked.new")


def storing_path(prefix: Path) -> Path:
    """Return the second name of the slot that is just being stored."""
    return prefix.with_name(prefix.name + ".storing")


def spare_path(prefix: Path) -> Path:
    """Return the name of memory that no state needs any longer, for the next slot that must not be written to."""
    return prefix.with_name(prefix.name + ".spare")


def slot_files(prefix: Path) -> tuple[Path, ...]:
    """Return all names that the files of a worker's slots may have."""
    marks = marked_path(prefix), marking_path(prefix)
    return (*slot_paths(prefix), *marks, storing_path(prefix), spare_path(prefix))


def find_marked_slots(prefix: Path) -> list[CompleteSlot]:
    """Return the slot that a worker wants on storage, if there is any; it stays as it is until it is stored."""
    found = read_slot(marked_path(prefix))
    return [found] if found is not None else []


def unmark_slot(prefix: Path, stored: StateVersion) -> None:
    """Unmark what a worker wants on storage, if it is `stored` or older.

    The worker may mark a newer state at any moment. So the mark is taken away under another name before it is read,
    and put back if it is newer: a mark that is read and then removed by its name may not be the one that was read.
    """
    marked, taken = marked_path(prefix), storing_path(prefix)
    taken.unlink(missing_ok=True)  # a rename onto another name of the same file does nothing
    try:
        marked.rename(taken)
    except FileNotFoundError:
        return
    found = read_slot(taken)
    if found is not None and found.header.version > stored:
        with contextlib.suppress(FileExistsError):  # there is a still newer one
            os.link(taken, marked)
    taken.unlink(missing_ok=True)


def find_slots(prefix: Path) -> list[CompleteSlot]:
    """Return the complete slots of a worker, newest first, without torn and missing slots."""
    found = [slot for slot in map(read_slot, slot_paths(prefix)) if slot is not None]
    return sorted(found, key=lambda slot: (slot.header, slot.sequence), reverse=True)


def slot_nbytes(prefix: Path) -> int:
    """Return the bytes of the larger of a worker's slots, 0 where there is none."""
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
    """Return the sequence number that stands in `path`, whatever it means; 0 where there is none."""
    try:
        with path.open("rb", buffering=0) as file:
            return int.from_bytes(os.pread(file.fileno(), SEQUENCE_NBYTES, SEQUENCE_AT), "little")
    except OSError:
        return 0


def _read_into(file: io.FileIO, data: bytearray) -> int:
    view, got = memoryview(data), 0
    while got < len(data):  # one read ends at 2 GiB
        more = file.readinto(view[got:])
        if not more:
            break
        got += more
    return got
