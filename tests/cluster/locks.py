"""Locks between the test processes of one machine, which share one cluster."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

LOCK_S = 1500.0
FOLDER = Path(tempfile.gettempdir()) / "edl-kube-locks"


def _open(name: str) -> int:
    FOLDER.mkdir(exist_ok=True)
    return os.open(FOLDER / name, os.O_RDWR | os.O_CREAT, 0o666)


def _lock(handle: int, name: str, kind: int, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(handle, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise TimeoutError(f"the lock {FOLDER / name} was not free within {timeout_s:.0f} s") from None
            time.sleep(0.1)
        else:
            return


@contextlib.contextmanager
def shared_lock(name: str, timeout_s: float = LOCK_S) -> Iterator[None]:
    """Hold a lock beside others who share it; who waits for it alone goes first."""
    handle = _open(name)
    try:
        with exclusive_lock(f"{name}.gate", timeout_s):
            _lock(handle, name, fcntl.LOCK_SH, timeout_s)
        yield
    finally:
        os.close(handle)


@contextlib.contextmanager
def exclusive_lock(name: str, timeout_s: float = LOCK_S) -> Iterator[None]:
    """Hold a lock alone."""
    handle = _open(name)
    try:
        if name.endswith(".gate"):
            _lock(handle, name, fcntl.LOCK_EX, timeout_s)
        else:
            with exclusive_lock(f"{name}.gate", timeout_s):
                _lock(handle, name, fcntl.LOCK_EX, timeout_s)
        yield
    finally:
        os.close(handle)


def is_free(name: str) -> bool:
    """Whether no process holds the lock, shared or alone."""
    handle = _open(name)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    else:
        return True
    finally:
        os.close(handle)
