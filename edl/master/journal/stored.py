"""A journal in a store: any machine that reaches the store can take it over.

In the folder `journals/JOB`:

- `head` says what is there: the term, the snapshot, which values hold records after it, and which values are garbage.
  Every commit compares and sets it, so a writer whose term has ended fails, whatever else it has written.
- `records/TERM/...` and `snapshots/TERM-NUMBER/...` are values that a writer of that term wrote, and no other.

A group is put into values behind those that the head names, which then names them as well: until then they are not
there. A snapshot is announced in the head before its first value is written, so that the values of one that was
interrupted are found and deleted.
"""

from __future__ import annotations

import json
import secrets
import struct
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple, TypeVar

from typing_extensions import override

from edl.background import BackgroundLoop
from edl.backoff import Backoff
from edl.discovery import Store
from edl.discovery.store import check_key
from edl.errors import ClosedError, DiscoveryError, LeaseLostError, ProtocolError, SettingsError
from edl.master.journal.journal import Journal

__all__ = ["StoreJournal"]

T = TypeVar("T")

_CHUNK: Final = 128
"""Values of a folder, which are read together: a millisecond each otherwise. 24 MB at most; etcd's client takes 64."""
_MOST_VALUES: Final = 2000
"""Values of records after which a snapshot is due: the next writer reads them within about a second, and deleting them
keeps the store busy for a few."""
_SWEPT: Final = 16
"""Values that are deleted in a step, for which `close` waits: a tenth of a second."""
_TAIL: Final = 16
"""Values behind the last group of an earlier term that are deleted: its writer may have put a group there and died. One
of 3 MB fits."""
_FORMAT: Final = 1
"""Format of the head; another is refused rather than misread."""
_RECORD: Final = struct.Struct("!QI")
"""Before each record: its length, and its CRC-32."""
_VALUE_NBYTES: Final = 190_000
"""Largest value: Consul's transactions take 512 KiB of JSON with base64 in it, and a store of EDL 256 KiB."""


def join_records(records: Sequence[bytes]) -> bytes:
    """Return records behind one another, each with its length and checksum."""
    return b"".join(part for record in records for part in (_RECORD.pack(len(record), zlib.crc32(record)), record))


def split_records(data: bytes) -> list[bytes]:
    """Return the records that `join_records` joined; ProtocolError if one of them is damaged, or cut off."""
    records: list[bytes] = []
    at = 0
    while at < len(data):
        if at + _RECORD.size > len(data):
            raise ProtocolError(f"record {len(records)} is cut off at byte {len(data)}")
        nbytes, checksum = _RECORD.unpack_from(data, at)
        at += _RECORD.size
        record = data[at : at + nbytes]
        if len(record) != nbytes or zlib.crc32(record) != checksum:
            raise ProtocolError(f"record {len(records)} of {nbytes:,} bytes is damaged")
        records.append(record)
        at += nbytes
    return records


def cut(data: bytes) -> list[bytes]:
    """Return data in pieces that a store can hold; a single empty piece for none."""
    return [data[at : at + _VALUE_NBYTES] for at in range(0, len(data), _VALUE_NBYTES)] or [b""]


class ValueRun(NamedTuple):
    """Values [first, stop) of a folder in the journal's."""

    folder: str
    first: int
    stop: int


class StoredSnapshot(NamedTuple):
    """A snapshot in the values of `run`, with the CRC-32 of the whole."""

    run: ValueRun
    checksum: int


@dataclass(frozen=True)
class JournalHead:
    """Which values belong to a journal."""

    term: int = 0  # the last one that has begun
    writer: str = ""  # a random name of the writer that began it
    snapshots: int = 0  # that were begun
    snapshot: StoredSnapshot | None = None  # the newest that is complete
    records: tuple[ValueRun, ...] = ()  # after it; a run for each term
    garbage: tuple[ValueRun, ...] = ()  # values that no longer belong to the journal, or not yet

    def encode(self) -> bytes:
        """Return it as JSON."""
        snapshot = None if self.snapshot is None else [*self.snapshot.run, self.snapshot.checksum]
        message = {
            "format": _FORMAT,
            "term": self.term,
            "writer": self.writer,
            "snapshots": self.snapshots,
            "snapshot": snapshot,
            "records": self.records,
            "garbage": self.garbage,
        }
        return json.dumps(message, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, name: str, value: bytes) -> JournalHead:
        """Return the head that `encode` wrote, or raise ProtocolError with the journal's `name`."""
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


