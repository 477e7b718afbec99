"""The agent's thread that takes states from the slots of this node's workers to the job's storage."""

from __future__ import annotations

import logging
import math
import re
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path

from edl.collective.checkpoint.storage.run_id import new_run_id, run_name
from edl.collective.checkpoint.storage.writer import CheckpointWriter
from edl.collective.job_records import prefix
from edl.discovery.store import Store
from edl.errors import DiscoveryError, EDLError, ProtocolError

__all__ = ["JobRun", "CheckpointPersister"]

_log = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.5
_RETRY_MOST_S = 30.0
_CLOSING_LOOK_S = 0.1
_PROVING_LOOK_S = 0.05


class JobRun:
    """The name of the job's run in its checkpoints (`edl.collective.checkpoint.storage.run_id`).

    It lasts as long as the job's records in the Store: a job that is stopped and started again there goes on counting
    generations, so it is the same run.
    """

    def __init__(self, store: Store, job: str) -> None:
        self._store = store
        self._key = prefix(job) + "run"
        self._known = ""

    def __call__(self) -> str:
        """The name, made by whichever agent needs it first.

        Raises:
            DiscoveryError: the store does not answer.
            ProtocolError: something else is in its place.
        """
        entry = self._store.get(self._key)
        if entry is None:  # not yet; or the store has lost it, and then it is to be as it was
            name = self._known or run_name(new_run_id())
            self._store.compare_and_set(self._key, name.encode(), None)
            entry = self._store.get(self._key)
        if entry is None:
            raise DiscoveryError(f"the store forgot {self._key} as soon as it was written")
        if re.fullmatch(rb"[0-9a-f]{16}", entry.value) is None:
            raise ProtocolError(f"{self._key} in the store is not the name of a run: remove it")
        self._known = entry.value.decode()
        return self._known


