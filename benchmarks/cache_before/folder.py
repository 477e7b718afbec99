"""A folder of segments under one bound on its bytes, shared by processes.

::

    FOLDER/.lock                        held while something is written or evicted
    FOLDER/NAMESPACE/key.json           what the labels in here depend on, for people and `SoftLabelCache.keys`
    FOLDER/NAMESPACE/TIME-PID-RANDOM.safetensors

Whoever writes holds the lock, makes room first, writes to a temporary name, syncs and renames. So the bound holds at
every moment, readers see whole files only, and a temporary file that the lock's holder finds is one that a killed
process left. Readers take no lock.

Machines may share the folder. There are file systems where a lock holds within a machine only, or not at all. So names
of temporary files say which machine writes them, and those of another are left alone for a day: what is written is
whole and stays, locks or not. Only the bound may be exceeded then, by as many files as there are machines.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import hashlib
import logging
import os
import platform
import re
import secrets
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.cache_before.segment import read_small
from edl.distill.cache import CacheKey
from edl.errors import SettingsError

__all__ = ["KEY_FILE", "SUFFIX", "SegmentFolder", "folder_of"]

logger = logging.getLogger("edl.distill")

SUFFIX = ".safetensors"
KEY_FILE = "key.json"
_LOCK, _TEMPORARY = ".lock", ".writing-"
_FOREIGN_TEMPORARY = re.compile(r"\.writing-([0-9a-f]{16})-[0-9a-f]{8}-.*")
_ABANDONED_S = 86400.0
"""Age of another machine's temporary file that is deleted: longer than any disk takes, and than clocks differ."""
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}
"""Errors of file systems that have no locks, such as Lustre mounted without."""
_SEGMENT = re.compile(r"\d{20}-\d+-[0-9a-f]+\.safetensors")
_LOCK_S = 30.0
"""How long to wait for another process that writes: a slow disk takes seconds for a file, a dead one lets go."""
_LARGEST_KEY = 64 << 10
"""Bytes of a key's file that are read: it has names and a tag, and no person writes longer ones."""
_LATEST_NS = 5 * 10**18
"""The year 2128. A name with a later time is not followed: behind the last one of 20 digits there would be none."""