def _run(fields: Any) -> ValueRun:
    folder, first, stop = fields
    return ValueRun(str(folder), int(first), int(stop))


class StoreJournal(Journal):
    """Values of a store, and a head that names them. See `open_journal`.

    Raises:
        SettingsError: The job's name cannot be part of a key.
    """

    def __init__(self, store: Store, job: str, *, timeout_s: float) -> None:
        super().__init__(f"journals/{job}", timeout_s)
        if not job or "/" in job:
            raise SettingsError(f"journal store:{job}: the name of a job is expected, without a slash")
        check_key(self._key("snapshots/00000000-00000000/00000000/000"))
        self._store = store
        self._halted = threading.Event()
        self._head = JournalHead()
        self._version: int | None = None
        self._term = 0
        self._sweeper: BackgroundLoop | None = None
        self._sweeping: deque[tuple[ValueRun, int]] = deque()  # and the number of the value that is next
        self._swept: set[ValueRun] = set()
        self._sweep_wait = Backoff(0.5, 10.0, jitter=0.5)

    @override
    def begin_term(self) -> int:
        with self._turn("begin a term"):
            while True:
                head, version = self._read_head()
                term = head.term + 1
                tails = tuple(run._replace(first=run.stop, stop=run.stop + _TAIL) for run in head.records[-1:])
                begun = replace(
                    head,
                    term=term,
                    writer=secrets.token_hex(8),
                    records=(*head.records, ValueRun(f"records/{term:08d}", 0, 0)),
                    garbage=(*head.garbage, *tails),
                )
                if self._set_head(begun, version):
                    break
            self._term = term
            self._sweep(begun.garbage)
            return term

    @override
    def load(self) -> tuple[bytes | None, list[bytes]]:
        with self._turn("read"):
            head = self._head if self._term else self._read_head()[0]
            snapshot = None
            if head.snapshot is not None:
                snapshot = self._read_run(head.snapshot.run)
                if zlib.crc32(snapshot) != head.snapshot.checksum:
                    raise ProtocolError(f"journal {self.name}: its snapshot is damaged: its checksum does not match")
            records: list[bytes] = []
            for run in head.records:
                try:
                    records += split_records(self._read_run(run))
                except ProtocolError as exc:
                    raise ProtocolError(f"journal {self.name}, {run.folder}: {exc}") from exc
            return snapshot, records

    @property
    @override
    def snapshot_due(self) -> bool:
        return sum(run.stop - run.first for run in self._head.records) >= _MOST_VALUES

    @override
    def append(self, records: Sequence[bytes]) -> None:
        if not records:
            return
        with self._turn("append"):
            self._check_begun()
            run = self._head.records[-1]
            pieces = cut(join_records(records))
            self._put(run.folder, run.stop, pieces)
            longer = run._replace(stop=run.stop + len(pieces))
            self._commit(replace(self._head, records=(*self._head.records[:-1], longer)))

    @override
    def snapshot(self, state: bytes) -> None:
        with self._turn("write a snapshot"):
            self._check_begun()
            pieces = cut(state)
            number = self._head.snapshots + 1
            run = ValueRun(f"snapshots/{self._term:08d}-{number:08d}", 0, len(pieces))
            # A writer that was thought dead may have put values after they were swept: its snapshots are swept twice.
            again = [old for old in self._head.garbage if old in self._swept and old.folder.startswith("snapshots/")]
            left = tuple(old for old in self._head.garbage if old not in self._swept)
            self._swept.clear()
            self._commit(replace(self._head, snapshots=number, garbage=(*left, run)))
            self._put(run.folder, 0, pieces)
            *old, last = self._head.records
            replaced = [run for run in (*old, last) if run.first < run.stop]
            if self._head.snapshot is not None:
                replaced.append(self._head.snapshot.run)
            self._commit(
                replace(
                    self._head,
                    snapshot=StoredSnapshot(run, zlib.crc32(state)),
                    records=(last._replace(first=last.stop),),
                    garbage=(*left, *replaced),
                )
            )
            self._sweep((*again, *self._head.garbage))

    # --- The head. ---

    def _read_head(self) -> tuple[JournalHead, int | None]:
        entry = self._ask(lambda: self._store.get(self._key("head")))
        if entry is None:
            return JournalHead(), None
        return JournalHead.decode(self.name, entry.value), entry.version

    def _commit(self, head: JournalHead) -> None:
        if not self._set_head(head, self._version):
            raise LeaseLostError(f"journal {self.name}: another master has begun a term; this one is {self._term}")

    def _set_head(self, head: JournalHead, version: int | None) -> bool:
        """Set the head if it is at `version`; return whether it was.

        A store that was away may have set it all the same. That shows, because no two heads are equal.
        """
        value = head.encode()
        key = self._key("head")

        def set_or_find() -> int | None:
            entry = self._store.compare_and_set(key, value, version)
            if entry is not None:
                return entry.version
            # The answer of an earlier attempt may be lost, or its write may have come between.
            present = self._store.get(key)
            if present is not None and present.value == value:
                return present.version
            if (None if present is None else present.version) == version:
                raise DiscoveryError(f"{key} is said to have changed, and is shown as it was")
            return None

        found = self._ask(set_or_find)
        if found is None:
            return False
        self._head = head
        self._version = found
        return True

    def _check_begun(self) -> None:
        if not self._term:
            raise LeaseLostError(f"journal {self.name}: no term was begun")

    # --- Values. ---

    def _key(self, name: str) -> str:
        return f"{self.name}/{name}"

    def _put(self, folder: str, first: int, pieces: Sequence[bytes]) -> None:
        for number, piece in enumerate(pieces, first):
            key = self._key(_place(folder, number))
            self._ask(lambda key=key, piece=piece: self._store.put(key, piece))  # type: ignore[misc]

    def _read_run(self, run: ValueRun) -> bytes:
        values: list[bytes] = []
        for chunk in range(run.first // _CHUNK, -(-run.stop // _CHUNK)):
            prefix = self._key(f"{run.folder}/{chunk:08d}/")
            numbers = range(max(run.first, chunk * _CHUNK), min(run.stop, (chunk + 1) * _CHUNK))
            keys = [self._key(_place(run.folder, number)) for number in numbers]
            found = self._read_values(prefix, keys)
            values += [found[key] for key in keys]
        return b"".join(values)

    def _read_values(self, prefix: str, keys: Sequence[str]) -> dict[str, bytes]:
        """Read values that are there: a store whose leadership changes hands may not show them at once."""
        deadline = time.monotonic() + self._timeout_s
        wait = Backoff(0.05, 1.0, jitter=0.5)
        while True:
            found = {entry.key: entry.value for entry in self._ask(lambda: self._store.list(prefix))}
            missing = next((key for key in keys if key not in found), None)
            if missing is None:
                return found
            wait_s = wait.next_wait_s()
            if time.monotonic() + wait_s > deadline or self._halted.wait(wait_s):
                raise ProtocolError(f"journal {self.name}: {missing} is missing")

    def _sweep(self, garbage: Sequence[ValueRun]) -> None:
        queued = {run for run, _ in tuple(self._sweeping)}
        self._sweeping.extend((run, run.first) for run in garbage if run not in self._swept and run not in queued)
        if self._sweeping and self._sweeper is None:
            self._sweeper = self._own(BackgroundLoop("edl-journal-sweeper", self._delete_some))
        elif self._sweeper is not None:
            self._sweeper.wake()

    def _delete_some(self) -> float:
        """Delete some garbage, in a thread of its own: commits must not wait for it."""
        if not self._sweeping:
            return 3600.0
        run, first = self._sweeping[0]
        stop = min(first + _SWEPT, run.stop)
        try:
            for number in range(first, stop):
                self._store.delete(self._key(_place(run.folder, number)))
        except DiscoveryError:
            return self._sweep_wait.next_wait_s()  # it is tried again, by the next writer if need be
        except ClosedError:
            return 3600.0
        self._sweep_wait.reset()
        if stop < run.stop:
            self._sweeping[0] = (run, stop)
        else:
            self._sweeping.popleft()
            self._swept.add(run)
        return 0.0

    # --- Deadlines and errors. ---

    def _ask(self, request: Callable[[], T]) -> T:
        """Ask the store, and ask again for a while where it is away."""
        deadline = time.monotonic() + self._timeout_s
        wait = Backoff(0.05, 1.0, jitter=0.5)
        while True:
            self._check()
            try:
                return request()
            except DiscoveryError:
                wait_s = wait.next_wait_s()
                if time.monotonic() + wait_s > deadline or self._halted.wait(wait_s):
                    raise

    def _halt(self) -> None:
        self._halted.set()


def _place(folder: str, number: int) -> str:
    return f"{folder}/{number // _CHUNK:08d}/{number % _CHUNK:03d}"
