"""Journals of a master's decisions, which outlive the master: ordered records, and a snapshot in place of older ones.

A `StoreJournal` consists of these values, in the folder `journals/JOB`:

- `head` is the table of contents: the term, the snapshot, which values hold records after the snapshot, and which
  values are garbage. Every commit is a compare-and-set of `head`, so a writer whose term has ended fails.
- `records/TERM/...` and `snapshots/TERM-NUMBER/...` are values that only the writer of that term wrote.

A group of records is written to new values, after the values that the head lists, and is committed once the head lists
the new values too. A snapshot is announced in the head before its first value is written, so that the values of an
interrupted snapshot can be found and deleted.
"""

from __future__ import annotations

import abc
import contextlib
import json
import logging
import os
import secrets
import sqlite3
import struct
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar
from urllib.parse import unquote

from typing_extensions import override

from edl.background import BackgroundLoop
from edl.backoff import Backoff
from edl.discovery import Store
from edl.discovery.store import check_key
from edl.discovery.store_url import KUBERNETES_GONE
from edl.errors import (
    ClosedError,
    DiscoveryError,
    EDLError,
    JournalError,
    LeaseLostError,
    ProtocolError,
    SettingsError,
)
from edl.quoting import shown
from edl.resource import Resource
from edl.sqlite_file import SqliteFile, Tables

logger = logging.getLogger(__name__)

T = TypeVar("T")

_ACCEPTED = "use sqlite:///absolute/path/to/file, or store:JOB together with a store"


def open_journal(url: str, *, store: Store | None = None, timeout_s: float = 5.0) -> Journal:
    """Open the journal at `url`. Does not read the journal or begin a term.

    - `sqlite:///absolute/path`: a file on a local disk; the file and its folder are created if necessary. Only a master
      on this machine can take over the journal.
    - `store:JOB`: keys in `store`, which the caller closes after the journal. Consul and etcd answer once the data is
      on the disks of a majority of servers.

    `timeout_s` is how long to wait for another process's transaction on a file, or to keep retrying an unreachable
    store.

    Raises:
        SettingsError: The URL is invalid, or the file is not a journal.
        JournalError: The file cannot be opened now.
    """
    if not 0 < timeout_s < float("inf"):
        raise SettingsError(f"timeout_s={timeout_s!r}: must be a finite number above 0")
    scheme, _, rest = url.partition(":")
    if scheme == "sqlite":
        return SqliteJournal(_path(url), timeout_s=timeout_s)
    if scheme == "store":
        if store is None:
            raise SettingsError(f"journal {url!r}: needs a store; {_ACCEPTED}")
        return StoreJournal(store, rest, timeout_s=timeout_s)
    if scheme == "kubernetes":
        raise SettingsError(f"journal {url!r}: {KUBERNETES_GONE}. Then name the journal store:JOB")
    raise SettingsError(f"journal {url!r}: unknown; {_ACCEPTED}")


def set_aside(url: str) -> None:
    """Rename an unused journal's file, so the next journal at `url` starts empty; SettingsError if that fails."""
    path = Path(_path(url))
    kept = path.with_name(f"{path.name}.{time.strftime('%Y%m%d-%H%M%S')}")
    try:
        for suffix in ("-wal", "-shm", ""):
            found = path.with_name(path.name + suffix)
            if found.exists():
                found.rename(kept.with_name(kept.name + suffix))
    except OSError as exc:
        raise SettingsError(f"journal {path} cannot be set aside: {exc.strerror or exc}") from exc
    if kept.exists():
        logger.info("the previous journal is kept in %s", kept)


def _path(url: str) -> str:
    scheme, _, rest = url.partition(":")
    path = unquote(rest.removeprefix("//"))
    if scheme != "sqlite" or not rest.startswith("///") or path.endswith("/") or "\0" in path or set("?#") & set(rest):
        raise SettingsError(f"journal {url!r}: not an absolute path of a file; {_ACCEPTED}")
    return "/" + path.lstrip("/")


