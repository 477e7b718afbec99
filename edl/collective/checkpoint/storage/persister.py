"""The thread that takes states from slots to storage: in a node's agent, or in the worker if there is no agent.

An agent's thread polls the slots for marked states; a worker's thread is woken when one is saved. Either stores them
with a `CheckpointWriter`, and retries failures with growing pauses. At the end of a job, `close` waits for the last
state.
"""

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
"""Seconds between two checks of an agent for marked states, as its workers cannot wake it. A check reads one page of
memory for each worker, and a state waits at most this long."""
_RETRY_FIRST_S: Final = 0.5
"""Wait after a first failure: most temporary refusals of a storage ("slow down") are over by then."""
_RETRY_LAST_S: Final = 30.0
"""Longest wait between two attempts: with longer ones, a storage that works again would stay unused for minutes."""
_CLOSE_RETRY_S: Final = 0.5
"""Wait between attempts at the end of a job. It does not grow, because a person or a scheduler is waiting."""
_WORKER_RETRY_S: Final = 30.0
"""Seconds for which a worker without an agent retries when it ends: every rank of the job waits this long."""
_CLOSE_POLL_S: Final = 0.1
"""Seconds between two checks of `close` for progress: a small part of any reasonable `timeout_s`."""
_CHECK_POLL_S: Final = 0.05
"""Seconds between two calls of `raise_if_stopping`: a signal should seem to be handled at once."""


class CheckpointPersister:
    """Stores the states that workers mark for storage and, on request, the newest state even if it is not marked.

    Nothing is stored before `start`. A failure is reported once and then retried.

    Args:
        url: URL of the storage for fsspec; if empty, nothing is ever stored.
        slots: Prefixes of the workers' slots.
        report: Called with one line for a failure, and when storing falls behind `interval_s` or catches up.
        report_stored: Called with one line for every checkpoint that was completed.
        run: Returns the name of the slots' run; None if `set_run` will set it.
        fence: Returns whether this node may still complete a checkpoint; None for always.
        keep: Number of complete checkpoints to keep.
        interval_s: Seconds between two states that are marked.
        poll_s: Seconds between two checks for marked states, in addition to those after `wake`.

    Raises:
        SettingsError: None of fsspec's file systems can reach the URL.
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
        self._newest_requests = 0  # written only by the thread that calls `store_newest`
        self._newest_answered = 0  # written only by the loop's thread: a flag set by both could lose a request
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
        """Start storing. By now the slots must be empty, or their contents must be of this job's run."""
        if self._writer is not None and self._loop is None:
            self._loop = BackgroundLoop("edl-storing", self._poll_and_store)

    def set_run(self, name: str) -> None:
        """Set the name of the slots' run, once all ranks have agreed on it."""
        if self._run_name != name:
            self._run_name = name
            self.wake()

    def wake(self) -> None:
        """Check for a marked state now."""
        if self._loop is not None:
            self._loop.wake()

    def store_newest(self) -> None:
        """Store the newest state in the background, marked or not, because a worker died or the job has ended."""
        self._newest_requests += 1
        self.wake()

    def check_storage(self, timeout_s: float, raise_if_stopping: Callable[[], object]) -> None:
        """Check that the storage accepts a file. If it does not respond within `timeout_s` seconds, only report that.

        During the wait, `raise_if_stopping` is called repeatedly; if it raises, the wait ends.

        Raises:
            SettingsError: Nothing can be stored there.
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
        """Finish requested and marked states. If that takes longer than `timeout_s` seconds, report it and give up.

        Use `patient` at the end of a job, whose last state is its result. It retries any failure, and gives up only
        after the storage has made no progress for `timeout_s` seconds. Otherwise failures are retried for `retry_s`
        seconds.

        Returns:
            Whether everything is stored.
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
            if patient and nbytes != progress and nbytes > self._most_nbytes:  # further than any failed attempt
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
        """Finish marked states within `timeout_s` seconds, retrying failures for half a minute.

        For a worker that has no agent.

        Raises:
            TemporaryError: The last state is not stored. What was stored before is unchanged.
        """
        if not self.close(timeout_s, retry_s=min(timeout_s, _WORKER_RETRY_S)):
            why = ", ".join(filter(None, [self._late, str(self._error or "")]))
            what = f"the last state is not at {self._url}, what was stored before is as it was: {why}"
            raise TemporaryError(what) from self._error

    def _poll_and_store(self) -> float | None:
        """Store what is due. Returns the seconds until the next check, or None if nothing more will come."""
        closing = self._closing  # read first: if it is set, this attempt sees every state that there will be
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
        """Store a state. Returns whether that worked; a failure is reported once, not for each attempt."""
        assert self._writer is not None
        self._nbytes_before = self._writer.written_nbytes
        began_at = time.monotonic()
        try:
            outcome = self._writer.write_newest(self._slots, marked=not newest_wanted)
        except EDLError as exc:
            error: Exception = exc
        except Exception as exc:  # noqa: BLE001 - reported, and later states are still stored
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
        """Report when storing begins to take longer than the time between two states, and when it catches up."""
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
