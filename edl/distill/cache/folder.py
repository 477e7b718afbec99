"""Labels on disk: a SQLite database in the cache's folder, `labels.sqlite`.

::

    key      what labels depend on (`CacheKey` as JSON), the layout of their records, their data set
    label    a record under a key and sample id, with a checksum; the label with the lowest number is the oldest

Several processes may share the database. It is in WAL mode, so that reads never wait for writes. Each `put` writes its
labels in one transaction, without a sync (`synchronous = NORMAL`). No labels are lost if the process is killed; a power
failure may lose all labels since the last `flush`.

A key's number is random, and changes when the key's labels are discarded because the data changed. Each transaction
checks that the key still has the number that this process first read, so no label of the old data is added after the
change.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import sqlite3
import threading
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent import futures
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edl.background import start_call
from edl.distill.cache.records import FINGERPRINT_NBYTES, CacheKey, RowLayout, SampleId
from edl.errors import ConflictError, EDLError, SettingsError, TemporaryError
from edl.sqlite_file import SqliteFile, Tables

logger = logging.getLogger("edl.distill")

_DATABASE = "labels.sqlite"
_PAGE_NBYTES = 8192
"""Room for two rows of 1,000 float32 values. Larger pages make it faster to read the labels of texts, but slower to
read single rows."""
_JOURNAL_PAGES = (48 << 20) // _PAGE_NBYTES  # after which the journal is moved into the database, with a sync
_TABLES = Tables(
    kind="soft-label cache",
    application_id=0x45444C43,  # "EDLC"
    version=3,  # 1 stored labels in files beside the database, 2 a sequence column by column
    # The index `label_id` lists the labels, so that listing them reads no record.
    schema="""
        CREATE TABLE key (number INTEGER PRIMARY KEY, text TEXT NOT NULL UNIQUE, layout TEXT, data_set TEXT);
        CREATE TABLE label (
            number INTEGER PRIMARY KEY, key INTEGER NOT NULL, id NOT NULL, fingerprint BLOB NOT NULL,
            size INTEGER NOT NULL, checksum INTEGER NOT NULL, record BLOB NOT NULL
        );
        CREATE INDEX label_id ON label (key, id, fingerprint, size)
    """,
    error=lambda words, is_busy: TemporaryError(words),
    remedy="name a different folder, or delete this one to request its labels again",
    elsewhere="Give each machine a folder on its own disk (load_labels reads several)",
    pragmas=(
        "synchronous = NORMAL",
        f"wal_autocheckpoint = {_JOURNAL_PAGES}",
        "cache_size = -16000",  # KiB: keeps the index's pages in memory while records are read
    ),
    new_pragmas=(f"page_size = {_PAGE_NBYTES}", "auto_vacuum = INCREMENTAL"),  # the latter for a lowered bound
)
_NUMBER_BITS = 62  # of a key's random number, which must not repeat; SQLite's integers have 63
_NUMBER = "(SELECT number FROM key WHERE text = ?)"
_KEY = "SELECT number, layout, coalesce(data_set, '') FROM key WHERE text = ?"
_PART = 16  # a transaction adds at most a sixteenth of the bound, so that few labels are deleted too early
_LABEL_NBYTES = 128  # bytes that a label takes in the database in addition to its record
_BUSY_S = 30.0  # how long to wait while another process writes: a slow disk takes seconds per batch
READ_AT_ONCE = 64  # labels to read at a time when reading many, so that memory stays bounded for wide rows
_MOST_VERIFIED = 1 << 22  # labels remembered as verified, about 200 bytes each: hashing takes as long as reading


@dataclass(eq=False)
class Namespace:
    """Identifies a key's labels, with their layout and the key's number (None while unknown) and their data set."""

    key: CacheKey
    layout: RowLayout | None = None
    number: int | None = None
    data_set: str = ""

    def __post_init__(self) -> None:
        self.text = self.key.to_json()
        self._seed: tuple[RowLayout | None, int] = (None, 0)

    def checksum(self, sample: SampleId, record: bytes) -> int:
        """Return the checksum over a label's key, layout, id and bytes."""
        if self._seed[0] is not self.layout:
            self._seed = self.layout, zlib.crc32(f"{self.text} {self.layout}".encode())
        return zlib.crc32(record, zlib.crc32(repr(sample).encode(), self._seed[1]))