class Journal(Resource, abc.ABC):
    """Records in order, and a snapshot that replaces the records before it.

    - **Terms.** A writer begins a term, which ends the terms of all earlier writers: their later writes are refused
      with `LeaseLostError`, and have no effect. So if two masters both believe that they lead, only one of them can
      write.
    - **Groups.** One call of `append` writes all of its records or none, even if the power fails.
    - **After a `JournalError`** it is unknown whether the write took effect. From then on, the journal object refuses
      every call but `close`; a new object reads the actual state.
    - **Damage** to the journal raises a `ProtocolError`.
    - **Threads and forks.** Methods may be called from several threads; the calls run one at a time. A forked child
      must not use the journal: all methods raise `ClosedError`, except `close`, which does nothing.
    - **Time.** Every call has a deadline of a few seconds, the `timeout_s` passed to `open_journal`.

    An implementation runs each of its calls in a `_turn`, and passes `tests/fast/master/test_journal.py`.
    """

    def __init__(self, name: str, timeout_s: float) -> None:
        super().__init__()
        self.name: Final = name
        self._timeout_s = timeout_s
        self._turns = threading.Lock()
        self._broken = ""  # the message of the error after which all calls are refused

    @property
    def snapshot_due(self) -> bool:
        """Whether reading the records since the last snapshot would take seconds."""
        return False

    @abc.abstractmethod
    def begin_term(self) -> int:
        """Become the only writer; call this before `load`. Return the term's number, which exceeds all earlier ones."""

    @abc.abstractmethod
    def load(self) -> tuple[bytes | None, list[bytes]]:
        """Return the newest snapshot, if there is one, and the records appended after it, in order."""

    @abc.abstractmethod
    def append(self, records: Sequence[bytes]) -> None:
        """Write a group of records of any size. After this returns, the records survive a crash and a power failure."""

    @abc.abstractmethod
    def snapshot(self, state: bytes) -> None:
        """Replace all records so far with `state`, atomically: no reader sees a mixture of the two."""

    @contextlib.contextmanager
    def _turn(self, what: str) -> Iterator[None]:
        """Serialize calls from several threads; after an error, refuse all calls."""
        self._check_process()
        if not self._turns.acquire(timeout=self._timeout_s):
            raise JournalError(f"journal {self.name}: cannot {what}: another thread is using it")
        try:
            self._check()
            if self._broken:
                raise JournalError(self._broken)
            try:
                yield
            except (LeaseLostError, ProtocolError):  # in both cases nothing was written
                raise
            except BaseException as exc:
                why = shown(exc).removeprefix(f"journal {self.name}: ")
                self._broken = f"journal {self.name}: cannot {what}: {why}"
                if isinstance(exc, EDLError) and not isinstance(exc, ClosedError):
                    busy = isinstance(exc, DiscoveryError) or getattr(exc, "busy", False)
                    raise JournalError(self._broken, busy=busy) from exc
                raise
        finally:
            self._turns.release()


# --- In a file. ---

_WAL_NBYTES: Final = 64 << 20  # write-ahead log kept after a snapshot; SQLite would never shrink it
_TABLES: Final = Tables(
    kind="journal",
    application_id=0x45444C4A,  # "EDLJ"
    version=2,  # 1 leased the last units of growing data elsewhere: its records would be replayed wrongly
    schema="""
        CREATE TABLE state (term INTEGER NOT NULL, covered INTEGER NOT NULL, snapshot BLOB, checksum INTEGER);
        CREATE TABLE record (number INTEGER PRIMARY KEY, data BLOB NOT NULL, checksum INTEGER NOT NULL);
        INSERT INTO state VALUES (0, 0, NULL, NULL)
    """,
    error=JournalError,
    remedy="name a different file, or move this one away to start over",
    elsewhere="Name a file on a local disk, or keep the journal in the store (store:JOB)",
    pragmas=("synchronous = FULL", f"journal_size_limit = {_WAL_NBYTES}"),
)


