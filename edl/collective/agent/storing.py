"""The agent's thread that takes states from the slots of this node's workers to the job's storage."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from edl.collective.checkpoint.storage import Persister
from edl.errors import EDLError

__all__ = ["Storing"]

_LOOK_EVERY_S = 0.5


class Storing:
    """Stores what the workers mark for it, and, when asked, whatever is newest.

    Args:
        url: of the storage, in words of fsspec; empty for none, and then nothing happens here.
        slots: the prefixes of this node's slots.
        fence: whether this node may still complete a checkpoint.
        say: called with a line for each checkpoint that was completed and each that failed.

    Raises:
        SettingsError: nothing here can reach such a URL.
    """

    def __init__(self, url: str, slots: Sequence[str], fence: Callable[[], bool], say: Callable[[str], None]) -> None:
        self._url = url
        self._say = say
        self._slots = [Path(prefix) for prefix in slots]
        self._wake = threading.Event()
        self._urgent = self._stopping = False
        self._thread: threading.Thread | None = None
        if url:
            self._persister = Persister(url, fence=fence)
            self._thread = threading.Thread(target=self._run, name="edl-storing", daemon=True)
            self._thread.start()

    def store_newest(self) -> None:
        """Store the newest state in the background, marked or not: a worker died, or the job has ended."""
        self._urgent = True
        self._wake.set()

    def close(self, timeout_s: float) -> None:
        """Finish what is asked for or marked. Says so if that takes longer than `timeout_s`."""
        if self._thread is None:
            return
        self._stopping = True
        self._wake.set()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._say(f"the last checkpoint was not stored within {timeout_s:g} s, and is left incomplete")

    def _run(self) -> None:
        while True:
            self._wake.wait(_LOOK_EVERY_S)
            self._wake.clear()
            urgent, self._urgent = self._urgent, False
            try:
                outcome = self._persister.persist(self._slots, marked=not urgent)
            except EDLError as exc:
                self._say(f"{exc}; what was stored before is as it was")
            else:
                if outcome is not None and outcome.committed:
                    self._say(f"stored the state after step {outcome.step} at {self._url}")
            if self._stopping and not self._wake.is_set():
                return
