"""The page that a slot begins with, as bytes: which state the slot holds, how much of it, and whether it is complete.

Nothing here opens a file. The order in which `complete` stores its parts is what makes a slot complete or not.
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
    "SlotHeader",
    "decode",
    "meta_offset",
    "sequence_of",
    "set_sequence",
    "complete",
]

HEADER_NBYTES: Final = 4096
"""Where the tensors' bytes begin."""
SEQUENCE_AT: Final = 8
SEQUENCE_NBYTES: Final = 8

_MAGIC: Final = b"EDLSLOT1"
_FIELDS: Final = struct.Struct("=qqqqqqQQI")
_FIELDS_AT: Final = SEQUENCE_AT + SEQUENCE_NBYTES
_CRC_AT: Final = _FIELDS_AT + _FIELDS.size
_END: Final = _CRC_AT + 4
_ALIGN: Final = 64


@dataclass(frozen=True, order=True)
class SlotHeader:
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
class SlotPage:
    """What the header of a complete slot says."""

    label: SlotHeader
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
    """Where the metadata begins behind so many bytes of tensors."""
    return -(-(HEADER_NBYTES + data_nbytes) // _ALIGN) * _ALIGN


def decode(page: bytes) -> SlotPage | None:
    """What a file that begins with `page` says, None where the slot is not complete."""
    if len(page) < _END or page[:SEQUENCE_AT] != _MAGIC:
        return None
    sequence = int.from_bytes(page[SEQUENCE_AT:_FIELDS_AT], "little")
    fields = page[_FIELDS_AT:_CRC_AT]
    if sequence % 2 or page[_CRC_AT:_END] != _crc(sequence, fields):
        return None
    generation, step, world, rank, persist, sharded, data_nbytes, meta_nbytes, meta_crc = _FIELDS.unpack(fields)
    label = SlotHeader(generation, step, world, rank, bool(persist), bool(sharded))
    return SlotPage(label, sequence, data_nbytes, meta_nbytes, meta_crc)


def complete(memory: mmap.mmap, header: SlotPage) -> None:
    """Make a slot complete whose tensors and metadata are in place: the sequence number is stored last."""
    label = header.label
    fields = _FIELDS.pack(
        *(label.generation, label.step, label.world, label.rank, label.persist, label.sharded),
        *(header.data_nbytes, header.meta_nbytes, header.meta_crc),
    )
    memory[_FIELDS_AT:_CRC_AT] = fields
    memory[_CRC_AT:_END] = _crc(header.sequence, fields)
    memory[:SEQUENCE_AT] = _MAGIC
    set_sequence(memory, header.sequence)


def sequence_of(memory: mmap.mmap) -> int:
    """The sequence number: odd while the slot is written, even when it is complete."""
    return int.from_bytes(memory[SEQUENCE_AT:_FIELDS_AT], "little")


def set_sequence(memory: mmap.mmap, sequence: int) -> None:
    """Say that the slot is being written, or that it is complete."""
    memory[SEQUENCE_AT:_FIELDS_AT] = sequence.to_bytes(SEQUENCE_NBYTES, "little")


def _crc(sequence: int, fields: bytes) -> bytes:
    return zlib.crc32(fields, zlib.crc32(sequence.to_bytes(SEQUENCE_NBYTES, "little"))).to_bytes(4, "little")
