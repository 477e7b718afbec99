"""Locks between the test processes of one machine, which share one cluster."""

from __future__ import annotations

import contextlib
import fcntl
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

LOCK_S = 1500.0
FOLDER = Path(tempfile.gettempdir()) / "edl-kube-locks"


def _open(name: str) -> IO[bytes]:
    FOLDER.mkdir(exist_ok=True)
    return (FOLDER / name).open("ab")


def _lock(handle: IO[bytes], name: str, kind: int) -> None:
    deadline = time.monotonic() + LOCK_S
    while True:
        try:
            fcntl.flock(handle, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise TimeoutError(f"the lock {FOLDER / name} was not free within {LOCK_S:.0f} s") from None
            time.sleep(0.1)
        else:
            return


@contextlib.contextmanager
def exclusive_lock(name: str, kind: int = fcntl.LOCK_EX) -> Iterator[None]:
    """Hold a lock alone."""
    with _open(name) as handle:
        with _open(f"{name}.gate") as gate:
            _lock(gate, f"{name}.gate", fcntl.LOCK_EX)
            _lock(handle, name, kind)
        yield


def shared_lock(name: str) -> contextlib.AbstractContextManager[None]:
    """Hold a lock beside others who share it; who waits for it alone goes first."""
    return exclusive_lock(name, fcntl.LOCK_SH)


def is_free(name: str) -> bool:
    """Whether no process holds the lock, shared or alone."""
    with _open(name) as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
