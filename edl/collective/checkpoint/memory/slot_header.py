"""The page that a slot begins with, as bytes: which state the slot holds, how much of it, and whether it is complete.

Nothing here opens a file. The order in which `write_page` stores its parts is what makes a slot complete or not.
"""

from __future__ import annotations

import mmap
import struct
import zlib
from dataclasses import dataclass
from typing import Final

__all__ = [
    "HEADER_NBYTES",
    "SEQUENCE_AT",
    "SEQUENCE_NBYTES",
    "SlotPage",
    "StateVersion",
    "SlotHeader",
    "decode_page",
    "meta_offset",
    "get_sequence",
    "set_sequence",
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