class SqliteJournal(Journal):
    """A journal in a file, in WAL mode with `synchronous=FULL`: every commit is written through to the disk.

    Locks are held only during transactions, so another process can begin a term at any time, and thereby fence this
    process.
    """

    def __init__(self, path: str, *, timeout_s: float) -> None:
        super().__init__(path, timeout_s)
        self._term = 0
        self._last = 0  # number of the last record
        self._file = SqliteFile(path, _TABLES, timeout_s)

    @override
    def begin_term(self) -> int:
        with self._transaction("begin a term") as connection:
            connection.execute("UPDATE state SET term = term + 1")
            term, covered = connection.execute("SELECT term, covered FROM state").fetchone()
            last = connection.execute("SELECT max(number) FROM record").fetchone()[0]
            self._term = term
            self._last = max(covered, last or 0)
        return int(term)

    @override
    def load(self) -> tuple[bytes | None, list[bytes]]:
        with self._transaction("read") as connection:
            covered, snapshot, checksum = connection.execute("SELECT covered, snapshot, checksum FROM state").fetchone()
            rows = connection.execute("SELECT number, data, checksum FROM record ORDER BY number").fetchall()
        if snapshot is not None:
            self._check_data("its snapshot", snapshot, checksum)
        for expected, (number, data, checksum) in enumerate(rows, covered + 1):
            if number != expected:
                raise ProtocolError(f"journal {self.name}: record {expected} is missing")
            self._check_data(f"record {number}", data, checksum)
        return snapshot, [data for _, data, _ in rows]

    @override
    def append(self, records: Sequence[bytes]) -> None:
        with self._transaction("append") as connection:
            self._check_term(connection)
            rows = [(number, record, zlib.crc32(record)) for number, record in enumerate(records, self._last + 1)]
            connection.executemany("INSERT INTO record VALUES (?, ?, ?)", rows)
            self._last += len(rows)

    @override
    def snapshot(self, state: bytes) -> None:
        with self._transaction("write a snapshot") as connection:
            self._check_term(connection)
            row = (self._last, state, zlib.crc32(state))
            connection.execute("UPDATE state SET covered = ?, snapshot = ?, checksum = ?", row)
            connection.execute("DELETE FROM record")

    @contextlib.contextmanager
    def _transaction(self, what: str) -> Iterator[sqlite3.Connection]:
        try:
            with self._turn(what), self._file.transaction() as connection:
                yield connection
        finally:
            if self._closed and self._pid == os.getpid():
                self._file.close()

    def _check_term(self, connection: sqlite3.Connection) -> None:
        term = connection.execute("SELECT term FROM state").fetchone()[0]
        if not self._term or term != self._term:
            raise LeaseLostError(
                f"journal {self.name}: "
                + (
                    f"term {term} has begun, but this journal object is for term {self._term}"
                    if self._term
                    else "no term was begun"
                )
            )

    def _check_data(self, what: str, data: Any, checksum: Any) -> None:
        if not isinstance(data, bytes) or zlib.crc32(data) != checksum:
            raise ProtocolError(f"journal {self.name}: {what} is damaged: its checksum does not match")

    def _release(self) -> None:
        if self._turns.acquire(blocking=False):  # a call in flight, maybe in the thread that this interrupts, ends it
            try:
                self._file.close()
            finally:
                self._turns.release()


# --- In a Store. ---

_CHUNK: Final = 128
"""Values per folder. A folder's values are read together, since reading them one by one takes a millisecond each. They
have at most 24 MB; etcd's client allows 64 MB."""
_MOST_VALUES: Final = 2000  # of records until a snapshot is due: the next writer reads these in about a second
_TAIL: Final = 16
"""When a term begins, this many values that would follow the last group of the previous term are deleted: that term's
writer may have died while writing a group of up to 3 MB."""
_FORMAT: Final = 2  # 1 leased the last units of growing data elsewhere: its records would be replayed wrongly
_RECORD: Final = struct.Struct("!QI")  # before each record: its length, and its CRC-32
_VALUE_NBYTES: Final = 190_000
"""Largest size of a value in bytes: Consul's transactions take 512 KiB of JSON with base64 data, and EDL's store takes
256 KiB."""


def _split_records(data: bytes) -> list[bytes]:
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


def _cut(data: bytes) -> list[bytes]:
    return [data[at : at + _VALUE_NBYTES] for at in range(0, len(data), _VALUE_NBYTES)] or [b""]


