"""The thread that takes states from slots to storage: of a node's agent, or of a worker where there is no agent."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path
from typing import Final

from edl.background import BackgroundLoop, start_call
from edl.backoff import Backoff
from edl.collective.checkpoint.storage.writer import CheckpointWriter
from edl.errors import EDLError, TemporaryError

__all__ = ["POLL_S", "CheckpointPersister"]

logger = logging.getLogger(__name__)

POLL_S: Final = 0.5
"""How often an agent looks for marked states, since its workers cannot wake it: a look reads a page of memory for each
worker, and a state waits that long at most."""
_RETRY_FIRST_S: Final = 0.5
"""The wait after a first failure: most of a storage's refusals ("slow down") are over by then."""
_RETRY_LAST_S: Final = 30.0
"""The longest wait between two attempts: longer ones would leave a storage that is back without a state for minutes."""
_CLOSE_RETRY_S: Final = 0.5
"""The wait between attempts at the end, which a person or a scheduler waits for: it does not grow."""
_WORKER_RETRY_S: Final = 30.0
"""How long a worker that ends without an agent tries again: every rank of a job waits as long for its storage."""
_CLOSE_POLL_S: Final = 0.1
"""How often `close` looks for progress: a small part of any `timeout_s` that makes sense."""
_CHECK_POLL_S: Final = 0.05
"""How often `check_storage` asks whether to stop: a signal is to be answered at once, as people feel it."""