class CheckpointPersister:
    """Stores what the workers mark for it, and, when asked, whatever is newest; nothing before `start`.

    Args:
        url: of the storage, in words of fsspec; empty for none, and then nothing happens here.
        slots: the prefixes of this node's slots.
        run: names the job's run.
        fence: whether this node may still complete a checkpoint.
        say: called with a line for each checkpoint that was completed and each that failed.
        interval_s: between two states that are marked; where storing takes longer, that is said.

    Raises:
        SettingsError: nothing here can reach such a URL.
    """

    def __init__(
        self,
        url: str,
        slots: Sequence[str],
        run: Callable[[], str],
        fence: Callable[[], bool],
        say: Callable[[str], None],
        *,
        interval_s: float = math.inf,
    ) -> None:
        self._url = url
        self._interval_s = interval_s
        self._slow = False
        self._say = say
        self._slots = [Path(prefix) for prefix in slots]
        self._wake = threading.Event()
        self._urgent = self._stopping = self._patient = False
        self._complaint = ""
        self._attempt_at = self._most = 0
        self._thread: threading.Thread | None = None
        self._persister = CheckpointWriter(url, run=run, fence=fence) if url else None

    def start(self) -> None:
        """Store from now on: the slots are empty, or what they hold is of this job's run."""
        if self._persister is not None and self._thread is None:
            self._thread = threading.Thread(target=self._run, args=(self._persister,), name="edl-storing", daemon=True)
            self._thread.start()

    def check_storage(self, timeout_s: float, raise_if_stopping: Callable[[], object]) -> None:
        """See that something can be stored. A storage that does not answer within `timeout_s` is only told of.

        Args:
            raise_if_stopping: called again and again while it is waited for; may raise.

        Raises:
            SettingsError: nothing can be stored there.
        """
        persister = self._persister
        if persister is None:
            return
        proof: Future[None] = Future()

        def run() -> None:
            try:
                persister.check_storage()
            except Exception as exc:  # noqa: BLE001 - raised again where it is waited for
                proof.set_exception(exc)
            else:
                proof.set_result(None)

        threading.Thread(target=run, name="edl-prove", daemon=True).start()
        deadline = time.monotonic() + timeout_s
        while True:
            raise_if_stopping()
            try:
                proof.result(_PROVING_LOOK_S)
            except FutureTimeoutError:
                if time.monotonic() < deadline:
                    continue
                self._say(f"{self._url} has not answered within {timeout_s:g} s: going on, in the hope that it will")
            return

    def store_newest(self) -> None:
        """Store the newest state in the background, marked or not: a worker died, or the job has ended."""
        self._urgent = True
        self._wake.set()

    def close(self, timeout_s: float, *, patient: bool = False) -> bool:
        """Finish what is asked for or marked. Says so if that takes longer than `timeout_s`, and leaves it incomplete.

        Args:
            timeout_s: how long it may take.
            patient: at the end of a job, whose last state is what it was for: try again what fails, and give up only
                when the storage has taken nothing for `timeout_s`.

        Returns:
            Whether all of it is stored.
        """
        if self._thread is None or self._persister is None:
            return True
        self._patient, self._stopping = patient, True
        self._wake.set()
        taken, since = 0, time.monotonic()
        while self._thread.is_alive():
            self._thread.join(_CLOSING_LOOK_S)
            now_taken = self._persister.written_nbytes - self._attempt_at
            if patient and now_taken != taken and now_taken > self._most:  # further than any attempt that failed
                taken, since = now_taken, time.monotonic()
            if self._thread.is_alive() and time.monotonic() - since > timeout_s:
                what = f"{self._url} took nothing for {timeout_s:g} s" if patient else f"it took over {timeout_s:g} s"
                self._patient = False
                self._say(f"the last checkpoint is left incomplete: {what}; what was stored before is as it was")
                return False
        return not self._complaint

    def _run(self, persister: CheckpointWriter) -> None:
        wait_s = _LOOK_EVERY_S
        while True:
            self._wake.wait(wait_s)
            self._wake.clear()
            stopping = self._stopping  # what is stored from here on is all that there will be
            urgent, self._urgent = self._urgent, False
            stored = self._store(persister, urgent)
            if not stored:
                self._urgent = self._urgent or urgent
            if stopping and (stored or not self._patient):
                return
            wait_s = _LOOK_EVERY_S if stored or stopping else min(2 * wait_s, _RETRY_MOST_S)

    def _compare_pace(self, took_s: float) -> None:
        """Say when storing begins to take longer than the time between two states, and when that is over."""
        if self._slow == (took_s > self._interval_s):
            return
        self._slow = not self._slow
        if self._slow:
            self._say(
                f"storing a state takes {took_s:.0f} s, longer than --checkpoint-interval {self._interval_s:g}: of the "
                "states that come meanwhile the newest is stored next, the others are left out"
            )
        else:
            self._say("the storage keeps pace again")

    def _store(self, persister: CheckpointWriter, urgent: bool) -> bool:
        """Store what there is to store. Returns whether that worked; what did not is said once, not at each attempt."""
        self._attempt_at, began = persister.written_nbytes, time.monotonic()
        try:
            outcome = persister.write_newest(self._slots, marked=not urgent)
        except EDLError as exc:
            complaint = f"{exc}; what was stored before is as it was, and it is tried again"
        except Exception as exc:  # noqa: BLE001 - it would end the thread, and nothing more would be stored
            _log.exception("a checkpoint was not stored")
            complaint = f"a checkpoint was not stored, by a fault in EDL ({exc!r}); it is tried again"
        else:
            self._complaint = ""
            if outcome is not None and outcome.committed:
                self._say(f"stored the state after step {outcome.step} at {self._url}")
            if outcome is not None:
                self._compare_pace(time.monotonic() - began)
            self._most = 0
            return True
        self._most = max(self._most, persister.written_nbytes - self._attempt_at)
        if complaint != self._complaint:
            self._complaint = complaint
            self._say(complaint)
        return False
