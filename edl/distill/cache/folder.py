"""The cache's folder: a SQLite database that says where each label lies, and files of labels behind one another.

::

    FOLDER/labels.sqlite      keys with the layout of their labels, and by key and sample id: file, place, checksum
    FOLDER/RANDOM.labels      labels of all keys, appended

A writer holds the database's write lock (in WAL mode, so readers never wait), makes room, appends the labels to the
newest file, syncs it, and commits where they lie. So the database names whole labels only, whichever process is killed
when: what lies behind the last label that it names is overwritten by the next writer. The labels themselves are not in
the database because WAL would write each of them twice, and reading one would copy whole pages.

The bound on bytes holds at every moment: the oldest file goes, with its labels' places, before something is written.

Disks, and what lies between, flip bits: each label has a checksum over its key, its id and its bytes, verified when it
is first read. A label that fails counts as missing.

Processes of one machine share a folder. Where machines share it, SQLite's locks and memory do not reach from one to
another, so a folder on such a file system is refused unless `EDL_SHARED_FILE` says that one machine uses it. A database
that is not open elsewhere can be read anywhere.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import re
import secrets
import sqlite3
import stat
import threading
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import quote

from edl import mounts
from edl.discovery.sqlite.file import FileIdentity, opening
from edl.distill.cache.ids import SampleId
from edl.distill.cache.key import CacheKey
from edl.distill.cache.layout import FINGERPRINT_NBYTES, RowLayout
from edl.errors import SettingsError
from edl.quoting import shown
from edl.settings import allows_shared_file

__all__ = ["LabelFolder", "Namespace", "why"]

logger = logging.getLogger("edl.distill")

_DATABASE = "labels.sqlite"
_APPLICATION_ID = 0x45444C43  # "EDLC", in the database's header
_FORMAT = 1
"""Version of the tables below; a database with another one is refused rather than misread."""
_SCHEMA = """
CREATE TABLE namespace (number INTEGER PRIMARY KEY, key TEXT NOT NULL UNIQUE, layout TEXT NOT NULL);
CREATE TABLE data_set (key TEXT PRIMARY KEY, text TEXT NOT NULL);
CREATE TABLE file (number INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT NOT NULL, size INTEGER NOT NULL);
CREATE TABLE label (
    namespace INTEGER NOT NULL, id NOT NULL, file INTEGER NOT NULL, start INTEGER NOT NULL, size INTEGER NOT NULL,
    fingerprint INTEGER NOT NULL, checksum INTEGER NOT NULL, PRIMARY KEY (namespace, id)
) WITHOUT ROWID;
CREATE INDEX label_file ON label (file)
"""
_NUMBER = "(SELECT number FROM namespace WHERE key = ?)"
_FILE_NBYTES = 128 << 20
"""A file grows to this size: large enough that terabytes are few files, small enough to evict singly."""
_PLACE_NBYTES = 160
"""Bytes that a label may add to the database: its place, the place's entry in the index by file, and slack."""
_PAGE_NBYTES = 4096  # SQLite's default
_BUSY_S = 30.0
"""How long to wait for another process that writes: a slow disk takes seconds for a batch."""
_IDS_AT_ONCE = 512
"""Ids of one query. SQLite before 3.32 takes 999."""
_READ_AT_ONCE = 64
"""Labels read at a time where all are, so that memory stays bounded for wide rows."""
_MOST_PLACES = 1 << 22
"""Places remembered for each key, about 300 bytes each; beyond that they are looked up again."""
_MOST_HANDLES = 128
"""Files open at a time. Descriptors are few, and opening a file takes microseconds."""
_DATA_FILE = re.compile(r"[0-9a-f]{16}\.labels")
_GONE = {errno.ENOENT, errno.EINVAL, errno.EISDIR, errno.ELOOP, errno.ENOTDIR, errno.ENXIO, errno.ENODATA}
"""Errors that say something about the file itself. Others, such as EMFILE or EIO, may be over at the next attempt."""

_Place: TypeAlias = tuple[int, int, int, int]
"""File, first byte, bytes and checksum; `_VERIFIED` in its place once it was found right."""
_VERIFIED = -1


