"""Slots that a process makes for itself where there is no agent: they go with it, or, if it is killed, with the next.

The next one knows them by a lock that their owner holds on a file beside them: process ids say nothing across
containers that share `/dev/shm`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Final

from edl.collective.checkpoint.memory.reader import slot_files

__all__ = ["new_private_prefix", "lock_private_slots"]

_SHM_FOLDER: Final = Path("/dev/shm")
_PRIVATE: Final = "edl-slots-"
_LOCK: Final = ".lock"


def new_private_prefix() -> Path:
    """For slots of this process. What killed ones left behind is removed."""
    _remove_orphans()
    return _SHM_FOLDER / f"{_PRIVATE}{os.getpid()}-{secrets.token_hex(6)}"


def lock_private_slots(owner: object, prefix: Path) -> Callable[[], object]:
    """Hold a lock on `prefix`.lock. The slots are removed when what is returned is called, the owner is collected, or
    the process exits.

    Processes that are forked meanwhile hold the lock as well, for as long as they live.
    """
    return weakref.finalize(owner, _remove_slots, slot_files(prefix), *_open_lock(prefix), os.getpid())


def _open_lock(prefix: Path) -> tuple[Path, int]:
    """The lock file of private slots, and its descriptor, by which this process holds the lock."""
    path = prefix.with_name(prefix.name + _LOCK)
    while True:
        file = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file).st_nlink:
            return path, file
        os.close(file)  # somebody swept between these two lines


def _remove_slots(paths: tuple[Path, ...], lock: Path, file: int, owner: int) -> None:
    if os.getpid() == owner:  # not in a fork
        for path in (*paths, lock):
            path.unlink(missing_ok=True)
        os.close(file)


def _remove_orphans() -> None:
    """Remove what killed processes of this user left behind, the lock last: what has none is nobody's to judge."""
    for lock in _SHM_FOLDER.glob(f"{_PRIVATE}*{_LOCK}"):
        with contextlib.suppress(OSError):  # somebody else's, or held, or just removed
            file = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                for path in (*slot_files(lock.with_suffix("")), lock):
                    path.unlink(missing_ok=True)
            finally:
                os.close(file)
