"""Storing checkpoints from a thread of the worker, where no agent does it."""

from __future__ import annotations

import logging
import threading

from edl.collective.checkpoint.slots import SlotPair
from edl.collective.checkpoint.storage import Persister
from edl.collective.checkpoint.storage_run import run_name
from edl.errors import EDLError

__all__ = ["Background"]

_log = logging.getLogger(__name__)


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

    def close(self, timeout_s: float) -> None:
        """Store what is marked and not stored yet, and stop. Says so where that takes longer than `timeout_s`."""
        self._stopping = True
        self._wake.set()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            _log.warning("the last checkpoint was not stored within %.0f s, and is left incomplete", timeout_s)

    def _run(self) -> None:
        while True:
            self._wake.wait()
            self._wake.clear()
            try:
                self._persister.persist([self._prefix], marked=True)
            except EDLError as exc:
                _log.warning("%s; the next checkpoint will be tried again", exc)
            except Exception:  # noqa: BLE001 - it would end the thread, and nothing more would be stored
                _log.exception("a checkpoint was not stored, by a fault in EDL; the next one will be tried again")
            if self._stopping and not self._wake.is_set():
                return