class SegmentFolder:
    """Writes segments and evicts them. `write` is for a single thread at a time.

    Args:
        path: of the folder, made if it is missing.
        limit_bytes: of all files in the folder together, None for no bound.

    Attributes:
        path: as given.
        limit_bytes: as given.
        evicted: segments deleted so far.

    Raises:
        SettingsError: the folder cannot be used.
    """

    def __init__(self, path: Path, limit_bytes: int | None) -> None:
        self.path = path
        self.limit_bytes = limit_bytes
        self.evicted = 0
        self._last_ns = 0
        self._unlisted = False
        self._warned = False
        try:
            path.mkdir(parents=True, exist_ok=True)
            if not os.access(path, os.R_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        except OSError as exc:
            raise SettingsError(f"soft-label cache folder {str(path)!r}: {exc.strerror or exc}") from exc

    def nbytes(self) -> int:
        """Return the bytes of all files, foreign files included."""
        return sum(size for _, size in self._files())

    def keys(self) -> list[CacheKey]:
        """Return the keys of all labels in the folder."""
        found = []
        for file in sorted(self.path.glob(f"*/{KEY_FILE}")):
            try:
                key = CacheKey.from_json(read_small(file, _LARGEST_KEY).decode("ascii"))
                if folder_of(key) != file.parent.name:
                    raise ValueError(f"it belongs to {folder_of(key)!r}")
                found.append(key)
            except FileNotFoundError:
                continue  # evicted since it was listed
            except (OSError, ValueError) as exc:
                logger.warning("soft-label cache: %s is left out: %s", file, exc)
        return found

    def write(self, key: CacheKey, data: bytes) -> Path:
        """Add a segment, evicting the oldest segments to make room.

        Args:
            key: of the rows.
            data: the file's bytes.

        Returns:
            The file.

        Raises:
            OSError: it could not be written.
        """
        with self._locked():
            place = self.path / folder_of(key)
            text = key.to_json()
            self._make_room(len(data) + len(text), folder_of(key))
            place.mkdir(exist_ok=True)
            if not _has(place / KEY_FILE, text.encode("ascii")):  # each time: another process may have evicted it
                self._place(place / KEY_FILE, text.encode("ascii"))
            self._last_ns = max(time.time_ns(), self._last_ns + 1)
            path = place / f"{self._last_ns:020d}-{os.getpid()}-{secrets.token_hex(4)}{SUFFIX}"
            self._place(path, data)
        return path

    def _place(self, path: Path, data: bytes) -> None:
        temporary = path.with_name(f"{_TEMPORARY}{_machine()}-{secrets.token_hex(4)}-{path.name}")
        try:
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            try:
                view = memoryview(data)
                while view:
                    view = view[os.write(fd, view) :]
                os.fsync(fd)
            finally:
                os.close(fd)
            temporary.rename(path)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        _sync(path.parent)

    def _make_room(self, wanted: int, namespace: str) -> None:
        """Delete what killed processes left, and the oldest segments until `wanted` bytes fit."""
        files = list(self._files())
        for path, _ in files:
            if _is_abandoned(path):
                path.unlink(missing_ok=True)
        files = [(path, size) for path, size in files if not path.name.startswith(_TEMPORARY)]
        # A clock that is set back must not make new files older than those before them, which would go first.
        times = [int(path.name[:20]) for path, _ in files if _SEGMENT.fullmatch(path.name)]
        self._last_ns = max([self._last_ns, *(at for at in times if at < _LATEST_NS)])
        if self.limit_bytes is None:
            return
        used = sum(size for _, size in files)
        segments = sorted(((p, s) for p, s in files if _SEGMENT.fullmatch(p.name)), key=lambda entry: entry[0].name)
        others = used - sum(size for _, size in segments)
        if others + wanted > self.limit_bytes:
            raise OSError(
                errno.EFBIG, f"{wanted} bytes do not fit into {self.limit_bytes}, of which {others} are taken"
            )
        emptied = set()
        for path, size in segments:
            if used + wanted <= self.limit_bytes:
                break
            path.unlink(missing_ok=True)
            used -= size
            self.evicted += 1
            emptied.add(path.parent)
            self._warn_if_own(path, namespace)
        for place in emptied - {self.path / namespace}:
            _remove_if_empty(place)

    def _warn_if_own(self, path: Path, namespace: str) -> None:
        if path.parent.name == namespace and not self._warned:
            self._warned = True
            logger.warning(
                "soft-label cache %s is full: labels of the same teacher and data set make room for each other, so "
                "teachers are asked for them again; raise disk_bytes=%d",
                self.path,
                self.limit_bytes,
            )

    def _files(self) -> Iterator[tuple[Path, int]]:
        """Yield every file and its size; files that vanish meanwhile are left out."""
        for place in [self.path, *_entries(self.path)]:
            try:
                entries = _entries(place)
            except OSError as exc:
                if place == self.path:
                    raise
                if not self._unlisted:
                    self._unlisted = True
                    logger.warning(
                        "soft-label cache: %s cannot be listed, and is not counted: %s", place, exc.strerror or exc
                    )
                continue
            for path in entries:
                with contextlib.suppress(OSError):
                    found = path.lstat()
                    if stat.S_ISREG(found.st_mode):
                        yield path, found.st_size

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        fd = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            deadline = time.monotonic() + _LOCK_S
            while True:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise TimeoutError(
                            errno.ETIMEDOUT, f"another process has held {self.path / _LOCK} for {_LOCK_S:g} s"
                        ) from None
                    time.sleep(0.02)
                except OSError as exc:
                    if exc.errno not in _NO_LOCKS or self.limit_bytes is not None:
                        raise
                    break
            yield
        finally:
            os.close(fd)


@functools.cache
def folder_of(key: CacheKey) -> str:
    """Return the name of a key's folder: the model's for people, and a hash that tells keys apart."""
    readable = re.sub(r"[^A-Za-z0-9_.-]+", "-", key.model)[:40].strip(".-") or "model"
    return f"{readable}-{hashlib.sha256(key.to_json().encode()).hexdigest()[:20]}"


def _machine() -> str:
    """Return 16 hexadecimal digits that tell running kernels apart, each of which keeps locks among its processes."""
    try:
        name = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
    except OSError:
        name = platform.node()
    return hashlib.blake2b(name.encode(), digest_size=8).hexdigest()


def _is_abandoned(path: Path) -> bool:
    """Return whether a file is a temporary file whose writer was killed, as the lock's holder sees it."""
    if not path.name.startswith(_TEMPORARY):
        return False
    foreign = _FOREIGN_TEMPORARY.fullmatch(path.name)
    if foreign is None or foreign[1] == _machine():
        return True
    try:
        return time.time() - path.stat().st_mtime > _ABANDONED_S
    except OSError:
        return False  # it has its name by now


def _entries(path: Path) -> list[Path]:
    try:
        return list(path.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def _has(path: Path, data: bytes) -> bool:
    """Return whether a file is there, with this content."""
    try:
        return read_small(path, len(data) + 1) == data
    except OSError:
        return False


def _remove_if_empty(place: Path) -> None:
    """Delete a namespace's folder if its key is all that is left."""
    if [path.name for path in _entries(place)] == [KEY_FILE]:
        with contextlib.suppress(OSError):
            (place / KEY_FILE).unlink()
            place.rmdir()


def _sync(place: Path) -> None:
    """Make renames in a folder last through a power failure, where the file system can."""
    fd = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):  # the file itself is there, and whole
            os.fsync(fd)
    finally:
        os.close(fd)