class CheckpointPersister:
    """Stores what workers mark for storage and, on request, the newest state whether it is marked or not.

    Nothing is stored before `start`. A failure is reported once, and tried again.

    Args:
        url: of the storage, as fsspec names it; empty for none, and then nothing happens here.
        slots: the prefixes of the workers' slots.
        report: is called with a line for a failure, and when storing falls behind `interval_s` or catches up.
        report_stored: is called with a line for every checkpoint that was completed.
        run: names the run that the slots are of; None where `set_run` will say it.
        fence: whether this node may still complete a checkpoint; None for always.
        keep: how many complete checkpoints to keep.
        interval_s: seconds between two states that are marked.
        poll_s: seconds between two looks for marked states, beside those that `wake` asks for.

    Raises:
        SettingsError: no file system of fsspec reaches the URL.
    """

    def __init__(
        self,
        url: str,
        slots: Sequence[Path],
        report: Callable[[str], object],
        *,
        report_stored: Callable[[str], object] = lambda line: None,
        run: Callable[[], str] | None = None,
        fence: Callable[[], bool] | None = None,
        keep: int = 3,
        interval_s: float = math.inf,
        poll_s: float = math.inf,
    ) -> None:
        self._url = url
        self._slots = list(slots)
        self._report = report
        self._report_stored = report_stored
        self._run_name = ""
        self._interval_s = interval_s
        self._poll_s = poll_s
        self._slow = False
        self._newest_requests = 0  # counted by the thread that calls `store_newest`
        self._newest_answered = 0  # and by the loop's: a flag that both set would lose a request
        self._closing = False
        self._retry_until = math.inf
        self._retries = Backoff(_RETRY_FIRST_S, _RETRY_LAST_S)
        self._error: Exception | None = None
        self._late = ""
        self._nbytes_before = 0
        self._most_nbytes = 0
        self._loop: BackgroundLoop | None = None
        self._writer: CheckpointWriter | None = None
        if url:
            self._writer = CheckpointWriter(url, run=run or (lambda: self._run_name), keep=keep, fence=fence)

    def start(self) -> None:
        """Store from now on: the slots are empty, or what they hold is of this job's run."""
        if self._writer is not None and self._loop is None:
            self._loop = BackgroundLoop("edl-storing", self._poll_and_store)

    def set_run(self, name: str) -> None:
        """Name the run that the slots are of, now that all ranks have agreed on it."""
        if self._run_name != name:
            self._run_name = name
            self.wake()

    def wake(self) -> None:
        """Look for a marked state now."""
        if self._loop is not None:
            self._loop.wake()

    def store_newest(self) -> None:
        """Store the newest state in the background, marked or not: a worker died, or the job has ended."""
        self._newest_requests += 1
        self.wake()

    def check_storage(self, timeout_s: float, raise_if_stopping: Callable[[], object]) -> None:
        """See that the storage takes a file. One that does not answer within `timeout_s` is only reported.

        Args:
            timeout_s: how long to wait for the storage, in seconds.
            raise_if_stopping: is called again and again during the wait; may raise, which ends it.

        Raises:
            SettingsError: nothing can be stored there.
        """
        if self._writer is None:
            return
        check = start_call("edl-check-storage", self._writer.check_storage)
        deadline = time.monotonic() + timeout_s
        while True:
            raise_if_stopping()
            try:
                check.result(_CHECK_POLL_S)
            except FutureTimeoutError:
                if time.monotonic() < deadline:
                    continue
                self._report(f"{self._url} has not answered within {timeout_s:g} s: going on, in the hope that it will")
            return

    def close(self, timeout_s: float, *, patient: bool = False, retry_s: float = 0.0) -> bool:
        """Finish what is asked for or marked. What takes longer than `timeout_s` is reported and left incomplete.

        Args:
            timeout_s: how long it may take, in seconds.
            patient: at the end of a job, whose last state is what it was for: try again whatever fails, and give up
                only when the storage has taken nothing for `timeout_s`.
            retry_s: how long to try again what fails, in seconds, if not `patient`.

        Returns:
            Whether all of it is stored.
        """
        if self._loop is None or self._writer is None:
            return True
        self._retry_until = math.inf if patient else time.monotonic() + retry_s
        self._closing = True
        self._loop.wake()
        progress = 0
        since = time.monotonic()
        while not self._loop.wait_ended(_CLOSE_POLL_S):
            nbytes = self._writer.written_nbytes - self._nbytes_before
            if patient and nbytes != progress and nbytes > self._most_nbytes:  # further than any attempt that failed
                progress = nbytes
                since = time.monotonic()
            if time.monotonic() - since > timeout_s:
                self._loop.close(0.0)
                what = f"{self._url} took nothing for {timeout_s:g} s" if patient else f"it took over {timeout_s:g} s"
                self._late = f"not done within {timeout_s:.0f} s"
                self._report(f"the last checkpoint is left incomplete: {what}; what was stored before is as it was")
                return False
        return self._error is None

    def close_or_raise(self, timeout_s: float) -> None:
        """Finish what is marked, as a worker does that has no agent: what fails is tried again for half a minute.

        Args:
            timeout_s: how long it may take, in seconds.

        Raises:
            TemporaryError: the last state is not stored. What was stored before is as it was.
        """
        if not self.close(timeout_s, retry_s=min(timeout_s, _WORKER_RETRY_S)):
            why = ", ".join(filter(None, [self._late, str(self._error or "")]))
            what = f"the last state is not at {self._url}, what was stored before is as it was: {why}"
            raise TemporaryError(what) from self._error

    def _poll_and_store(self) -> float | None:
        """Store what there is to store. Returns the seconds until the next look, None when nothing more will come."""
        closing = self._closing  # what is stored from here on is all that there will be
        requests = self._newest_requests
        stored = self._store(requests > self._newest_answered)
        if stored:
            self._newest_answered = requests
        if closing and (stored or time.monotonic() >= self._retry_until):
            return None
        if stored:
            self._retries.reset()
            return self._poll_s
        return _CLOSE_RETRY_S if closing else self._retries.next_wait_s()

    def _store(self, newest_wanted: bool) -> bool:
        """Store a state. Returns whether that worked; a failure is reported once, not at each attempt."""
        assert self._writer is not None
        self._nbytes_before = self._writer.written_nbytes
        began_at = time.monotonic()
        try:
            outcome = self._writer.write_newest(self._slots, marked=not newest_wanted)
        except EDLError as exc:
            error: Exception = exc
        except Exception as exc:  # noqa: BLE001 - reported, and what comes next is stored all the same
            error = RuntimeError(f"a checkpoint was not stored, by a fault in EDL ({exc!r})")
            error.__cause__ = exc
        else:
            self._error = None
            self._most_nbytes = 0
            if outcome is not None:
                if outcome.committed:
                    self._report_stored(f"stored the state after step {outcome.step} at {self._url}")
                self._compare_pace(time.monotonic() - began_at)
            return True
        self._most_nbytes = max(self._most_nbytes, self._writer.written_nbytes - self._nbytes_before)
        is_new = str(error) != str(self._error or "")
        self._error = error
        if is_new:
            if not isinstance(error, EDLError):
                logger.error("a fault in EDL", exc_info=error.__cause__)
            self._report(f"{error}; what was stored before is as it was, and it is tried again")
        return False

    def _compare_pace(self, took_s: float) -> None:
        """Report when storing begins to take longer than the time between two states, and when that is over."""
        if self._slow == (took_s > self._interval_s):
            return
        self._slow = not self._slow
        if self._slow:
            self._report(
                f"storing a state takes {took_s:.0f} s, longer than --checkpoint-interval {self._interval_s:g}: of the "
                "states that come meanwhile the newest is stored next, the others are left out"
            )
        else:
            self._report("the storage keeps pace again")
