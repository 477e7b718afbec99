"""Labels on disk: a SQLite database in the cache's folder, `labels.sqlite`, and the thread that writes to it.

::

    key      what labels depend on (`CacheKey` as JSON), the layout of their records, which data they are of
    label    a record under a key and sample id, with a checksum; numbers grow, so the lowest is the oldest

A key's number is random, and changes when its labels are discarded because the data are others. Each process remembers
the number that it began with, and each of its transactions checks it, so no label of the data before comes afterwards.

Several processes of a machine share the database. In WAL mode none of them waits to read, and a batch of labels is one
transaction: whichever process is killed when, the database holds whole labels only.

The bound on bytes (`disk_bytes`) holds at every moment, for the database and its journal (`-wal`) together. The oldest
labels make room, and their pages are used again. The journal is bounded because a transaction begins only when it is
empty, and changes a part of the bound at most (`_PART`). A reader that stands still (SIGSTOP) keeps the journal from
being emptied: then new labels are not written, and no old one is evicted.

Disks, and what lies between, flip bits: each label has a checksum over its key, layout, id and bytes, verified when it
is first read. A label that fails counts as missing.

How the database is opened and checked is `edl.sqlite_file`'s. One that is not open elsewhere can be read anywhere, also
where machines share its folder.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import logging
import os
import secrets
import sqlite3
import threading
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edl.background import BackgroundLoop
from edl.distill.cache.key import FINGERPRINT_NBYTES, CacheKey, Head, SampleId
from edl.distill.cache.records import RowLayout
from edl.errors import ConflictError, EDLError, SettingsError, TemporaryError
from edl.sqlite_file import SqliteFile, Tables

__all__ = ["LabelFolder", "LabelWriter", "Namespace"]

logger = logging.getLogger("edl.distill")

_DATABASE = "labels.sqlite"
_PAGE_NBYTES = 8192
"""Two rows of 1,000 float32. Labels of texts are read faster from larger pages, single rows more slowly."""
_PART_NBYTES = 48 << 20
"""Bytes that a transaction changes where there is no bound: large enough that the disk's syncs do not count."""
_TABLES = Tables(
    kind="soft-label cache",
    application_id=0x45444C43,  # "EDLC"
    version=2,  # version 1 had the labels in files beside the database
    # `label_id` tells which labels there are, so that no record is read for that.
    schema="""
        CREATE TABLE key (number INTEGER PRIMARY KEY, text TEXT NOT NULL UNIQUE, layout TEXT, data_set TEXT);
        CREATE TABLE label (
            number INTEGER PRIMARY KEY, key INTEGER NOT NULL, id NOT NULL, fingerprint BLOB NOT NULL,
            size INTEGER NOT NULL, checksum INTEGER NOT NULL, record BLOB NOT NULL
        );
        CREATE INDEX label_id ON label (key, id, fingerprint, size)
    """,
    error=lambda words, is_busy: TemporaryError(words),
    remedy="name another folder, or delete the folder, and its labels are asked for again",
    elsewhere="Give each machine a folder on a disk of its own (load_labels reads several)",
    pragmas=(
        "synchronous = FULL",
        f"wal_autocheckpoint = {_PART_NBYTES // _PAGE_NBYTES}",
        "cache_size = -16000",  # KiB: the index's pages stay while records pass
    ),
    new_pragmas=(f"page_size = {_PAGE_NBYTES}", "auto_vacuum = INCREMENTAL"),  # the latter for a bound that is lowered
)
_NUMBER_BITS = 62
"""Random bits of a key's number, which must not come again; SQLite's integers have 63."""
_NUMBER = "(SELECT number FROM key WHERE text = ?)"
_PART = 8
"""A transaction changes an eighth of the bound at most. The journal takes as much; a quarter is kept free for it."""
_SHARED_MEMORY_NBYTES = 64 << 10
"""Bytes of `-shm`, which grows with the journal."""
_BUSY_S = 30.0
"""How long to wait for another process that writes: a slow disk takes seconds for a batch."""
_PAUSE_S = 0.01
"""Between two tries to empty the journal: SQLite itself does not wait for another process that does the same."""
_IDS_AT_ONCE = 512
"""Ids of one query. SQLite before 3.32 takes 999."""
_READ_AT_ONCE = 64
"""Labels read at a time where all are, so that memory stays bounded for wide rows."""
_MOST_VERIFIED = 1 << 22
"""Labels remembered as verified, about 200 bytes each: hashing a label takes as long as reading it."""
_BATCH_NBYTES = 16 << 20
"""Waiting labels are written from this size on: syncs do not count then, and three batches fit into memory."""
_MOST_WAITING = 3
"""Batches' worth of labels that may wait to be written, or be on their way: while one is written the next gathers."""
_ROW_NBYTES = 64
"""Bytes that a waiting label counts for besides its own, so that tiny labels are bounded too."""
_STALLED_S = 60.0
"""How long a disk may stand still before labels are dropped, and `close` gives up: longer than a busy one does."""