class _Values(NamedTuple):
    """Values [first, stop) in a subfolder of the journal."""

    folder: str
    first: int
    stop: int


class _MissingValueError(DiscoveryError):
    """The store does not return a value that the head lists."""


@dataclass(frozen=True)
class _Head:
    """The values that belong to a journal. The fields are those of the stored JSON."""

    term: int = 0  # the latest one
    writer: str = ""  # a random name of the writer that began it
    snapshots: int = 0  # started so far
    snapshot: tuple[str, int, int, int] | None = None  # the newest complete one: its values, and their CRC-32
    records: tuple[_Values, ...] = ()  # after the snapshot, per term
    garbage: tuple[_Values, ...] = ()  # values that no longer belong to the journal, or not yet

    def encode(self) -> bytes:
        return json.dumps({"format": _FORMAT, **vars(self)}, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, name: str, value: bytes) -> _Head:

        def values(folder: Any, first: Any, stop: Any) -> _Values:
            return _Values(str(folder), int(first), int(stop))

        try:
            message = json.loads(value)
            if message["format"] != _FORMAT:
                raise ProtocolError(
                    f"journal {name} has format {message['format']}, not {_FORMAT}: another release of EDL wrote it: "
                    "finish the job with that release, or choose another job name"
                )
            snapshot = message["snapshot"]
            return cls(
                int(message["term"]),
                str(message["writer"]),
                int(message["snapshots"]),
                None if snapshot is None else (*values(*snapshot[:3]), int(snapshot[3])),
                tuple(values(*found) for found in message["records"]),
                tuple(values(*found) for found in message["garbage"]),
            )
        except (ValueError, KeyError, TypeError, IndexError) as exc:
            raise ProtocolError(f"journal {name}: its head is unreadable: {exc!r}") from exc


