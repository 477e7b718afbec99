"""Storing checkpoints from a thread of the worker, where no agent does it."""

from __future__ import annotations

import logging
import threading
import time

from edl.collective.checkpoint.slots import SlotPair
from edl.collective.checkpoint.storage import Persister
from edl.collective.checkpoint.storage_run import run_name
from edl.errors import EDLError

__all__ = ["Background"]

_log = logging.getLogger(__name__)

_RETRY_FIRST_S = 0.25
_RETRY_MOST_S = 8.0
_RETRY_AT_THE_END_S = 30.0


class Background:
    """A thread that stores what the worker marks for storage, once the ranks have agreed on their run.

    Args:
        url: of the storage, in words of fsspec.
        keep: how many complete checkpoints to keep there.

    Raises:
        SettingsError: nothing here can reach such a URL.
    """

    def __init__(self, url: str, slots: SlotPair, keep: int) -> None:
        self._run_name = ""
        self._persister = Persister(url, run=lambda: self._run_name, keep=keep)
        self._prefix = slots.prefix
        self._wake = threading.Event()
        self._stopping = False
        self._try_until = 0.0
        self._complaint = ""
        self._thread = threading.Thread(target=self._run, name="edl-storage", daemon=True)
        self._thread.start()

    def agreed(self, run: int) -> None:
        """All ranks agreed on this number for their run (`edl.collective.checkpoint.storage_run`)."""
        if self._run_name != run_name(run):
            self._run_name = run_name(run)
            self._wake.set()

    def notify(self) -> None:
        """A state was marked."""
        self._wake.set()

    def close(self, timeout_s: float) -> str:
        """Store what is marked and not stored yet, and stop. Returns why that was in vain, empty if it was not.

        Args:
            timeout_s: how long it may take; what fails is tried again for half a minute of it.
        """
        self._try_until = time.monotonic() + min(timeout_s, _RETRY_AT_THE_END_S)
        self._stopping = True
        self._wake.set()
        self._thread.join(timeout_s)
        if not self._thread.is_alive():
            return self._complaint
        return "; ".join(filter(None, [f"not done within {timeout_s:.0f} s", self._complaint]))

    def _run(self) -> None:
        wait_s: float | None = None
        while True:
            self._wake.wait(wait_s)
            self._wake.clear()
            stopping = self._stopping  # what is stored from here on is all that there will be
            stored = self._store()
            if stopping and (stored or time.monotonic() >= self._try_until):
                return
            wait_s = None if stored else min(2 * (wait_s or _RETRY_FIRST_S), _RETRY_MOST_S)

    def _store(self) -> bool:
        """Store what is marked. Returns whether that worked; what did not is said once, not at each attempt."""
        try:
            self._persister.persist([self._prefix], marked=True)
        except EDLError as exc:
            complaint = str(exc)
        except Exception as exc:  # noqa: BLE001 - it would end the thread, and nothing more would be stored
            _log.debug("a checkpoint was not stored", exc_info=True)
            complaint = f"a checkpoint was not stored, by a fault in EDL ({exc!r})"
        else:
            self._complaint = ""
            return True
        if complaint != self._complaint:
            self._complaint = complaint
            _log.warning("%s; it is tried again", complaint)
        return False