@dataclass(eq=False)
class Namespace:
    """The labels of a key, in memory and on disk; `layout` is None before there are any.

    `number` is that of the key, None before it is known, and `data_set` what was noted with it.
    """

    key: CacheKey
    layout: RowLayout | None = None
    number: int | None = None
    data_set: str = ""

    def __post_init__(self) -> None:
        self.text = self.key.to_json()
        self._seed: tuple[RowLayout | None, int] = (None, 0)

    def checksum(self, sample: SampleId, record: bytes) -> int:
        """Return the checksum of a label: of its key, layout, id and bytes."""
        if self._seed[0] is not self.layout:
            self._seed = self.layout, zlib.crc32(f"{self.text} {self.layout}".encode())
        return zlib.crc32(record, zlib.crc32(repr(sample).encode(), self._seed[1]))


class LabelFolder:
    """Reads and writes labels; makes nothing if `read_only`. Thread-safe.

    Counts the labels `evicted` to make room, and remembers the keys and ids of those found `damaged`, and why it was
    `unreadable` last.

    Raises:
        SettingsError: the folder cannot be used.
    """

    def __init__(self, path: Path, limit_bytes: int | None = None, *, read_only: bool = False) -> None:
        self.path = path
        self.limit_bytes = limit_bytes
        self.evicted = 0
        self.damaged: set[tuple[str, SampleId]] = set()
        self.unreadable = ""
        self._part_nbytes = _PART_NBYTES if limit_bytes is None else min(_PART_NBYTES, limit_bytes // _PART)
        # Reentrant locks, since a signal handler may close the cache in the middle of a function.
        self._read_lock, self._write_lock = threading.RLock(), threading.RLock()
        self._said: set[str] = set()
        self._verified: set[tuple[int, int]] = set()
        try:
            if not read_only:
                path.mkdir(parents=True, exist_ok=True)
            if not os.access(path, os.R_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            if next(path.glob("*/key.json"), None) is not None:
                raise SettingsError(
                    f"soft-label cache {str(path)!r} has the format of another release of EDL: {_TABLES.remedy}"
                )
        except OSError as exc:
            raise SettingsError(f"soft-label cache {str(path)!r}: {exc.strerror or exc}") from exc
        # Two connections: one that is in a transaction would show labels before they are certain.
        self._reading, self._writing = (_Database(path, read_only) for _ in range(2))
        try:
            self._reading.file()
        except TemporaryError as exc:  # a full disk, say: that may pass
            self._warn(f"labels cannot be read now, and are asked for again: {exc}")

    def close(self) -> None:
        """Close the database, but for a connection in use by a function that this interrupts."""
        for lock, database in ((self._read_lock, self._reading), (self._write_lock, self._writing)):
            if not lock._is_owned():  # type: ignore[attr-defined]
                with lock:
                    database.close()

    def nbytes(self) -> int:
        """Return the bytes of the database, its journal and its shared memory."""
        return sum(map(self._size_of, ("", "-wal", "-shm")))

    def _size_of(self, side: str) -> int:
        try:
            return (self.path / f"{_DATABASE}{side}").stat().st_size
        except OSError:
            return 0

    # Reading

    def keys(self) -> list[CacheKey]:
        """Return the keys of all labels in the folder."""
        found = []
        for (text,) in self._query("SELECT text FROM key WHERE EXISTS (SELECT 1 FROM label WHERE key = key.number)"):
            try:
                found.append(CacheKey.from_json(text))
            except (ValueError, TypeError) as exc:
                self._warn(f"a key is left out: {exc}")
        return found

    def refresh(self, space: Namespace) -> None:
        """Find out which layout the labels have, if that is not known."""
        if space.layout is not None:
            return
        for number, text in self._query(
            "SELECT number, layout FROM key WHERE text = ? AND layout IS NOT NULL", space.text
        ):
            space.number = number if space.number is None else space.number
            try:
                space.layout = RowLayout.from_json(text)
            except ValueError as exc:
                self._warn(f"labels of {space.key} are left out: {exc}")

    def known(self, space: Namespace, ids: Sequence[SampleId]) -> dict[SampleId, Head]:
        """Return which labels are there, with their rows and fingerprints, without reading the records."""
        self.refresh(space)
        if space.layout is None:
            return {}
        row_nbytes = space.layout.columns.itemsize
        return {
            sample: ((size - FINGERPRINT_NBYTES) // row_nbytes, fingerprint)
            for sample, size, fingerprint in self._by_ids("id, size, fingerprint", space, ids)
            if isinstance(size, int)
        }

    def ids(self, space: Namespace) -> list[SampleId]:
        """Return the ids of all labels: integers by value, then strings."""
        self.refresh(space)
        return [
            sample for (sample,) in self._query(f"SELECT id FROM label WHERE key = {_NUMBER} ORDER BY id", space.text)
        ]

    def read(self, space: Namespace, ids: Sequence[SampleId]) -> list[bytes | None]:
        """Return records, None where there is none, or a damaged one."""
        self.refresh(space)
        if len(self._verified) > _MOST_VERIFIED:
            self._verified.clear()
        records: dict[SampleId, bytes] = {}
        for number, sample, checksum, record in self._by_ids("number, id, checksum, record", space, ids):
            version = number, checksum  # numbers alone may come again
            if version not in self._verified:
                if type(record) is not bytes or space.checksum(sample, record) != checksum:
                    self.damaged.add((space.text, sample))
                    self._warn(f"labels are damaged, that of sample {sample!r} first", "damaged")
                    continue
                self._verified.add(version)
            records[sample] = record
        return list(map(records.get, ids))

    def read_all(self, space: Namespace) -> Iterator[tuple[list[SampleId], list[bytes | None]]]:
        """Yield the ids of all labels and their records, some at a time."""
        ids = self.ids(space)
        for start in range(0, len(ids), _READ_AT_ONCE):
            part = ids[start : start + _READ_AT_ONCE]
            yield part, self.read(space, part)

    def data_set(self, space: Namespace) -> str:
        """Return what `note_data_set` wrote down; empty if nothing is known. From here on `space` is of these data."""
        found = self._query("SELECT number, coalesce(data_set, '') FROM key WHERE text = ?", space.text)
        space.number, space.data_set = found[0] if found else (None, "")
        return space.data_set

    def check_data_set(self, space: Namespace) -> None:
        """Check that the labels have not been discarded since `data_set` was asked for."""
        for number, text in self._query("SELECT number, coalesce(data_set, '') FROM key WHERE text = ?", space.text):
            if space.number not in (None, number):
                raise ConflictError(self._discarded())
            space.data_set = text

    def _discarded(self) -> str:
        return (
            f"the folder {str(self.path)!r} is another run's now, which labels other data there (with --relabel, or "
            "before there were labels), so this run's labels were discarded: give each data set a folder of its own"
        )

    def _by_ids(self, columns: str, space: Namespace, ids: Sequence[SampleId]) -> list[Any]:
        found: list[Any] = []
        for start in range(0, len(ids), _IDS_AT_ONCE):
            part = ids[start : start + _IDS_AT_ONCE]
            sql = f"SELECT {columns} FROM label WHERE key = {_NUMBER} AND id IN ({','.join('?' * len(part))})"
            found += self._query(sql, space.text, *part)
        return found

    def _query(self, sql: str, *values: Any) -> list[Any]:
        try:
            with self._read_lock:
                file = self._reading.file()
                with file.translated():
                    return file.sqlite.execute(sql, values).fetchall()
        except (SettingsError, TemporaryError) as exc:
            self.unreadable = str(exc)
            self._warn(f"labels cannot be read now, and are asked for again: {exc}")
            return []

    def _warn(self, words: str, once: str = "") -> None:
        if (once or words) not in self._said:  # once for each label would fill the log
            self._said.add(once or words)
            logger.warning("soft-label cache %s: %s", self.path, words)

    # Writing. All of these raise `TemporaryError` where the folder cannot be written.

    def write(self, space: Namespace, records: Mapping[SampleId, bytes]) -> None:
        """Add labels; they are on the disk when this returns.

        Raises:
            SettingsError: labels of another layout are kept under the key.
            ConflictError: the key's labels were discarded since `space` was made.
        """
        part: dict[SampleId, bytes] = {}
        part_nbytes = 0
        for sample, record in records.items():
            nbytes = 2 * len(record) + _PAGE_NBYTES  # as pages may be half empty; with a page of the index
            if part and part_nbytes + nbytes > self._part_nbytes:
                self._write_part(space, part, part_nbytes)
                part, part_nbytes = {}, 0
            part[sample] = record
            part_nbytes += nbytes
        self._write_part(space, part, part_nbytes)

    def _write_part(self, space: Namespace, part: Mapping[SampleId, bytes], nbytes: int) -> None:
        if self.limit_bytes is not None and nbytes > self.limit_bytes // _PART:
            largest = max(map(len, part.values()))
            raise SettingsError(f"a label of {largest} bytes is too large for disk_bytes={self.limit_bytes}")
        while True:
            with self._transaction() as db:
                number = self._number(db, space)
                if self.limit_bytes is not None and not self._make_room(db, nbytes, self.limit_bytes, number):
                    continue  # some of the oldest are gone
                db.executemany("DELETE FROM label WHERE key = ? AND id = ?", [(number, sample) for sample in part])
                rows = (
                    (number, sample, record[:FINGERPRINT_NBYTES], len(record), space.checksum(sample, record), record)
                    for sample, record in part.items()
                )
                columns = "key, id, fingerprint, size, checksum, record"
                db.executemany(f"INSERT INTO label ({columns}) VALUES (?, ?, ?, ?, ?, ?)", rows)
                return

    def note_data_set(self, space: Namespace, text: str, *, relabel: bool) -> None:
        """Write down which data the labels come from; with `relabel`, forget the labels.

        Raises:
            ConflictError: another process wrote down other data since `data_set` was asked for.
        """
        with self._transaction() as db:
            db.execute("INSERT OR IGNORE INTO key (number, text) VALUES (?, ?)", (_new_number(space), space.text))
            found = db.execute("SELECT number, coalesce(data_set, '') FROM key WHERE text = ?", (space.text,))
            number, there = found.fetchone() or (None, None)
            if there != text:
                if there != space.data_set or space.number not in (None, number):
                    raise ConflictError(self._discarded())
                if relabel:
                    db.execute("DELETE FROM label WHERE key = ?", (number,))
                    number = secrets.randbits(_NUMBER_BITS)
                db.execute("UPDATE key SET number = ?, data_set = ? WHERE text = ?", (number, text, space.text))
        space.number, space.data_set = number, text

    def verify(self, space: Namespace) -> None:
        """Read every label, and forget the damaged ones."""
        self.damaged -= {found for found in self.damaged if found[0] == space.text}  # they may have been replaced
        for _ in self.read_all(space):
            pass
        bad = [found for found in self.damaged if found[0] == space.text]
        if bad:
            with self._transaction() as db:
                db.executemany(f"DELETE FROM label WHERE key = {_NUMBER} AND id = ?", bad)

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """Run a transaction that writes, under a bound only with an empty journal."""
        with self._write_lock:
            try:
                file = self._writing.file()
            except SettingsError as exc:  # it was fine when the cache was opened, so it may be again
                raise TemporaryError(str(exc)) from exc
            deadline = time.monotonic() + _BUSY_S
            while True:
                with file.transaction() as db:
                    if self.limit_bytes is None or not self._size_of("-wal"):
                        yield db
                        return
                with file.translated():
                    is_held = db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
                if is_held:  # another process does it, or reads
                    time.sleep(_PAUSE_S)
                if time.monotonic() > deadline:
                    raise TemporaryError(f"{file}: another process has been reading or writing for {_BUSY_S:g} s")

    def _number(self, db: sqlite3.Connection, space: Namespace) -> int:
        """Return the number of a key, with its layout as it is and will be in the database."""
        assert space.layout is not None
        db.execute(
            "INSERT OR IGNORE INTO key (number, text, data_set) VALUES (?, ?, ?)",
            (_new_number(space), space.text, space.data_set),  # also where the folder was deleted meanwhile
        )
        found = db.execute("SELECT number, layout FROM key WHERE text = ?", (space.text,)).fetchone()
        number, text = found or (None, None)
        if number is None or space.number not in (None, number):
            raise ConflictError(self._discarded())
        space.number = number
        there = RowLayout.from_json(text) if text is not None else space.layout
        merged = there.merged(space.layout)
        if merged is None:
            raise SettingsError(f"its rows are {space.layout}; others of the same key are {there}")
        if text is None or merged != there:
            db.execute("UPDATE key SET layout = ? WHERE number = ?", (merged.to_json(), number))
        space.layout = merged
        return int(number)

    def _make_room(self, db: sqlite3.Connection, nbytes: int, limit_bytes: int, key: int) -> bool:
        """Delete the oldest labels, as many as a transaction may change, and return whether `nbytes` more fit."""

        def pages(pragma: str) -> int:
            return int(db.execute(f"PRAGMA {pragma}").fetchone()[0])

        most = (limit_bytes - 2 * max(self._part_nbytes, nbytes) - _SHARED_MEMORY_NBYTES) // _PAGE_NBYTES
        wanted = nbytes // _PAGE_NBYTES
        if pages("page_count") - pages("freelist_count") + wanted > most:
            oldest: list[tuple[int, int, int]] = []
            sql = "SELECT number, key, size FROM label ORDER BY number LIMIT ?"
            for label in db.execute(sql, (self._part_nbytes // _PAGE_NBYTES,)):
                oldest.append(label)
                nbytes -= label[2]
                if nbytes <= 0:
                    break
            if not oldest:
                raise SettingsError(f"other tables fill disk_bytes={limit_bytes}")
            if any(of == key for _, of, _ in oldest):
                self._warn(
                    "it is full: labels of the same teacher and data set make room for each other, so teachers are "
                    f"asked for them again; raise disk_bytes={limit_bytes}"
                )
            db.execute("DELETE FROM label WHERE number <= ?", (oldest[-1][0],))
            self.evicted += len(oldest)
        if pages("page_count") > most:  # the bound was higher before
            db.execute(f"PRAGMA incremental_vacuum({self._part_nbytes // 2 // _PAGE_NBYTES})").fetchall()
        total = pages("page_count")
        return total <= most and total - pages("freelist_count") + wanted <= most


def _new_number(space: Namespace) -> int:
    return space.number if space.number is not None else secrets.randbits(_NUMBER_BITS)


class _Database:
    """A connection to a folder's database, opened again where another database took its place."""

    def __init__(self, folder: Path, read_only: bool) -> None:
        self._folder = folder
        self._path = folder / _DATABASE
        self._read_only = read_only
        self._file: SqliteFile | None = None

    def file(self) -> SqliteFile:
        """Return the connection.

        Raises:
            SettingsError: The database is not EDL's, or lies where machines share it; or none can be made.
            TemporaryError: It cannot be opened now.
        """
        if self._file is not None and self._file.change() == "":
            self.close()
        is_writable = self._file is not None and self._file.writable
        if not is_writable and not self._read_only and os.access(self._folder, os.W_OK):
            try:
                self._open("rwc")
            except (SettingsError, TemporaryError) as exc:  # the disk is full, say: what is there can still be read
                failed = isinstance(exc.__cause__, sqlite3.OperationalError)
                if not failed or not self._path.exists() or self._has_wal():
                    raise
        if self._file is None:
            if self._path.exists():
                self._open("rw" if self._has_wal() else "ro&immutable=1")
            elif self._read_only:
                self._open("memory")  # an empty one
            else:
                why = "is empty and cannot be written" if self._folder.is_dir() else "was deleted"
                raise SettingsError(f"soft-label cache {self._folder}: the folder {why}")
        assert self._file is not None
        return self._file

    def close(self) -> None:
        """Close it, if it is open."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _open(self, mode: str) -> None:
        file = SqliteFile(str(self._path), _TABLES, _BUSY_S, mode)
        self.close()
        self._file = file

    def _has_wal(self) -> bool:
        return Path(f"{self._path}-wal").exists()


class LabelWriter:
    """Gathers labels and writes them in a background thread, which starts with the first label.

    The cache's lock guards everything here; the cache itself is not held, so that one which is no longer used can go.
    `lost_rows` counts the labels that could not be written since the last flush.
    """

    def __init__(self, folder: LabelFolder, lock: threading.Condition, interval_s: float) -> None:
        self._folder = folder
        self._lock = lock
        self._interval_s = interval_s
        self._batch_nbytes = min(_BATCH_NBYTES, folder.limit_bytes // _PART if folder.limit_bytes else _BATCH_NBYTES)
        self._waiting: dict[Namespace, dict[SampleId, bytes]] = {}
        self._writing: dict[Namespace, dict[SampleId, bytes]] = {}
        self._waiting_nbytes = self._writing_nbytes = 0
        self._since = 0.0  # when the first of the waiting labels came
        self._loop: BackgroundLoop | None = None
        self._urgent = self._closing = self._failing = False
        self._pid = os.getpid()
        self.failures = self.lost_rows = 0
        self.failure = ""

    def put(self, space: Namespace, samples: Sequence[SampleId], records: Sequence[bytes]) -> None:
        """Take in labels. Waits while too many wait to be written, so that memory stays bounded."""
        with self._lock:
            if not self._waiting:
                self._since = time.monotonic()
            self._waiting.setdefault(space, {}).update(zip(samples, records, strict=True))
            self._waiting_nbytes += sum(map(len, records)) + _ROW_NBYTES * len(records)
            if self._loop is None:
                _RUNNING.add(self)
                self._loop = BackgroundLoop("edl-cache", self._step)
            self._loop.wake()
            most = _MOST_WAITING * self._batch_nbytes
            if not self._lock.wait_for(lambda: self._waiting_nbytes + self._writing_nbytes <= most, _STALLED_S):
                self._fail(sum(map(len, self._waiting.values())), f"nothing has been written for {_STALLED_S:g} s")
                self._waiting, self._waiting_nbytes = {}, 0

    def held(self, space: Namespace, ids: Iterable[SampleId] | None = None) -> dict[SampleId, bytes]:
        """Return which of these records, or of all, are on their way to the disk."""
        found: dict[SampleId, bytes] = {}
        for records in (self._writing.get(space), self._waiting.get(space)):
            if records:
                found.update(records if ids is None else {one: records[one] for one in ids if one in records})
        return found

    def flush(self, timeout_s: float) -> bool:
        """Write all labels that came until now; return False if `timeout_s` passed first."""
        with self._lock:
            mine = [held for held in (self._waiting, self._writing) if held]
            self._urgent = bool(self._waiting)
            if self._loop is not None:
                self._loop.wake()
            return self._lock.wait_for(
                lambda: all(held is not self._waiting and held is not self._writing for held in mine), timeout_s
            )

    def let_go(self) -> None:
        """Close from a finalizer, which may run in any thread and in the middle of any function. Waits for no disk."""
        if self._loop is not None and os.getpid() == self._pid:
            self._closing = True
            self._loop.wake()

    def close(self) -> None:
        """Write what there is, and end the thread. May be called twice. Does nothing in a forked child.

        Called by a signal handler in the middle of a function of this cache it does not wait: the thread writes when
        that function has ended.
        """
        self.let_go()
        if self._loop is None or os.getpid() != self._pid or self._lock._is_owned():  # type: ignore[attr-defined]
            return
        if not self._loop.wait_ended(_STALLED_S):
            logger.warning("soft-label cache %s: still writing %g s after it was closed", self._folder.path, _STALLED_S)

    def _step(self) -> float | None:
        """Write what is due, in the thread; return the seconds until the next is, None at the end."""
        with self._lock:
            if not self._waiting and self._closing:
                _RUNNING.discard(self)
                return None
            rest_s = self._since + self._interval_s - time.monotonic() if self._waiting else self._interval_s
            if rest_s > 0 and not (self._urgent or self._closing or self._waiting_nbytes >= self._batch_nbytes):
                return rest_s
            self._writing, self._waiting = self._waiting, {}
            self._writing_nbytes, self._waiting_nbytes = self._waiting_nbytes, 0
            self._urgent = False
        for space, records in self._writing.items():
            try:
                self._folder.write(space, records)
            except Exception as exc:  # noqa: BLE001 - those who wait for this thread must not wait for ever
                with self._lock:
                    self._fail(len(records), str(exc), None if isinstance(exc, EDLError) else exc)
            else:
                self._failing = False
        with self._lock:
            self._writing, self._writing_nbytes = {}, 0
            self._lock.notify_all()
        return 0.0

    def _fail(self, rows: int, failure: str, exc: Exception | None = None) -> None:
        if not self._failing or failure != self.failure:
            logger.warning(
                "%d rows were not written to the soft-label cache, and will be asked for again: %s",
                rows,
                failure,
                exc_info=exc,
            )
        self.failures += 1
        self.lost_rows += rows
        self.failure = failure
        self._failing = True


_RUNNING: set[LabelWriter] = set()
"""Those whose threads are to write what they have when the program ends."""


@atexit.register
def _close_running() -> None:
    for writer in _RUNNING.copy():
        writer.close()