class StoreJournal(Journal):
    """Values in a store, and a head that lists them. SettingsError if the job's name cannot be part of a key."""

    def __init__(self, store: Store, job: str, *, timeout_s: float) -> None:
        super().__init__(f"journals/{job}", timeout_s)
        if not job or "/" in job:
            raise SettingsError(f"journal store:{job}: expected the name of a job, without a slash")
        check_key(self._key("snapshots/00000000-00000000", 0))
        self._store = store
        self._halted = threading.Event()
        self._head = _Head()
        self._version: int | None = None
        self._term = 0
        self._sweeping: deque[tuple[_Values, int]] = deque()  # and the number of the next value
        self._swept: set[_Values] = set()
        self._sweep_wait = Backoff(0.5, 10.0, jitter=0.5)
        self._sweeper = self._own(BackgroundLoop("edl-journal-sweeper", self._delete_value))

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
                    records=(*head.records, _Values(f"records/{term:08d}", 0, 0)),
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
                snapshot = self._read(_Values(*head.snapshot[:3]))
                if zlib.crc32(snapshot) != head.snapshot[3]:
                    raise ProtocolError(f"journal {self.name}: its snapshot is damaged: its checksum does not match")
            records: list[bytes] = []
            for run in head.records:
                try:
                    records += _split_records(self._read(run))
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
            parts = [_RECORD.pack(len(record), zlib.crc32(record)) + record for record in records]
            pieces = _cut(b"".join(parts))
            self._put(run.folder, run.stop, pieces)
            longer = run._replace(stop=run.stop + len(pieces))
            self._commit(replace(self._head, records=(*self._head.records[:-1], longer)))

    @override
    def snapshot(self, state: bytes) -> None:
        with self._turn("write a snapshot"):
            self._check_begun()
            pieces = _cut(state)
            number = self._head.snapshots + 1
            run = _Values(f"snapshots/{self._term:08d}-{number:08d}", 0, len(pieces))
            # A writer presumed dead may have written values after the sweep: its snapshots are swept twice.
            again = [old for old in self._head.garbage if old in self._swept and old.folder.startswith("snapshots/")]
            left = tuple(old for old in self._head.garbage if old not in self._swept)
            self._swept.clear()
            self._commit(replace(self._head, snapshots=number, garbage=(*left, run)))
            self._put(run.folder, 0, pieces)
            last = self._head.records[-1]
            replaced = [old for old in self._head.records if old.first < old.stop]
            if self._head.snapshot is not None:
                replaced.append(_Values(*self._head.snapshot[:3]))
            self._commit(
                replace(
                    self._head,
                    snapshot=(*run, zlib.crc32(state)),
                    records=(last._replace(first=last.stop),),
                    garbage=(*left, *replaced),
                )
            )
            self._sweep((*again, *self._head.garbage))

    def _check_begun(self) -> None:
        if not self._term:
            raise LeaseLostError(f"journal {self.name}: no term was begun")

    def _read_head(self) -> tuple[_Head, int | None]:
        entry = self._ask(lambda: self._store.get(f"{self.name}/head"))
        if entry is None:
            return _Head(), None
        return _Head.decode(self.name, entry.value), entry.version

    def _commit(self, head: _Head) -> None:
        if not self._set_head(head, self._version):
            raise LeaseLostError(
                f"journal {self.name}: another master has begun a term; this journal object is for term {self._term}"
            )

    def _set_head(self, head: _Head, version: int | None) -> bool:
        """Set the head if its version is `version`; return whether it was set.

        A store that timed out may still have set the head. That can be detected, because no two heads are equal.
        """
        value = head.encode()
        key = f"{self.name}/head"

        def set_or_find() -> int | None:
            entry = self._store.compare_and_set(key, value, version)
            if entry is not None:
                return entry.version
            # The reply to an earlier attempt may be lost, or its write may have arrived in between.
            present = self._store.get(key)
            if present is not None and present.value == value:
                return present.version
            if (None if present is None else present.version) == version:
                raise DiscoveryError(f"{key} was reported as changed, but reads as before")
            return None

        found = self._ask(set_or_find)
        if found is None:
            return False
        self._head = head
        self._version = found
        return True

    # --- Values. ---

    def _key(self, folder: str, number: int) -> str:
        return f"{self.name}/{folder}/{number // _CHUNK:08d}/{number % _CHUNK:03d}"

    def _put(self, folder: str, first: int, pieces: Sequence[bytes]) -> None:
        for number, piece in enumerate(pieces, first):
            self._ask(partial(self._store.put, self._key(folder, number), piece))

    def _read(self, run: _Values) -> bytes:
        if run.first == run.stop:
            return b""
        values: list[bytes] = []
        for chunk in range(run.first // _CHUNK, -(-run.stop // _CHUNK)):
            numbers = range(max(run.first, chunk * _CHUNK), min(run.stop, (chunk + 1) * _CHUNK))
            try:
                values += self._ask(partial(self._list_values, [self._key(run.folder, number) for number in numbers]))
            except _MissingValueError as exc:
                raise ProtocolError(f"journal {self.name}: {exc}") from exc
        return b"".join(values)

    def _list_values(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of a chunk. While a store changes its leader, some values may temporarily be missing."""
        found = {entry.key: entry.value for entry in self._store.list(keys[0].rpartition("/")[0] + "/")}
        for key in keys:
            if key not in found:
                raise _MissingValueError(f"{key} is missing")
        return [found[key] for key in keys]

    def _sweep(self, garbage: Sequence[_Values]) -> None:
        queued = {run for run, _ in tuple(self._sweeping)}
        self._sweeping.extend((run, run.first) for run in garbage if run not in self._swept and run not in queued)
        self._sweeper.wake()

    def _delete_value(self) -> float:
        """Delete a garbage value; return the seconds until the next. Runs in its own thread: commits must not wait."""
        if not self._sweeping:
            return 3600.0
        run, number = self._sweeping[0]
        try:
            self._store.delete(self._key(run.folder, number))
        except DiscoveryError:
            return self._sweep_wait.next_wait_s()  # it is retried, by the next writer if necessary
        except ClosedError:
            return 3600.0
        self._sweep_wait.reset()
        if number + 1 < run.stop:
            self._sweeping[0] = (run, number + 1)
        else:
            self._sweeping.popleft()
            self._swept.add(run)
        return 0.0

    def _ask(self, request: Callable[[], T]) -> T:
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
