"""Slots as another process reads them, or a later one: it never makes the worker wait, and sees when it was too slow.

A reader copies a slot and then looks whether the sequence number is still the one before.
"""

from __future__ import annotations

import io
import mmap
import os
import zlib
from dataclasses import dataclass
from pathlib import Path

from edl.collective.checkpoint.slots_header import (
    HEADER_NBYTES,
    SEQUENCE_AT,
    SEQUENCE_NBYTES,
    Header,
    Label,
    decode,
)

__all__ = ["Copy", "Found", "find", "last_sequence", "look", "nbytes_of", "paths_of"]


@dataclass(frozen=True)
class Found(Header):
    """A slot that was complete when looked at."""

    path: Path

    def map(self) -> mmap.mmap:
        """The file, mapped so that writing to the mapping changes nobody's bytes.

        Raises:
            OSError: it is gone.
        """
        with self.path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)

    def meta(self) -> bytes | None:
        """The metadata, or None where the slot was overwritten since."""
        try:
            with self.path.open("rb", buffering=0) as file:
                meta = os.pread(file.fileno(), self.meta_nbytes, self.meta_offset)
        except OSError:
            return None
        return meta if zlib.crc32(meta) == self.meta_crc and len(meta) == self.meta_nbytes else None

    def copy(self) -> Copy | None:
        """The slot's contents as they were when it was found, or None where it was overwritten since."""
        meta = self.meta()
        if meta is None:
            return None
        data = bytearray(self.data_nbytes)
        try:
            with self.path.open("rb", buffering=0) as file:
                file.seek(HEADER_NBYTES)
                got = _read_into(file, data)
        except OSError:
            return None
        return Copy(self.label, meta, data) if got == self.data_nbytes and look(self.path) == self else None


@dataclass(frozen=True)
class Copy:
    """A slot's contents in memory of the reader's own."""

    label: Label
    meta: bytes
    data: bytearray


def paths_of(prefix: Path) -> tuple[Path, Path]:
    """The files of one worker's slots."""
    return prefix.with_name(prefix.name + ".0"), prefix.with_name(prefix.name + ".1")


def find(prefix: Path) -> list[Found]:
    """The complete slots of one worker, newest first. Torn ones and missing ones are left out.

    Args:
        prefix: what `EDL_SLOTS` says; the files end in `.0` and `.1`.
    """
    found = [one for one in map(look, paths_of(prefix)) if one is not None]
    return sorted(found, key=lambda one: (one.label, one.sequence), reverse=True)


def nbytes_of(prefix: Path) -> int:
    """How large the larger of one worker's slots is, 0 where there is none."""
    return max((path.stat().st_size for path in paths_of(prefix) if path.exists()), default=0)


def look(path: Path) -> Found | None:
    """The slot in `path` if it is complete."""
    try:
        with path.open("rb", buffering=0) as file:
            page = file.read(HEADER_NBYTES)
            size = os.fstat(file.fileno()).st_size
    except OSError:
        return None
    header = decode(page)
    return Found(**vars(header), path=path) if header is not None and size >= header.end else None


def last_sequence(path: Path) -> int:
    """The sequence number that stands in `path`, whatever it means; 0 where there is none."""
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
