"""Stores checkpoints from the slots of a node's workers in a folder that outlives the node.

A node's agent runs a `CheckpointPersister`; if there is no agent, the worker runs it. Every node writes the files of
its own ranks, and a node that finds the manifests of all ranks completes the checkpoint. A world that was given up must
not complete a checkpoint, so `fence` is called immediately before completion.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from concurrent.futures import wait
from functools import partial
from pathlib import Path
from typing import Any, Final

from edl.background import BackgroundLoop, start_call
from edl.backoff import Backoff
from edl.collective.checkpoint.encoding import from_json
from edl.collective.checkpoint.memory.replica_slots import NO_VERSION, newest_common_state
from edl.collective.checkpoint.memory.slots import (
    CompleteSlot,
    PinnedSlot,
    StateVersion,
    find_marked_slots,
    find_slots,
    marked_path,
    storing_path,
    unmark_slot,
)
from edl.collective.checkpoint.storage.folder import (
    MANIFEST,
    METADATA,
    CheckpointFolder,
    CheckpointName,
    FileDigest,
    Manifest,
    RankManifest,
)
from edl.errors import EDLError, ProtocolError, SettingsError, TemporaryError

logger = logging.getLogger(__name__)


_WRITERS = 4  # ranks of a node that are written at once: on a slow storage, more would delay the first to be complete


class _OverwrittenError(TemporaryError):
    """A slot was overwritten before its state was stored."""


class CheckpointWriter:
    """Writes a node's part of checkpoints to a URL. Only one thread may use it at a time.

    `run` returns the name of the run that the slots belong to; as long as that name is "", nothing is stored. `keep` is
    the number of complete checkpoints to keep. `fence` returns whether this node's world is still current.
    """

    def __init__(
        self, url: str, *, run: Callable[[], str], keep: int = 3, fence: Callable[[], bool] | None = None
    ) -> None:
        self._folder = CheckpointFolder(url)
        self._run = run
        self._keep = keep
        self._fence = fence or (lambda: True)
        self._done: StateVersion = NO_VERSION

    @property
    def written_nbytes(self) -> int:
        return self._folder.written_nbytes

    def check_storage(self) -> None:
        try:
            self._folder.check_writable()
        except OSError as exc:
            raise SettingsError(f"checkpoints cannot be stored at {self._folder.url}: {exc}") from exc

    def write_newest(self, slots: Sequence[Path], *, marked: bool = False) -> tuple[int, bool] | None:
        """Store the newest state that all of `slots` hold and that is not stored yet.

        With `marked`, only a state that workers marked for storage is stored. Returns the step, and whether the
        checkpoint is complete (True) or lacks other nodes' parts. Returns None if there was nothing to store, the run
        has no name, the fence refused the checkpoint, or a newer state has been marked.

        Raises:
            TemporaryError: The storage failed, there was too little memory, or the state was overwritten too soon.
        """
        found = newest_common_state([find_marked_slots(slot) if marked else find_slots(slot) for slot in slots])
        state = found[0].header.version if found else NO_VERSION
        if state <= self._done:
            if marked:
                self._remove_dead_marks(slots)
            return None
        run = self._run()
        if not run:
            return None
        generation, step, world = state
        name = CheckpointName(step, run, generation)
        try:
            self._store_slots(name, dict(zip(slots, found, strict=True)))
            committed = self._complete(name, world)
            self._done = state
            for prefix in slots:
                unmark_slot(prefix, state)
            if committed:
                self._remove_old(name)
        except _OverwrittenError as exc:
            if not marked:
                raise
            logger.warning("%s: the next state will be stored", exc)
            return None
        except OSError as exc:
            raise TemporaryError(f"storage {self._folder.url} did not accept step {step}: {exc}") from exc
        except MemoryError as exc:
            raise TemporaryError(f"not enough memory to store step {step}") from exc
        return None if committed is None else (step, committed)

    def _remove_dead_marks(self, slots: Sequence[Path]) -> None:
        """Unmark states that will not be stored: while a mark exists, workers mark no other state by themselves."""
        for prefix in slots:
            state = next((mark.header.version for mark in find_marked_slots(prefix)), NO_VERSION)
            given_up = state == NO_VERSION and marked_path(prefix).exists()
            stored = state <= self._done
            passed = any(_has_passed_by(other, state) for other in slots if other != prefix)
            if given_up or (state != NO_VERSION and (stored or passed)):
                unmark_slot(prefix, state)

    def _store_slots(self, name: CheckpointName, found: Mapping[Path, CompleteSlot]) -> None:
        """Write the parts that are not stored yet. All slots are pinned first: their workers continue training."""
        try:
            if self._folder.is_published(name):
                return  # by this agent's predecessor, or by other nodes that already have its part
            self._folder.make_checkpoint_folder(name)
            there = self._folder.list_files(name)
            wanted = {prefix: slot for prefix, slot in found.items() if not self._has_rank(name, slot, there)}
            pinned: list[PinnedSlot] = []
            for prefix, slot in wanted.items():
                copy = slot.pin_file(storing_path(prefix))
                if copy is None:
                    raise _overwritten(name)
                pinned.append(copy)
            self._write_together(name, pinned)
        finally:
            for prefix in found:
                storing_path(prefix).unlink(missing_ok=True)

    def _write_together(self, name: CheckpointName, copies: Sequence[PinnedSlot]) -> None:
        """Write several ranks' parts at a time. Raises the first error once the writes in progress have ended."""
        # Threads of an executor, which are no daemons, would keep the process from exiting while the storage hangs.
        for begin in range(0, len(copies), _WRITERS):
            some = copies[begin : begin + _WRITERS]
            calls = [start_call("edl-store", partial(self._write_rank, name, copy)) for copy in some]
            wait(calls)
            for call in calls:
                call.result()

    def _has_rank(self, name: CheckpointName, found: CompleteSlot, there: Collection[str]) -> bool:
        """Return whether a rank's part is among the files `there`: its data, and its manifest (written last)."""
        file = RankManifest.file_name(found.header.rank)
        try:
            piece = RankManifest.parse(self._folder.read_file(name, file)) if file in there else None
        except ProtocolError:
            return False
        return piece is not None and piece.file in there and (piece.run, piece.world) == (name.run, found.header.world)

    def _write_rank(self, name: CheckpointName, copy: PinnedSlot) -> None:
        from edl.collective.checkpoint.storage.dcp import write_rank_file  # here, as it imports torch

        rank, items = copy.header.rank, dict[str, Any]()
        file = f"__{rank}_0.distcp"
        summed = self._folder.write_file(name, file, lambda stream: items.update(write_rank_file(copy, stream)))
        if not copy.is_unchanged():
            raise _overwritten(name)
        piece = RankManifest(rank, copy.header.world, file, summed, **items, meta=from_json(copy.meta), run=name.run)
        self._folder.replace_file(name, RankManifest.file_name(rank), piece.pack())

    def _complete(self, name: CheckpointName, world: int) -> bool | None:
        """Complete the checkpoint if every rank's manifest exists. Returns None if the fence refuses or is unsure."""
        there = self._folder.list_files(name)
        if MANIFEST in there:
            return True
        if not all(RankManifest.file_name(rank) in there for rank in range(world)):
            return False
        try:
            manifest = self._make_manifest(name, world)
        except ProtocolError as exc:
            logger.info("not complete yet: %s", exc)  # another node is writing its manifest right now
            return False
        if not self._fence():
            logger.warning("the world of generation %d was given up: %s will not be completed", name.generation, name)
            return None
        self._folder.publish_checkpoint(name, manifest)
        return True

    def _make_manifest(self, name: CheckpointName, world: int) -> Manifest:
        from edl.collective.checkpoint.storage.dcp import pack_dcp_metadata

        files: dict[str, FileDigest] = {}
        pieces = []
        for rank in range(world):
            data = self._folder.read_file(name, RankManifest.file_name(rank))
            piece = RankManifest.parse(data)
            if (piece.run, piece.world) != (name.run, world):
                raise ProtocolError(
                    f"{name} contains a piece of another run, or of a world of {piece.world} ranks, not {world}"
                )
            pieces.append(piece)
            files[RankManifest.file_name(rank)] = FileDigest.of_bytes(data)
            files[piece.file] = piece.summed
        packed = pack_dcp_metadata(pieces)
        files[METADATA] = self._folder.replace_file(name, METADATA, packed)
        return Manifest(name.step, name.generation, world, files, name.run)

    def _remove_old(self, newest: CheckpointName) -> None:
        """Remove complete checkpoints beyond `keep`, and incomplete checkpoints older than `newest`."""
        complete = []
        names = self._folder.list_checkpoints()
        older = names[names.index(newest) :] if newest in names else []  # newer checkpoints are left alone
        for name in older:
            if self._is_complete(name):
                complete.append(name)
            elif name < newest and (name.run, name.generation) <= (newest.run, newest.generation):
                self._folder.remove_checkpoint(name)  # one of a later run is kept: another node may be writing it
        for name in complete[self._keep :]:
            self._folder.remove_checkpoint(name)

    def _is_complete(self, name: CheckpointName) -> bool:
        try:
            return self._folder.read_manifest(name) is not None
        except ProtocolError:
            return False


