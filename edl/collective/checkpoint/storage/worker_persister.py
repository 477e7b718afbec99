"""Storing checkpoints from a thread of the worker, where no agent does it."""

from __future__ import annotations

import logging
import threading
import time

from edl.collective.checkpoint.memory.slots import SlotPair
from edl.collective.checkpoint.storage.run_id import run_name
from edl.collective.checkpoint.storage.writer import CheckpointWriter
from edl.errors import EDLError, TemporaryError

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
        self._url = url
        self._run_name = ""
        self._persister = CheckpointWriter(url, run=lambda: self._run_name, keep=keep)
        self._prefix = slots.prefix
        self._wake = threading.Event()
        self._stopping = False
        self._try_until = 0.0
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="edl-storage", daemon=True)
        self._thread.start()

    def agreed(self, run: int) -> None:
        """All ranks agreed on this number for their run (`edl.collective.checkpoint.storage.run_id`)."""
        if self._run_name != run_name(run):
            self._run_name = run_name(run)
            self._wake.set()

    def notify(self) -> None:
        """A state was marked."""
        self._wake.set()

    def close(self, timeout_s: float) -> None:
        """Store what is marked and not stored yet, and stop.

        Args:
            timeout_s: how long it may take; what fails is tried again for half a minute of it.

        Raises:
            TemporaryError: that was in vain. What was stored before is as it was.
        """
        self._try_until = time.monotonic() + min(timeout_s, _RETRY_AT_THE_END_S)
        self._stopping = True
        self._wake.set()
        self._thread.join(timeout_s)
        late, error = self._thread.is_alive(), self._error
        if late or error is not None:
            why = ", ".join(filter(None, [f"not done within {timeout_s:.0f} s" * late, str(error or "")]))
            what = f"the last state is not at {self._url}, what was stored before is as it was: {why}"
            raise TemporaryError(what) from error

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
            self._persister.write_newest([self._prefix], marked=True)
        except EDLError as exc:
            error: Exception = exc
        except Exception as exc:  # noqa: BLE001 - it would end the thread, and nothing more would be stored
            _log.debug("a checkpoint was not stored", exc_info=True)
            error = RuntimeError(f"a checkpoint was not stored, by a fault in EDL ({exc!r})")
        else:
            self._error = None
            return True
        if str(error) != str(self._error or ""):
            _log.warning("%s; it is tried again", error)
        self._error = error
        return False
