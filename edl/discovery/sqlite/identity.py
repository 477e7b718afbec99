"""Which files a connection works with: the database, its journal (`-wal`), and the memory they share (`-shm`).

SQLite keeps the three open, and never looks whether they are still there. A process whose `-wal` was removed writes
where they are not read, and later processes see an empty registry.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["FileIdentity", "discard", "opening"]

_Inode = tuple[int, int]
_SIDES = ("-wal", "-shm")
_LOCK_WAIT_S = 1.0
"""How long to wait for who opens or removes a file at this moment: a millisecond, unless that process stands still."""


@dataclass(frozen=True)
class FileIdentity:
    """The files at a path at a time.

    Attributes:
        place: where they lie: SQLite follows links before it adds `-wal` and `-shm`.
        main: the database; None if it was not there.
        sides: `-wal` and `-shm`, which are there as long as a connection is open.
    """

    place: str
    main: _Inode | None
    sides: tuple[_Inode | None, ...]

    @classmethod
    def of(cls, path: str) -> FileIdentity:
        """Return the files that are there now; ask after the connection has read, when SQLite has made all three."""
        place = os.path.realpath(path)
        return cls(place, _inode(place)[0], tuple(_inode(place + side)[0] for side in _SIDES))

    def change(self, path: str) -> str | None:
        """Return why a connection is of no more use.

        Returns:
            "" if another file took the place of its own, which goes on well without it; words if the file that is there
            must not be used any more. None if nothing has changed.
        """
        sides = [_inode(self.place + side)[0] for side in _SIDES]
        main, size = _inode(path)  # looked at last: a file that has just taken the place has other sides
        if main != self.main or main is None:
            return ""
        if size == 0:
            return "it was truncated while in use"
        for side, inode, seen in zip(_SIDES, self.sides, sides, strict=True):
            if inode is None or seen != inode:
                return f"its {side} was removed or replaced while in use"
        return None


def discard(identity: FileIdentity, path: str) -> bool:
    """Remove the files, unless another process has: every process sees that the database is another, and leaves it.

    The database goes first: who makes the next database meets its journal and memory without an owner at worst.

    Raises:
        OSError: they cannot be removed.
    """
    with _folder_lock(identity.place) as locked:  # of two that see it, the second removes no successor
        if not locked or not identity.change(path):
            return False
        for side in ("", *_SIDES):
            Path(identity.place + side).unlink(missing_ok=True)
        return True


@contextlib.contextmanager
def opening(path: str) -> Iterator[None]:
    """Open a file while no other process that does so in this way makes or removes it; make it where there is none.

    SQLite finds the journal and memory by their names, some time after it has opened the database. Those of a database
    that took its place, or was there before it, are none of its own: what is written there is lost to their owners, and
    beginning the memory anew kills who reads it (SIGBUS).

    What cannot be made is left to SQLite, which says why.
    """
    place = os.path.realpath(path)
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):
            if held.enter_context(_folder_lock(place)) and _inode(place)[0] is None:
                for side in _SIDES:
                    Path(place + side).unlink(missing_ok=True)
                os.close(os.open(place, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o644))
        yield


@contextlib.contextmanager
def _folder_lock(place: str) -> Iterator[bool]:
    """Lock the folder of a file against others that open or remove files; False where one does so for too long."""
    deadline = time.monotonic() + _LOCK_WAIT_S
    folder = os.open(Path(place).parent, os.O_RDONLY | os.O_CLOEXEC)
    try:
        while True:
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    yield False
                    return
                time.sleep(0.001)
        try:
            yield True
        finally:
            fcntl.flock(folder, fcntl.LOCK_UN)  # a child that was forked meanwhile has the folder open as well
    finally:
        os.close(folder)


def _inode(path: str) -> tuple[_Inode | None, int]:
    """Return device and inode of a file, and its size; None without a file."""
    try:
        status = Path(path).stat()
    except OSError:
        return None, 0
    return (status.st_dev, status.st_ino), status.st_size