def _overwritten(name: CheckpointName) -> _OverwrittenError:
    return _OverwrittenError(f"the state after step {name.step} was overwritten before it was stored")


def _has_passed_by(prefix: Path, state: StateVersion) -> bool:
    """Return whether a worker has a state newer than `state` and has not marked `state`."""
    newer = any(found.header.version > state for found in find_slots(prefix))  # read first: marks follow states
    return newer and all(mark.header.version != state for mark in find_marked_slots(prefix))


POLL_S: Final = 0.5  # the wait of a marked state, as an agent's workers cannot wake it; a check reads a page per worker
_RETRY_FIRST_S: Final = 0.5  # most temporary refusals of a storage ("slow down") are over by then
_RETRY_LAST_S: Final = 30.0  # with longer ones, a storage that works again would stay unused for minutes
_CLOSE_RETRY_S: Final = 0.5  # at the end of a job, when a person or a scheduler is waiting
_WORKER_RETRY_S: Final = 30.0  # how long a worker without an agent retries when it ends: every rank waits this long
_CLOSE_POLL_S: Final = 0.1  # between two checks of `close` for progress
_CHECK_POLL_S: Final = 0.05  # between two calls of `raise_if_stopping`: a signal should seem to be handled at once


class CheckpointPersister:
    """Stores the states that workers mark for storage and, on request, the newest state even if it is unmarked.

    Nothing is stored before `start`, or if `url` is empty. If storing fails, `report` is called once with the failure,
    and storing is retried. `report` is also called when storing begins to take longer than `interval_s`, the time
    between two marked states, and when storing catches up. Without `run`, `set_run` sets the run's name. Every `poll_s`
    seconds, the thread looks for marked states even without a call of `wake`.
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
        """Start storing. By now, the slots must be empty or contain states from this job's run."""
        if self._writer is not None and self._loop is None:
            self._loop = BackgroundLoop("edl-storing", self._poll_and_store)

    def set_run(self, name: str) -> None:
        if self._run_name != name:
            self._run_name = name
            self.wake()

    def wake(self) -> None:
        if self._loop is not None:
            self._loop.wake()

    def store_newest(self) -> None:
        """Store the newest state in the background, marked or not. Call it when a worker died or the job has ended."""
        self._newest_requests += 1
        self.wake()

    def check_storage(self, timeout_s: float, raise_if_stopping: Callable[[], object]) -> None:
        """Check that the storage accepts a file. If there is no answer within `timeout_s` seconds, only report that."""
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
                self._report(f"{self._url} has not answered within {timeout_s:g} s: continuing, in case it does later")
            return

    def close(self, timeout_s: float, *, patient: bool = False, retry_s: float = 0.0) -> bool:
        """Store all requested and marked states. If this takes longer than `timeout_s` seconds, report it and give up.

        With `patient`, for the end of a job, whose last state is its result, any failure is retried, and the call gives
        up only after the storage has made no progress for `timeout_s` seconds. Otherwise, failures are retried for
        `retry_s` seconds. Returns whether everything is stored.
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
                what = f"{self._url} stalled for {timeout_s:g} s" if patient else f"it took over {timeout_s:g} s"
                self._late = f"not done within {timeout_s:.0f} s"
                self._report(f"the last checkpoint is left incomplete: {what}; earlier checkpoints are unchanged")
                return False
        return self._error is None

    def close_or_raise(self, timeout_s: float) -> None:
        """Store all marked states, retrying failures for half a minute. For a worker without an agent.

        Raises:
            TemporaryError: The last state is not stored. Earlier checkpoints are unchanged.
        """
        if not self.close(timeout_s, retry_s=min(timeout_s, _WORKER_RETRY_S)):
            why = ", ".join(filter(None, [self._late, str(self._error or "")]))
            what = f"the last state is not at {self._url}; earlier checkpoints are unchanged: {why}"
            raise TemporaryError(what) from self._error

    def _poll_and_store(self) -> float | None:
        """Store what is due. Returns the seconds until the next check, or None if nothing more will be stored."""
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
            error = RuntimeError(f"a checkpoint was not stored, because of a bug in EDL ({exc!r})")
            error.__cause__ = exc
        else:
            self._error = None
            self._most_nbytes = 0
            if outcome is not None:
                step, complete = outcome
                if complete:
                    self._report_stored(f"stored the state after step {step} at {self._url}")
                self._compare_pace(time.monotonic() - began_at)
            return True
        self._most_nbytes = max(self._most_nbytes, self._writer.written_nbytes - self._nbytes_before)
        is_new = str(error) != str(self._error or "")
        self._error = error
        if is_new:
            if not isinstance(error, EDLError):
                logger.error("a bug in EDL", exc_info=error.__cause__)
            self._report(f"{error}; earlier checkpoints are unchanged, and storing is retried")
        return False

    def _compare_pace(self, took_s: float) -> None:
        """Report when storing begins to take longer than the time between two states, and when it catches up."""
        if self._slow == (took_s > self._interval_s):
            return
        self._slow = not self._slow
        if self._slow:
            self._report(
                f"storing a state takes {took_s:.0f} s, longer than --checkpoint-interval {self._interval_s:g}: of the "
                "states saved meanwhile, the newest is stored next and the others are skipped"
            )
        else:
            self._report("the storage keeps pace again")