@dataclass(eq=False)
class Namespace:
    """The labels of a key in a folder.

    Attributes:
        key: The key that they are kept under.
        layout: Columns of their records; None while there are none.
        places: The places of labels that were looked up.
        waiting: records to be written, by id.
        writing: records that are being written.
        since: Time at which the first waiting record came, by `time.monotonic`.
        urgent: True to write the waiting records at once.
        bad: ids of labels found that are damaged, or whose file is gone.
    """

    key: CacheKey
    layout: RowLayout | None = None
    places: dict[SampleId, _Place] = field(default_factory=dict)
    waiting: dict[SampleId, bytes] = field(default_factory=dict)
    writing: dict[SampleId, bytes] = field(default_factory=dict)
    since: float = 0.0
    urgent: bool = False
    bad: set[SampleId] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.text = self.key.to_json()
        self._seed = 0
        self._seed_of: RowLayout | None = None

    def checksum(self, sample: SampleId, record: bytes) -> int:
        """Return the checksum of a label: of its key, layout, id and bytes."""
        if self._seed_of is not self.layout:
            self._seed, self._seed_of = zlib.crc32(f"{self.text} {self.layout}".encode()), self.layout
        return zlib.crc32(record, zlib.crc32(repr(sample).encode(), self._seed))


class LabelFolder:
    """Reads and writes labels. Thread-safe.

    Args:
        path: The folder.
        limit_bytes: Bytes of all files in the folder together, None for no bound.
        read_only: Only read, and make nothing.

    Attributes:
        evicted: files deleted so far to make room.
        unreadable: files of labels found so far that are missing, torn or foreign.

    Raises:
        SettingsError: the folder cannot be used.
    """

    def __init__(self, path: Path, limit_bytes: int | None = None, *, read_only: bool = False) -> None:
        self.path = path
        self.limit_bytes = limit_bytes
        self.evicted = self.unreadable = 0
        # Reentrant locks, since a signal handler may close the cache in the middle of a function.
        self._read_lock, self._write_lock = threading.RLock(), threading.RLock()
        self._namespaces: list[Namespace] = []
        self._handles: dict[int, _Handle] = {}
        self._said: set[str] = set()
        try:
            if not read_only:
                path.mkdir(parents=True, exist_ok=True)
            if not os.access(path, os.R_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            old = next(path.glob("*/key.json"), None)
        except OSError as exc:
            raise SettingsError(f"soft-label cache folder {str(path)!r}: {exc.strerror or exc}") from exc
        if old is not None:
            raise SettingsError(
                f"soft-label cache folder {str(path)!r} has labels in the format of an earlier EDL (in "
                f"{old.parent.name}), which this one does not read: name another folder, or delete it, and label again"
            )
        self._reading, self._writing = (_Database(path, read_only, self._forget) for _ in range(2))
        try:
            self._reading.connection()
        except sqlite3.OperationalError as exc:  # a full disk, say: that may pass
            self._warn(f"labels cannot be read now, and are asked for again: {why(exc)}")
        except (OSError, sqlite3.Error) as exc:
            raise SettingsError(f"soft-label cache folder {str(path)!r}: {why(exc)}") from exc

    def close(self) -> None:
        """Close the database and all files, but for what a function uses that this interrupts."""
        for lock, database in ((self._read_lock, self._reading), (self._write_lock, self._writing)):
            if not lock._is_owned():  # type: ignore[attr-defined]
                with lock:
                    database.close()
        self._handles.clear()

    def nbytes(self) -> int:
        """Return the bytes of all files, foreign ones included."""
        return sum(size for _, size in self._files())

    # Reading

    def keys(self) -> list[CacheKey]:
        """Return the keys of all labels in the folder."""
        found = []
        for (text,) in self._query(
            "SELECT key FROM namespace WHERE EXISTS (SELECT 1 FROM label WHERE namespace = number)"
        ):
            try:
                found.append(CacheKey.from_json(text))
            except (ValueError, TypeError) as exc:
                self._warn(f"a key is left out: {exc}")
        return found

    def namespace(self, key: CacheKey) -> Namespace:
        """Return the labels of a key."""
        found = Namespace(key)
        self._namespaces.append(found)
        self.refresh(found)
        return found

    def refresh(self, space: Namespace) -> None:
        """Find out which layout the labels have, if that is not known."""
        if space.layout is not None:
            return
        for (text,) in self._query("SELECT layout FROM namespace WHERE key = ?", space.text):
            try:
                space.layout = RowLayout.from_json(text)
            except ValueError as exc:
                self._warn(f"labels of {space.key} are left out: {exc}")

    def known(self, space: Namespace, ids: Sequence[SampleId]) -> dict[SampleId, tuple[int, int]]:
        """Return which labels are there: the sizes and fingerprints of their records by id."""
        self.refresh(space)
        return {sample: (size, mark) for sample, size, mark in self._by_ids("id, size, fingerprint", space, ids)}

    def ids(self, space: Namespace) -> list[SampleId]:
        """Return the ids of all labels: integers by value, then strings."""
        self.refresh(space)
        return [sample for (sample,) in self._query(f"SELECT id FROM label WHERE namespace = {_NUMBER}", space.text)]

    def read(self, space: Namespace, ids: Sequence[SampleId], *, fresh: bool = False) -> list[bytes | None]:
        """Return records, None where there is none, or a damaged one.

        With `fresh`, places that are known are looked up again: another process may have written newer labels.
        """
        unknown = ids if fresh else [sample for sample in ids if sample not in space.places]
        if unknown:
            self._look_up(space, unknown)
        places = list(map(space.places.get, ids))
        records: list[bytes | None] = []
        while (at := len(records)) < len(ids):
            place = places[at]
            if place is None:
                records.append(None)
                continue
            run, end = [place], place[1] + place[2]
            while at + len(run) < len(ids):  # labels that lie behind one another are read together
                other = places[at + len(run)]
                if other is None or other[1] != end or other[0] != place[0]:
                    break
                run.append(other)
                end += other[2]
            records += self._read_run(space, ids[at : at + len(run)], run, end - place[1])
        return records

    def data_set(self, space: Namespace) -> str:
        """Return what `note_data_set` wrote down; empty if nothing is known."""
        found = self._query("SELECT text FROM data_set WHERE key = ?", space.text)
        return str(found[0][0]) if found else ""

    def read_all(self, space: Namespace) -> Iterator[tuple[list[SampleId], list[bytes | None]]]:
        """Yield the ids of all labels and their records, some at a time."""
        ids = self.ids(space)
        for start in range(0, len(ids), _READ_AT_ONCE):
            part = ids[start : start + _READ_AT_ONCE]
            yield part, self.read(space, part)

    def verify(self, space: Namespace) -> None:
        """Read every label, and forget those that are damaged or whose file is gone."""
        for _ in self.read_all(space):
            pass
        bad = [(space.text, sample) for sample in space.bad]
        if bad:
            with self._transaction() as db:
                db.executemany(f"DELETE FROM label WHERE namespace = {_NUMBER} AND id = ?", bad)

    def _look_up(self, space: Namespace, ids: Sequence[SampleId]) -> None:
        self.refresh(space)
        if len(space.places) > _MOST_PLACES:
            space.places.clear()
        for sample in ids:
            space.places.pop(sample, None)
        for sample, *place in self._by_ids("id, file, start, size, checksum", space, ids):
            if all(type(number) is int and 0 <= number < 1 << 62 for number in place):  # else it is damaged
                space.places[sample] = tuple(place)

    def _read_run(
        self, space: Namespace, ids: Sequence[SampleId], run: Sequence[_Place], nbytes: int
    ) -> Sequence[bytes | None]:
        file, start = run[0][:2]
        try:
            data = self._handle(file).read(start, nbytes)
        except (OSError, MemoryError) as exc:
            if len(ids) > 1:  # some of them may be there
                singly = (
                    self._read_run(space, [sample], [place], place[2]) for sample, place in zip(ids, run, strict=True)
                )
                return [record for (record,) in singly]
            self._unread(space, ids[0], file, exc)
            return [None]
        records: list[bytes | None] = []
        at = 0
        for sample, (_, place, size, checksum) in zip(ids, run, strict=True):
            record = data[at : at + size]
            at += size
            if checksum != _VERIFIED:
                if space.checksum(sample, record) != checksum:
                    space.places.pop(sample, None)
                    space.bad.add(sample)
                    self._warn(f"labels in file {file} are damaged, that of sample {sample!r} first", f"damaged {file}")
                    records.append(None)
                    continue
                space.places[sample] = (file, place, size, _VERIFIED)
                space.bad.discard(sample)
            records.append(record)
        return records

    def _unread(self, space: Namespace, sample: SampleId, file: int, exc: Exception) -> None:
        """Say that a label cannot be read, unless another process has evicted it."""
        self._look_up(space, [sample])
        if space.places.get(sample, (-1,))[0] != file:
            return
        if isinstance(exc, OSError) and exc.errno in _GONE:
            space.bad.add(sample)
            self.unreadable += f"file {file}" not in self._said
        self._warn(f"labels in file {file} cannot be read, and are asked for again: {why(exc)}", f"file {file}")

    def _handle(self, file: int) -> _Handle:
        handle = self._handles.get(file)
        if handle is None:
            names = self._query("SELECT name FROM file WHERE number = ?", file)
            if not names or not _DATA_FILE.fullmatch(str(names[0][0])):
                raise FileNotFoundError(errno.ENOENT, "the database has no such file")
            if len(self._handles) >= _MOST_HANDLES:
                self._handles.clear()  # one that is in use closes afterwards
            handle = self._handles[file] = _Handle(self.path / names[0][0])
        return handle

    def _by_ids(self, columns: str, space: Namespace, ids: Sequence[SampleId]) -> Iterator[Any]:
        for start in range(0, len(ids), _IDS_AT_ONCE):
            part = ids[start : start + _IDS_AT_ONCE]
            padding = [part[0]] * ((1 << (len(part) - 1).bit_length()) - len(part))  # few texts of queries are compiled
            marks = ",".join("?" * (len(part) + len(padding)))
            sql = f"SELECT {columns} FROM label WHERE namespace = {_NUMBER} AND id IN ({marks})"
            yield from self._query(sql, space.text, *part, *padding)

    def _query(self, sql: str, *values: Any) -> list[Any]:
        try:
            with self._read_lock:
                return self._reading.connection().execute(sql, values).fetchall()
        except (OSError, sqlite3.Error) as exc:
            self._warn(f"labels cannot be read now, and are asked for again: {why(exc)}")
            return []

    def _warn(self, words: str, once: str = "") -> None:
        if (once or words) not in self._said:  # once for each label would fill the log
            self._said.add(once or words)
            logger.warning("soft-label cache %s: %s", self.path, words)

    def _forget(self) -> None:
        """Forget what is known of a database that is gone."""
        self._handles.clear()
        for space in self._namespaces:
            space.places.clear()
            if not space.waiting:
                space.layout = None

    # Writing

    def write(self, space: Namespace, layout: RowLayout, records: Mapping[SampleId, bytes]) -> None:
        """Add labels; they are on the disk when this returns.

        Raises:
            OSError: they could not be written.
            sqlite3.Error: likewise.
            SettingsError: labels of another layout are kept under the key.
        """
        data = b"".join(records.values())
        while not self._write(space, layout, records, data):
            pass  # the evicted files go before the next try, when it is certain that the database does not name them
        for sample in records:
            space.places.pop(sample, None)

    def _write(self, space: Namespace, layout: RowLayout, records: Mapping[SampleId, bytes], data: bytes) -> bool:
        with self._transaction() as db:
            number = self._number(db, space, layout)
            if not self._has_room(db, len(data), len(records), number):
                return False
            file, name, start = self._file_for(db, len(data))
            self._append(name, start, data)
            rows, at = [], start
            for sample, record in records.items():
                mark = int.from_bytes(record[:FINGERPRINT_NBYTES], "little", signed=True)
                rows.append((number, sample, file, at, len(record), mark, space.checksum(sample, record)))
                at += len(record)
            db.executemany("REPLACE INTO label VALUES (?, ?, ?, ?, ?, ?, ?)", rows)
            db.execute("UPDATE file SET size = ? WHERE number = ?", (at, file))
        return True

    def note_data_set(self, space: Namespace, text: str, *, relabel: bool) -> None:
        """Write down which data the labels come from; with `relabel`, forget the labels.

        Raises:
            OSError: it could not be written.
            sqlite3.Error: likewise.
        """
        with self._transaction() as db:
            db.execute("REPLACE INTO data_set VALUES (?, ?)", (space.text, text))
            if relabel:
                db.execute(f"DELETE FROM label WHERE namespace = {_NUMBER}", (space.text,))
                db.execute("DELETE FROM file WHERE NOT EXISTS (SELECT 1 FROM label WHERE file = number)")
        if relabel:
            space.places.clear()

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._write_lock:
            db = self._writing.connection()
            db.execute("BEGIN IMMEDIATE")
            try:
                yield db
                db.execute("COMMIT")
            except BaseException:
                if db.in_transaction:
                    with contextlib.suppress(sqlite3.Error):
                        db.execute("ROLLBACK")
                raise
            self._writing.check()
            with contextlib.suppress(sqlite3.Error):  # the next one does it
                db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()

    def _number(self, db: sqlite3.Connection, space: Namespace, layout: RowLayout) -> int:
        """Return the number of a key in the database, after the layout of its labels has been compared."""
        found = db.execute("SELECT number, layout FROM namespace WHERE key = ?", (space.text,)).fetchone()
        if found is None:
            cursor = db.execute("INSERT INTO namespace (key, layout) VALUES (?, ?)", (space.text, layout.to_json()))
            space.layout = layout
            return int(cursor.lastrowid or 0)
        number, text = found
        there = RowLayout.from_json(text)
        merged = there.merged(layout)
        if merged is None:
            raise SettingsError(f"its rows are {layout}; others of the same key are {there}")
        if merged != there:
            db.execute("UPDATE namespace SET layout = ? WHERE number = ?", (merged.to_json(), number))
        space.layout = merged
        return int(number)

    def _has_room(self, db: sqlite3.Connection, nbytes: int, rows: int, number: int) -> bool:
        """Delete files that the database does not name; if a batch does not fit then, take out the oldest names."""
        named = dict(db.execute("SELECT name, number FROM file ORDER BY number"))
        sizes = {path.name: size for path, size in self._files()}
        for name in [name for name in sizes if _DATA_FILE.fullmatch(name) and name not in named]:
            (self.path / name).unlink(missing_ok=True)
            del sizes[name]
        if self.limit_bytes is None:
            return True
        pages, free = (db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count"))
        index = max(rows * _PLACE_NBYTES - free * _PAGE_NBYTES, 0)
        journal = max(pages * _PAGE_NBYTES + index - sizes.get(f"{_DATABASE}-wal", 0), 0)  # each page may change
        wanted = nbytes + index + journal
        used = sum(sizes.values())
        others = used - sum(sizes.get(name, 0) for name in named)
        if used + wanted <= self.limit_bytes:
            return True
        if others + nbytes > self.limit_bytes or not named:
            raise OSError(
                errno.EFBIG, f"{nbytes} bytes do not fit into {self.limit_bytes}, of which {others} are taken"
            )
        for name, file in named.items():
            if used + wanted <= self.limit_bytes:
                break
            if db.execute("SELECT 1 FROM label WHERE file = ? AND namespace = ? LIMIT 1", (file, number)).fetchone():
                self._warn(
                    "it is full: labels of the same teacher and data set make room for each other, so teachers are "
                    f"asked for them again; raise disk_bytes={self.limit_bytes}"
                )
            db.execute("DELETE FROM label WHERE file = ?", (file,))
            db.execute("DELETE FROM file WHERE number = ?", (file,))
            used -= sizes.get(name, 0)
            self.evicted += 1
        return False

    def _file_for(self, db: sqlite3.Connection, nbytes: int) -> tuple[int, str, int]:
        """Return number and name of the file to append to, and how much of it is in use."""
        most = _FILE_NBYTES if self.limit_bytes is None else min(_FILE_NBYTES, self.limit_bytes // 8)
        newest = db.execute("SELECT number, name, size FROM file ORDER BY number DESC LIMIT 1").fetchone()
        if newest is not None and newest[2] + nbytes <= most:
            with contextlib.suppress(OSError):
                if (self.path / newest[1]).stat().st_size >= newest[2]:  # else it is torn
                    return tuple(newest)
        name = f"{secrets.token_hex(8)}.labels"
        cursor = db.execute("INSERT INTO file (name, size) VALUES (?, 0)", (name,))
        return int(cursor.lastrowid or 0), name, 0

    def _append(self, name: str, start: int, data: bytes) -> None:
        fd = os.open(self.path / name, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            view, at = memoryview(data), start
            while view:
                written = os.pwrite(fd, view, at)
                view, at = view[written:], at + written
            os.fsync(fd)
        finally:
            os.close(fd)
        if not start:
            folder = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                with contextlib.suppress(OSError):  # some file systems cannot, and the file itself is there
                    os.fsync(folder)
            finally:
                os.close(folder)

    def _files(self) -> Iterator[tuple[Path, int]]:
        """Yield every file in the folder and its size; files that vanish meanwhile are left out."""
        for path in self.path.iterdir():
            with contextlib.suppress(OSError):
                found = path.lstat()
                if stat.S_ISREG(found.st_mode):
                    yield path, found.st_size


class _Handle:
    """A file open for reading, closed when no longer held, be it in the middle of another thread's read."""

    def __init__(self, path: Path) -> None:
        self._fd = -1  # `open` may fail
        # Opening a FIFO, or reading a terminal, could block for ever.
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        if not stat.S_ISREG(os.fstat(self._fd).st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        self._size = 0

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)

    def read(self, start: int, nbytes: int) -> bytes:
        """Return bytes of the file.

        Raises:
            OSError: they cannot be read, or are not there.
        """
        if start + nbytes > self._size:  # a damaged place must not become an allocation of gigabytes
            self._size = os.fstat(self._fd).st_size
        data = os.pread(self._fd, nbytes, start) if start + nbytes <= self._size else b""
        if len(data) != nbytes:
            raise OSError(errno.ENODATA, f"it is torn: bytes {start} to {start + nbytes} are missing")
        return data


class _Database:
    """A connection to a folder's database, opened again where another database took its place.

    Args:
        folder: The cache's folder.
        read_only: make nothing.
        forget: called when the database has been replaced.
    """

    def __init__(self, folder: Path, read_only: bool, forget: Callable[[], None]) -> None:
        self._path = folder / _DATABASE
        self._read_only = read_only
        self._forget = forget
        self._connection: sqlite3.Connection | None = None
        self._identity: FileIdentity | None = None
        self._provisional = False  # whether it only reads, until the disk has room again

    def connection(self) -> sqlite3.Connection:
        """Return the connection.

        Raises:
            SettingsError: the database is not EDL's, or lies where machines share it.
            OSError: it was tampered with while in use.
            sqlite3.Error: it cannot be opened.
        """
        try:
            self.check()
        except FileNotFoundError:
            self.close()
            self._forget()
        if self._connection is None or self._provisional:
            writable = not self._read_only and os.access(self._path.parent, os.W_OK)
            try:
                if writable:
                    self._open()
            except sqlite3.OperationalError:
                if not self._path.exists() or self._has_wal():
                    raise
                self._provisional = True
            if self._connection is None:
                self._open_to_read()
        assert self._connection is not None
        return self._connection

    def check(self) -> None:
        """Check that the database is the one that was opened.

        Raises:
            FileNotFoundError: it was removed or replaced.
            OSError: it was tampered with.
        """
        changed = self._identity.change(str(self._path)) if self._identity is not None else None
        if changed:
            raise OSError(errno.EIO, f"{self._path}: {changed}; delete the folder, and its labels are asked for again")
        if changed is not None:
            raise FileNotFoundError(errno.ENOENT, "the folder was removed or replaced while in use")

    def close(self) -> None:
        """Close it, if it is open."""
        connection, self._connection, self._identity, self._provisional = self._connection, None, None, False
        if connection is not None:
            connection.close()

    def leak(self) -> None:
        """Never close the connection, not even at the end of the interpreter."""
        if self._connection is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._connection))

    def _has_wal(self) -> bool:
        return Path(f"{self._path}-wal").exists()

    def _connect(self, mode: str) -> sqlite3.Connection:
        uri = f"file:{quote(str(self._path))}?mode={mode}"
        return sqlite3.connect(uri, uri=True, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)

    def _open_to_read(self) -> None:
        """Open a database to read it, whether others write to it or not; an empty one if there is none."""
        if not self._path.exists() and not self._read_only:
            raise FileNotFoundError(errno.ENOENT, "there are no labels, and none can be written here")
        if not self._path.exists():
            db = self._connect("memory")
            db.executescript(f"{_SCHEMA}; PRAGMA application_id = {_APPLICATION_ID}; PRAGMA user_version = {_FORMAT}")
        elif self._has_wal():
            self._check_place()
            db = self._connect("rw")
        else:
            db = self._connect("ro&immutable=1")
        self._check_format(db)
        self._connection = db

    def _open(self) -> None:
        self._check_place()
        with opening(str(self._path)):
            db = self._connect("rwc")
            try:
                self._prepare(db)
            except BaseException:
                db.close()
                raise
            self.close()
            self._connection, self._identity = db, FileIdentity.of(str(self._path))
        _databases.add(weakref.ref(self, _databases.discard))

    def _prepare(self, db: sqlite3.Connection) -> None:
        mode = db.execute("PRAGMA journal_mode = WAL").fetchone()[0]
        if mode != "wal":
            raise SettingsError(f"{self._path}: its file system cannot share memory (journal mode {mode})")
        db.execute("PRAGMA synchronous = FULL")
        db.execute("PRAGMA wal_autocheckpoint = 0")  # each transaction does it
        db.execute("PRAGMA cache_size = -16000")  # KiB: a batch's pages go into the WAL once
        if not self._check_format(db):
            db.execute("BEGIN IMMEDIATE")
            if not self._check_format(db):
                for statement in _SCHEMA.split(";"):
                    db.execute(statement)
                db.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
                db.execute(f"PRAGMA user_version = {_FORMAT}")
            db.execute("COMMIT")
            db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()

    def _check_format(self, db: sqlite3.Connection) -> bool:
        """Return whether the tables are there.

        Raises:
            SettingsError: they are others.
        """
        if not db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            return False
        found = tuple(db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version"))
        if found != (_APPLICATION_ID, _FORMAT):
            kind = f"EDL's format {found[1]}" if found[0] == _APPLICATION_ID else "another program's database"
            raise SettingsError(f"{self._path}: {kind}, not EDL's labels of format {_FORMAT}; name another folder")
        return True

    def _check_place(self) -> None:
        kind = mounts.file_system(str(self._path.resolve()), mounts.read_mounts())
        if mounts.is_shared(kind) and not allows_shared_file():
            raise SettingsError(
                f"{self._path} lies on {kind}, which machines share, and SQLite's locks do not reach from one to "
                "another: give each machine a folder on a disk of its own (load_labels reads several), or, if only "
                "this machine uses it, set EDL_SHARED_FILE=1"
            )


_databases: set[weakref.ref[_Database]] = set()


def _leak_inherited() -> None:
    # SQLite forbids even closing a connection in a forked child: it would touch files that the parent works with.
    for reference in tuple(_databases):
        database = reference()
        if database is not None:
            database.leak()
    _databases.clear()


os.register_at_fork(after_in_child=_leak_inherited)


def why(exc: BaseException) -> str:
    """Return why labels cannot be read or written, for people."""
    words = exc.strerror if isinstance(exc, OSError) and exc.strerror else shown(exc)
    if isinstance(exc, sqlite3.Error) and "locked" in words:
        return f"another process has been writing for {_BUSY_S:g} s"
    if isinstance(exc, sqlite3.DatabaseError) and ("malformed" in words or "not a database" in words):
        return f"{_DATABASE} is damaged ({words}): delete the folder, and its labels are asked for again"
    return words