class LabelFolder:
    """Reads and writes labels; creates nothing if `read_only`. Thread-safe.

    `evicted` counts the labels deleted to make room. `failures` counts the failed calls of `put`, and `failure`
    describes the last of them. `damaged` holds the labels found to be damaged. `unreadable` is the reason for the last
    failure to read the folder; it is empty if there was none.
    """

    def __init__(self, path: object, limit_bytes: int | None = None, *, read_only: bool = False) -> None:
        self.path = path = folder_path(path)
        self.limit_bytes = limit_bytes
        self.evicted = self.failures = 0
        self.unreadable = self.failure = ""
        self.damaged: set[tuple[str, SampleId]] = set()
        self._said: set[str] = set()
        self._verified: set[tuple[int, int, SampleId]] = set()
        self._pid = os.getpid()
        self._lost = 0  # labels not written since the last flush
        self._has_written = False
        try:
            if not read_only:
                path.mkdir(parents=True, exist_ok=True)
            if not os.access(path, os.R_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        except OSError as exc:
            raise SettingsError(f"soft-label cache {str(path)!r}: {exc.strerror or exc}") from exc
        # Two connections: one in a transaction would show uncommitted labels.
        self._reading, self._writing = (_Database(path, read_only) for _ in range(2))
        try:
            self._reading.file()
        except TemporaryError as exc:  # such as a full disk, which may be temporary
            self._warn(f"labels cannot be read now and will be requested again: {exc}")

    def nbytes(self) -> int:
        """Return the bytes of the database, its journal and its shared memory."""
        with contextlib.suppress(OSError):  # the journal may disappear meanwhile
            return sum(file.stat().st_size for file in self.path.glob(f"{_DATABASE}*"))
        return 0

    def _warn(self, words: str, once: str = "") -> None:
        if (once or words) not in self._said:  # a warning per label would fill the log
            self._said.add(once or words)
            logger.warning("soft-label cache %s: %s", self.path, words)

    def flush(self, timeout_s: float) -> None:
        """Wait until all labels are on disk. See `SoftLabelCache.flush`."""
        try:
            start_call("edl-cache", self._sync).result(timeout_s)
        except futures.TimeoutError as exc:
            raise TemporaryError(f"soft-label cache {self.path}: not written to disk within {timeout_s:g} s") from exc
        except OSError as exc:
            raise TemporaryError(f"soft-label cache {self.path} cannot be written: {exc.strerror or exc}") from exc
        lost, self._lost = self._lost, 0
        if lost:
            raise TemporaryError(f"{lost} rows could not be written: {self.failure}")

    def _sync(self) -> None:
        """Sync the journal. SQLite itself syncs the pages that it moves from the journal to the database."""
        with contextlib.suppress(FileNotFoundError), Path(f"{self.path / _DATABASE}-wal").open("rb") as journal:
            os.fsync(journal.fileno())

    def close(self) -> None:
        """Sync to disk, and close the database. May be called twice, but not in a forked child."""
        if os.getpid() != self._pid:
            return
        self._lost = 0  # these were logged
        try:
            if self._has_written:
                self.flush(_BUSY_S)
        except TemporaryError as exc:
            self._warn(str(exc))
        self._reading.close()
        self._writing.close()

    # Reading

    def keys(self) -> list[CacheKey]:
        """Return the keys of all labels on disk."""
        found = []
        for (text,) in self._query("SELECT text FROM key WHERE EXISTS (SELECT 1 FROM label WHERE key = key.number)"):
            try:
                found.append(CacheKey.from_json(text))
            except (ValueError, TypeError) as exc:
                self._warn(f"a key is left out: {exc}")
        return found

    def refresh(self, space: Namespace) -> None:
        """Read the layout of the labels if it is not known yet."""
        if space.layout is None and (found := self._found_key(space)) is not None and found[1] is not None:
            space.number = found[0] if space.number is None else space.number
            try:
                space.layout = RowLayout.from_json(found[1])
            except SettingsError as exc:
                self._warn(f"labels of {space.key} are left out: {exc}")

    def _found_key(self, space: Namespace) -> tuple[int, str | None, str] | None:
        return next(iter(self._query(_KEY, space.text)), None)

    def ids(self, space: Namespace) -> list[SampleId]:
        """Return the ids of all labels: integers by value, then strings."""
        sql = f"SELECT id FROM label WHERE key = {_NUMBER} ORDER BY id"
        return [sample for (sample,) in self._query(sql, space.text)]

    def read(self, space: Namespace, ids: Sequence[SampleId]) -> dict[SampleId, bytes]:
        """Return the records with these ids, except missing and damaged ones."""
        records: dict[SampleId, bytes] = {}
        self.refresh(space)
        if len(self._verified) > _MOST_VERIFIED:
            self._verified.clear()
        for start in range(0, len(ids), READ_AT_ONCE):
            part = ids[start : start + READ_AT_ONCE]
            places = ",".join("?" * len(part))
            sql = f"SELECT number, id, checksum, record FROM label WHERE key = {_NUMBER} AND id IN ({places})"
            for number, sample, checksum, record in self._query(sql, space.text, *part):
                version = number, checksum, sample  # numbers may be reused; a damaged index may mix up labels
                if version not in self._verified:
                    if type(record) is not bytes or space.checksum(sample, record) != checksum:
                        self.damaged.add((space.text, sample))
                        again = "a reader or `edl label` will request them again"
                        self._warn(f"labels are damaged, the first for sample {sample!r}: {again}", "damaged")
                        continue
                    self._verified.add(version)
                records[sample] = record
        return records

    def read_all(self, space: Namespace) -> Iterator[dict[SampleId, bytes]]:
        """Yield all records except damaged ones, a few at a time."""
        ids = self.ids(space)
        for start in range(0, len(ids), READ_AT_ONCE):
            yield self.read(space, ids[start : start + READ_AT_ONCE])

    def _query(self, sql: str, *values: Any) -> list[Any]:
        try:
            return self._reading.query(sql, values)
        except (SettingsError, TemporaryError) as exc:
            self.unreadable = str(exc)
            self._warn(f"labels cannot be read now and will be requested again: {exc}")
            return []

    # The data set of the labels

    def data_set(self, space: Namespace) -> str:
        """Return the text that `note_data_set` recorded, "" if none. From now on, `space` belongs to this data set."""
        space.number, _, space.data_set = self._found_key(space) or (None, None, "")
        return space.data_set

    def check_data_set(self, space: Namespace) -> None:
        """Raise `ConflictError` if another process has discarded the labels since `data_set` or `note_data_set`."""
        found = self._found_key(space)
        if found is not None:
            if space.number not in (None, found[0]):
                raise ConflictError(self._discarded())
            space.data_set = found[2]

    def note_data_set(self, space: Namespace, text: str, *, relabel: bool = False) -> None:
        """Record which data the labels belong to. Call this before reading labels.

        A later process compares its own data with the record. With `relabel`, also delete the existing labels, because
        they belong to other data. Raises `ConflictError` if another process recorded other data since `data_set` was
        called, and `TemporaryError` if the folder could not be written.
        """
        with self._writing.transaction() as db:
            number, _, there = self._row_of(db, space)
            if there != text:
                if there != space.data_set or space.number not in (None, number):
                    raise ConflictError(self._discarded())
                if relabel:
                    db.execute("DELETE FROM label WHERE key = ?", (number,))
                    number = secrets.randbits(_NUMBER_BITS)
                db.execute("UPDATE key SET number = ?, data_set = ? WHERE text = ?", (number, text, space.text))
        space.number, space.data_set, self._has_written = number, text, True

    def _discarded(self) -> str:
        return (
            f"the folder {str(self.path)!r} now belongs to another run, which labels other data (with --relabel, or "
            "because the folder had no labels), so this run's labels were discarded: give each data set its own folder"
        )

    # Writing

    def put(self, space: Namespace, records: Mapping[SampleId, bytes]) -> None:
        """Add labels. Labels that cannot be written are logged and counted, and will be requested again."""
        try:
            self._write(space, records)
            self._has_written = True
            self._said.discard(self.failure)  # so that the next failure is logged again
        except EDLError as exc:
            self.failure = str(exc)
            self._warn(f"{len(records)} rows were not written and will be requested again: {exc}", self.failure)
            self.failures += 1
            self._lost += len(records)

    def _write(self, space: Namespace, records: Mapping[SampleId, bytes]) -> None:
        # The last page of a long record is partly empty, like each page of short ones.
        nbytes = sum(len(record) + min(len(record), _PAGE_NBYTES) + _LABEL_NBYTES for record in records.values())
        if self.limit_bytes is not None and nbytes > self.limit_bytes // _PART:
            if len(records) == 1:
                (record,) = records.values()
                raise SettingsError(f"a label of {len(record)} bytes is too large for disk_bytes={self.limit_bytes}")
            items = [*records.items()]
            for part in (items[: len(items) // 2], items[len(items) // 2 :]):
                self._write(space, dict(part))
            return
        with self._writing.transaction() as db:
            number = self._enter_key(db, space)
            if self.limit_bytes is not None:
                self._make_room(db, number, len(records), nbytes // _PAGE_NBYTES + 1, self.limit_bytes // _PAGE_NBYTES)
            db.executemany("DELETE FROM label WHERE key = ? AND id = ?", [(number, sample) for sample in records])
            rows = (
                (number, sample, record[:FINGERPRINT_NBYTES], len(record), space.checksum(sample, record), record)
                for sample, record in records.items()
            )
            columns = "key, id, fingerprint, size, checksum, record"
            db.executemany(f"INSERT INTO label ({columns}) VALUES (?, ?, ?, ?, ?, ?)", rows)

    def _make_room(self, db: sqlite3.Connection, key: int, labels: int, pages: int, most_pages: int) -> None:
        """Delete the oldest labels, `labels` at a time, until `pages` more pages fit into `most_pages`."""

        def count(pragma: str) -> int:
            return int(db.execute(f"PRAGMA {pragma}").fetchone()[0])

        while count("page_count") - count("freelist_count") + pages > most_pages:
            oldest = db.execute("SELECT number, key FROM label ORDER BY number LIMIT ?", (labels,)).fetchall()
            if not oldest:
                break
            if any(of == key for _, of in oldest):
                self._warn(
                    "it is full: labels of the same teacher and data set displace each other, so teachers are "
                    f"asked for them again; raise disk_bytes={self.limit_bytes}"
                )
            db.execute("DELETE FROM label WHERE number <= ?", (oldest[-1][0],))
            self.evicted += len(oldest)
        for _ in range(count("page_count") - most_pages):  # if the bound was higher before
            db.execute("PRAGMA incremental_vacuum(1)")  # Python's sqlite3 frees only one page per call

    def _enter_key(self, db: sqlite3.Connection, space: Namespace) -> int:
        """Return the number of a key, after merging its layout with the one in the database."""
        assert space.layout is not None
        number, text, _ = self._row_of(db, space)
        if space.number not in (None, number):
            raise ConflictError(self._discarded())
        space.number = number
        there = RowLayout.from_json(text) if text is not None else space.layout
        if (merged := there.merged(space.layout)) is None:
            raise SettingsError(f"its rows are {space.layout}, but stored rows of the same key are {there}")
        if text is None or merged != there:
            db.execute("UPDATE key SET layout = ? WHERE number = ?", (merged.to_json(), number))
        space.layout = merged
        return number

    def _row_of(self, db: sqlite3.Connection, space: Namespace) -> tuple[int, str | None, str]:
        """Return a key's number, layout and data set. Add the key if it is missing, as in a folder that was deleted."""
        new = space.number or secrets.randbits(_NUMBER_BITS), space.text, space.data_set
        db.execute("INSERT OR IGNORE INTO key (number, text, data_set) VALUES (?, ?, ?)", new)
        row: tuple[int, str | None, str] | None = db.execute(_KEY, (space.text,)).fetchone()
        if row is None:  # another key has this number
            raise ConflictError(self._discarded())
        return row


def folder_path(path: object) -> Path:
    """Return the path of a folder. Refuse an empty path, which would mean the current folder."""
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise SettingsError(f"{path!r} does not name a folder of labels: pass a path such as 'labels'")
    return Path(path)


class _Database:
    """A connection to a folder's database, reopened if another database has replaced the file."""

    def __init__(self, folder: Path, read_only: bool) -> None:
        self._folder = folder
        self._read_only = read_only
        self._file: SqliteFile | None = None
        self._lock = threading.RLock()

    def file(self) -> SqliteFile:
        """Return the connection: writable if possible, otherwise read-only."""
        if self._file is not None and (self._file.change() == "" or not (self._file.writable or self._read_only)):
            self.close()
        if self._file is None:
            self._file = self._opened()
        return self._file

    @contextlib.contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock, self.file().transaction() as db:
            yield db

    def query(self, sql: str, values: Sequence[Any]) -> list[Any]:
        with self._lock:
            file = self.file()
            with file.translated():
                return file.sqlite.execute(sql, values).fetchall()

    def close(self) -> None:
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None

    def _opened(self) -> SqliteFile:
        path = self._folder / _DATABASE
        is_open = Path(f"{path}-wal").exists()
        if not self._read_only and os.access(self._folder, os.W_OK):
            try:
                return SqliteFile(str(path), _TABLES, _BUSY_S)
            except (SettingsError, TemporaryError) as exc:  # such as a full disk: existing labels can still be read
                if is_open or not path.exists() or not isinstance(exc.__cause__, sqlite3.OperationalError):
                    raise
        if path.exists():  # a database that no process has open can be read from anywhere, even another machine
            return SqliteFile(str(path), _TABLES, _BUSY_S, "rw" if is_open else "ro&immutable=1")
        if self._read_only:
            return SqliteFile(str(path), _TABLES, _BUSY_S, "memory")  # an empty database
        why = "is empty and cannot be written" if self._folder.is_dir() else "was deleted"
        raise SettingsError(f"soft-label cache {self._folder}: the folder {why}")
