"""The head of a journal in a store: what of the store's values belongs to it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final

from edl.errors import ProtocolError

__all__ = ["JournalHead", "StoredSnapshot", "ValueRun"]

_FORMAT: Final = 1
"""Of the head; another is refused rather than misread."""


@dataclass(frozen=True)
class ValueRun:
    """Values of a folder, by their numbers.

    Attributes:
        folder: in the journal's.
        first: number of the first.
        stop: number behind the last.
    """

    folder: str
    first: int
    stop: int


@dataclass(frozen=True)
class StoredSnapshot:
    """A snapshot in pieces.

    Attributes:
        run: the values that hold it.
        checksum: CRC-32 of the whole.
    """

    run: ValueRun
    checksum: int


@dataclass(frozen=True)
class JournalHead:
    """What belongs to a journal.

    Attributes:
        term: that has begun last.
        writer: a random name of the writer that began it.
        snapshots: how many were begun.
        snapshot: the newest that is complete; None if there is none.
        records: after it, a run for each term.
        garbage: values that belong to it no more, or not yet.
    """

    term: int = 0
    writer: str = ""
    snapshots: int = 0
    snapshot: StoredSnapshot | None = None
    records: tuple[ValueRun, ...] = ()
    garbage: tuple[ValueRun, ...] = ()

    def encode(self) -> bytes:
        """Return it as JSON."""
        snapshot = None if self.snapshot is None else [*_fields(self.snapshot.run), self.snapshot.checksum]
        message = {
            "format": _FORMAT,
            "term": self.term,
            "writer": self.writer,
            "snapshots": self.snapshots,
            "snapshot": snapshot,
            "records": [_fields(run) for run in self.records],
            "garbage": [_fields(run) for run in self.garbage],
        }
        return json.dumps(message, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, name: str, value: bytes) -> JournalHead:
        """Return the head that `encode` wrote.

        Args:
            name: of the journal, for the error.
            value: of the head's key.

        Raises:
            ProtocolError: it is something else.
        """
        try:
            message = json.loads(value)
            if message["format"] != _FORMAT:
                raise ProtocolError(f"journal {name}: of format {message['format']}; this version reads {_FORMAT}")
            snapshot = message["snapshot"]
            return cls(
                int(message["term"]),
                str(message["writer"]),
                int(message["snapshots"]),
                None if snapshot is None else StoredSnapshot(_run(snapshot[:3]), int(snapshot[3])),
                tuple(map(_run, message["records"])),
                tuple(map(_run, message["garbage"])),
            )
        except (ValueError, KeyError, TypeError, IndexError) as exc:
            raise ProtocolError(f"journal {name}: its head cannot be read: {exc!r}") from exc


def _fields(run: ValueRun) -> list[Any]:
    return [run.folder, run.first, run.stop]


def _run(fields: Any) -> ValueRun:
    folder, first, stop = fields
    return ValueRun(str(folder), int(first), int(stop))
