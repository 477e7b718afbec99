"""Saves a job's state every few steps, in memory that outlives the worker, and restores it from there."""

from __future__ import annotations

import logging
import math
import os
import time
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Literal

from edl.collective.checkpoint.evaluator import Evaluator, agree_on_pending, share_result
from edl.collective.checkpoint.memory.copying import SlotWriter, finish_queued_work
from edl.collective.checkpoint.memory.replica_slots import ReplicaSlots
from edl.collective.checkpoint.memory.restore import restore_from_memory
from edl.collective.checkpoint.memory.slots import SlotHeader, SlotPair
from edl.collective.checkpoint.state.state import State, WorldChange
from edl.collective.checkpoint.storage.folder import absolute_url, new_run_id, run_name
from edl.collective.checkpoint.storage.reader import newest_stored, restore_from_storage
from edl.collective.checkpoint.storage.writer import CheckpointPersister
from edl.collective.ranks import Group, all_reduce_max, rank_of, world_of
from edl.collective.removed import describe_removal
from edl.collective.worker_status import Phase, WorkerStatusPage
from edl.errors import ClosedError, SettingsError, TemporaryError
from edl.settings import is_count, positive_float, positive_int, read

logger = logging.getLogger(__name__)


@dataclass
class SaveSchedule:
    """Decides when to save next. All ranks of a world must agree on `next_step`, or they save different steps."""

    overhead: float | None = None  # largest fraction of the time that saving may cost
    interval_s: float | None = None  # seconds between two saves
    interval_steps: int | None = None  # steps between two saves
    next_step: int | None = None  # step after which to save next; None to save after the next step that finishes
    _warm: bool = False

    def __post_init__(self) -> None:
        rates = [rate for rate in (self.overhead, self.interval_s, self.interval_steps) if rate is not None]
        if len(rates) != 1 or not 0 < rates[0] < math.inf:
            raise SettingsError(
                f"overhead={self.overhead}, interval_s={self.interval_s}, interval_steps={self.interval_steps}: "
                "give exactly one of them, above 0"
            )

    def is_due(self, step: int) -> bool:
        return self.next_step is None or step >= self.next_step

    def propose_steps(self, step_s: float, save_s: float) -> int:
        """Propose the number of steps to the next save. The first save's time is ignored: it also allocates memory."""
        if self.interval_steps is not None:
            return self.interval_steps
        if self.interval_s is not None:
            return _steps(self.interval_s / step_s if step_s > 0 else math.inf)
        assert self.overhead is not None
        if not self._warm:
            return 1
        return _steps(save_s * (1 - self.overhead) / (self.overhead * step_s) if step_s > 0 else 1)

    def set_next_save(self, step: int, steps: int) -> None:
        self._warm = True
        self.next_step = step + steps

    def restart(self) -> None:
        self.next_step = None
        self._warm = False


_MOST_STEPS = 1 << 30  # ranks agree on an int64, which has no infinity; no job has this many steps


def _steps(wanted: float) -> int:
    return max(1, math.ceil(min(wanted, _MOST_STEPS)))


NO_STEP: Final = -1  # what `Checkpointer.restore` returns if there is nothing to restore
OVERHEAD: Final = 0.01  # smaller than the differences between runs on different days
STORE_EVERY_S: Final = 300.0  # the most training time that is lost if all hosts fail at once
_PAUSE_S: Final = 60.0  # for the agent during a pause; longer than a new worker's imports take on a busy machine
AGENT_S: Final = 600.0  # an agent that was stopped by hand or swapped out responds within minutes
CLOSE_S: Final = 600.0  # for the last state: enough for tens of gigabytes on a slow storage
_POLL_S: Final = 0.005  # short next to a recovery, which takes some 100 ms
_UNATTENDED_S: Final = 1.0  # about the lease after which other nodes consider this one dead


class Checkpointer:
    """Save a `State` while it changes, and restore it after a restart.

    Every rank calls `save` after every step. When a save is due, `save` copies the state into shared memory, and takes
    only as long as that copy. The node's agent or a thread of this process writes that copy to storage, which never
    makes training wait. Under `edl run`, `save` also tells the agent of each step, and pauses when the agent asks for
    it.

    As a context manager, the `Checkpointer` also saves the state after the last step if the block ends without an
    error, because that state contains the finished model. It does not save that state if the block is left through
    `sys.exit`, which a signal handler may call in the middle of a step.

    Pass at most one of `overhead`, `interval_s` and `interval_steps`.

    Args:
        state: The state to save and restore.
        overhead: Largest fraction of the time that saving may cost (default 0.01).
        interval_s: Approximate seconds between two saves.
        interval_steps: Steps between two saves.
        storage: Folder or fsspec URL for stored checkpoints. Default: `EDL_CHECKPOINT`. If there is no agent to store
            checkpoints, a `with` block that ends without an error raises `TemporaryError` if its last state cannot be
            stored.
        storage_interval_s: Seconds between two stored states. Default: `EDL_CHECKPOINT_INTERVAL_S`, or else 300.
        keep: Number of checkpoints to keep in storage, if this process writes them itself.
        overlap: Removed; True raises `SettingsError`.
        agent_s: Seconds to wait for a silent agent before `save` raises `TemporaryError`.
        slots: Shared memory to save to. Default: the slots that `EDL_SLOTS` names, or else private ones.
        board: Page on which to report to the agent. Default: the page that `EDL_BOARD` names, or else none.
        group: Process group whose ranks together hold the state. Default: torch's default group, if there is one.

    Raises:
        SettingsError: The settings contradict each other.
    """

    def __init__(
        self,
        state: State,
        *,
        overhead: float | None = None,
        interval_s: float | None = None,
        interval_steps: int | None = None,
        storage: str | os.PathLike[str] | None = None,
        storage_interval_s: float | None = None,
        keep: int = 3,
        overlap: Literal[False] = False,
        agent_s: float = AGENT_S,
        slots: SlotPair | None = None,
        board: WorkerStatusPage | None = None,
        group: Group = None,
    ) -> None:
        if overlap:
            raise SettingsError(describe_removal("overlap"))
        if not is_count(keep):
            raise SettingsError(f"keep={keep!r}: the number of checkpoints to keep must be a whole number, such as 3")
        if overhead is None and interval_s is None and interval_steps is None:
            overhead = OVERHEAD
        self.state = state
        self.generation = read("EDL_GENERATION", int) or 0
        self._schedule = SaveSchedule(overhead, interval_s, interval_steps)
        self._slots = slots or SlotPair.from_env()
        self._status_page = board or WorkerStatusPage.from_env()
        self._group = group
        self._replica_slots = ReplicaSlots.from_env(self._slots.prefix)
        self._keep_next = False
        self._holders: frozenset[int] = frozenset()
        self._last: tuple[int, float] | None = None
        self._replay_until_step = NO_STEP
        self._step = NO_STEP
        self._saved = NO_STEP
        self._place: tuple[int, int] | None = None
        self._marked_for_storage = False
        self._training = False
        self._closed = False
        agents_storage = read("EDL_CHECKPOINT", absolute_url)
        if storage is not None and read("EDL_BOARD", str) is not None and absolute_url(storage) != agents_storage:
            where = agents_storage or "not set"
            raise SettingsError(
                f"storage={os.fspath(storage)!r}, but the agent's storage is {where}: use edl run --checkpoint"
            )
        self._storage = absolute_url(storage) if storage else agents_storage
        self._store_every_s = storage_interval_s or read("EDL_CHECKPOINT_INTERVAL_S", positive_float) or STORE_EVERY_S
        self._stored_at = time.monotonic()
        self._store_next = False
        self._agent_s = agent_s
        self._writer = SlotWriter()
        self._run = new_run_id()
        self._slots.remove_mark()
        self._persister: CheckpointPersister | None = None
        if self._storage is not None and read("EDL_BOARD", str) is None:  # otherwise the agent stores
            self._persister = CheckpointPersister(self._storage, [self._slots.prefix], logger.warning, keep=keep)
            self._persister.start()

    def restore(self, *, evaluate: bool = True) -> int:
        """Restore the newest state, from the memory of any rank or else from storage. Collective.

        If a different number of ranks saved the state, `restore` then calls the functions that were registered with
        `State.register_adjust_function`.

        Args:
            evaluate: Whether to then repeat evaluations that were in progress when the state was saved.

        Returns:
            The last step that was finished when the state was saved; -1 if there is nothing to restore.

        Raises:
            SettingsError: The saved state does not fit this state.
        """
        self._check_open()
        self.state.begin_restore()
        reached = self._status_page.read_status().step
        with self._status_page.in_phase(Phase.LOAD):
            restored = restore_from_memory(
                self.state,
                self._slots,
                self._group,
                replica_slots=self._replica_slots,
                stored=self._newest_stored,
                since=read("EDL_SINCE_GENERATION", int) or 0,
                hung_after=reached if read("EDL_AFTER_HANG", int) else None,
            )
            if restored is None and self._storage is not None:
                restored = restore_from_storage(self.state, self._storage, self._group)
        self._schedule.restart()
        self._last = None
        self._keep_next = False
        self._replay_until_step = reached
        step = NO_STEP if restored is None else restored.step
        self._step = self._saved = step
        self._training = step >= reached
        self._status_page.enter_phase(Phase.TRAIN if self._training else Phase.ROLLBACK)
        if restored is None:
            self._warn_if_lost(reached)
        else:
            logger.info("restored the state after step %d, saved by %d ranks", step, restored.world)
            if restored.world != world_of(self._group):
                self.state.adjust(WorldChange(restored.world, world_of(self._group), step))
        if evaluate:
            self.finish_evaluations()
        return step

    def _warn_if_lost(self, reached: int) -> None:
        """Warn that training starts over if earlier workers on this or another node had finished a step. Collective."""
        if self.generation == 0:
            return
        if world_of(self._group) > 1:
            (reached,) = all_reduce_max([reached], self._group)
        if reached >= 0 and rank_of(self._group) == 0:
            remedy = "a shorter --checkpoint-interval" if self._storage else "edl run --checkpoint URL"
            logger.warning(
                "the job had reached step %d, but no complete state is left in memory%s: training begins again. Shards "
                "are lost with a node unless a replica on another node (`edl status` shows its age) or the storage has "
                "them: use %s",
                *(reached, " or in storage" if self._storage else "", remedy),
            )

    def save(self, step: int, *, force: bool = False, samples: int = 0) -> bool:
        """Save the state after step `step` if a save is due. Every rank calls this after every step.

        Args:
            step: The step that is finished, counted from 0 over all epochs.
            force: Save now, and store the state too, however recent the last save was. If several saves are forced
                while a state is being stored, only the newest of them is stored next. A step is stored only once in a
                generation, so a state that has changed needs a later `step`.
            samples: Number of samples that this rank processed in this step, for reports of the throughput.

        Returns:
            Whether the state was saved.

        Raises:
            SettingsError: The step is below that of an earlier call or of the restored state, so a restart would
                mistake the older state for the newer one.
            TemporaryError: The node's agent was silent for `agent_s` seconds.
        """
        self._check_open()
        if step < self._step:
            raise SettingsError(
                f"save({step}) after step {self._step}: begin with the step after the one that restore() returned (0 "
                "at first), and keep counting over all epochs, even if the script returns to an earlier state"
            )
        self._drop_failed_evaluations(step)
        self._step = step
        self._status_page.finish_step(step, samples)
        if not self._training and step >= self._replay_until_step:
            self._training = True
            self._status_page.enter_phase(Phase.TRAIN)
        pausing = self._status_page.is_pause_requested(step)
        due = self._schedule.is_due(step)
        if due or force or pausing:
            finish_queued_work()
            place = world_of(self._group), rank_of(self._group)
            with self._status_page.in_phase(Phase.SAVE):
                wanted = self._storage is not None and (force or pausing or self._store_next)
                replica_slots = self._replica_slots if due and self._keep_next else None
                save_s = self._save(step, wanted, place, replica_slots)
            if due:  # on all ranks alike, even if not all of them have seen the request to pause yet
                self._plan_next(step, save_s)
        if pausing:
            self._pause(step)
        if self._status_page.agent_silence_s > _UNATTENDED_S:
            self._await_agent()
        return due or force or pausing

    def busy(self, what: str, limit_s: float) -> AbstractContextManager[None]:
        """Return a context manager for work that takes longer than a step; within it, no step is expected.

        Without this context, a worker that reports no step for `edl run --hang-after` seconds and shows no activity is
        considered to hang. Ranks that wait for this rank are not, whether or not they use this context themselves.

        Args:
            what: The work, in a word or two.
            limit_s: Longest time in seconds that the work may take before it counts as a hang after all.

        Raises:
            SettingsError: `limit_s` is not above 0.
        """
        if not limit_s > 0:
            raise SettingsError(f"busy({what!r}, limit_s={limit_s}): limit_s must be above 0 seconds")
        return self._status_page.in_busy_phase(what, limit_s)

    def evaluate(self, evaluator: Evaluator) -> Any:
        """Evaluate the state after the last finished step, unless the result is already known. Every rank calls this.

        Before the evaluation, the state is saved in memory with the fact that the evaluation is in progress; the result
        is saved afterwards. So if a restart happens in between, `restore` repeats the evaluation for the same state. If
        a result should change anything else, make that change in the evaluator's `on_result`.

        Args:
            evaluator: An evaluator that is a field of the `State`.

        Returns:
            The result, the same on every rank.

        Raises:
            SettingsError: The evaluator is not a field of the `State`, or its result cannot be saved.
        """
        self._check_open()
        if not any(evaluator is field for field in self._evaluators()):
            raise SettingsError(
                f"{evaluator.name}: the Evaluator is not a field of the State, so its results would be lost with the "
                "worker: create State(..., evaluator=evaluator)"
            )
        return self._evaluate(evaluator, self._step)

    def finish_evaluations(self) -> None:
        """Repeat the evaluations that were in progress when the current state was saved. Collective."""
        for evaluator in self._evaluators():
            agree_on_pending(evaluator, self._group)
            if evaluator.pending is not None:
                logger.info("%s after step %d was interrupted: repeating it", evaluator.name, evaluator.pending)
                self._evaluate(evaluator, evaluator.pending)

    def close(self) -> None:
        """Release everything without another save. Slots that belong to an agent stay; private slots are removed.

        Without an agent, this method first stores a state that is marked for storage, or warns if it cannot.
        """
        try:
            self._close_or_raise()
        except TemporaryError as exc:
            logger.warning("%s", exc)

    def _close_or_raise(self) -> None:
        if self._closed:
            return
        self._closed = True
        with ExitStack() as stack:  # closes each of them, even if another fails
            if self._replica_slots is not None:
                stack.callback(self._replica_slots.close)
            stack.callback(self._slots.close)
            if self._persister is not None:
                stack.callback(self._persister.close_or_raise, CLOSE_S)
            stack.callback(self._writer.close)

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        well = error is None or (isinstance(error, SystemExit) and error.code in (None, 0))
        if not well:
            self.close()
            return
        try:
            # sys.exit may be called in the middle of a step, for example from a signal handler: do not save then.
            lacking = self._step != self._saved or not self._marked_for_storage
            if error is None and not self._closed and self._place is not None and lacking:
                with self._status_page.in_phase(Phase.SAVE):
                    self._save(self._step, self._storage is not None, self._place)
        except BaseException:
            self.close()
            raise
        self._close_or_raise()  # a script that succeeds has its result in storage, with or without an agent

    def _evaluators(self) -> list[Evaluator]:
        """Return the evaluators among the fields of the state, in the same order on all ranks."""
        fields = (getattr(self.state, name) for name in self.state)
        return [field for field in fields if isinstance(field, Evaluator)]

    def _evaluate(self, evaluator: Evaluator, step: int) -> Any:
        if step in evaluator.results:
            return evaluator.results[step]
        began_at = time.monotonic()
        evaluator.pending = step
        self._save_again(step)
        with self._status_page.in_busy_phase(evaluator.name, evaluator.limit_s):
            # A rank that is lost before saving the result takes another rank's and draws nothing, so no rank may draw.
            with self.state.keep_random_numbers():
                result = share_result(evaluator, evaluator.function(), self._group)
            evaluator.record(step, result)
        self._save_again(step)
        if self._last is not None:  # evaluations are not part of a step, whose length decides when to save
            self._last = self._last[0], self._last[1] + time.monotonic() - began_at
        return result

    def _save_again(self, step: int) -> None:
        """Save again a state that has changed since its step was finished."""
        if step < 0:
            return
        with self._status_page.in_phase(Phase.SAVE):
            self._save(step, False, (world_of(self._group), rank_of(self._group)))

    def _drop_failed_evaluations(self, step: int) -> None:
        """Drop evaluations that began but never ended because the script caught their errors and continued."""
        for evaluator in self._evaluators():
            if evaluator.pending is not None and evaluator.pending < step:
                logger.warning("%s after step %d failed and is skipped", evaluator.name, evaluator.pending)
                evaluator.pending = None

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this Checkpointer is closed")

    def _newest_stored(self) -> tuple[int, int]:
        """Return generation and step of this run's newest stored state, or (-1, -1) if there is none. Collective."""
        if self._storage is None:
            return NO_STEP, NO_STEP
        return newest_stored(self._storage, self._group, run=read("EDL_RUN", str) or "")

    def _save(
        self, step: int, persist: bool, place: tuple[int, int], replica_slots: ReplicaSlots | None = None
    ) -> float:
        """Copy the state after `step` into the older of two slots. Returns the seconds that training waited.

        `place` is (number of ranks, this rank); without a process group, at the end of a job, that of the last save.
        """
        begin = time.perf_counter()
        header = SlotHeader(self.generation, step, *place, persist=persist)
        if replica_slots is not None:
            replica_slots.free_oldest_slot()
        try:
            self._holders = self._writer.write_state(self.state, self._slots, header)
        except SettingsError as exc:
            if self._replica_slots is None or not self._replica_slots.stop_keeping():
                raise
            logger.warning("from now on, no rank keeps replicas of the state: %s", exc)
            self._holders = self._writer.write_state(self.state, self._slots, header)
        saved = self._slots.newest_slot() if replica_slots is not None else None
        if replica_slots is not None and saved is not None:
            replica_slots.keep_slot(saved)
        if persist and self._persister is not None:
            self._persister.wake()
        self._saved = step
        self._place = place
        self._marked_for_storage = persist or self._storage is None
        return time.perf_counter() - begin

    def _plan_next(self, step: int, save_s: float) -> None:
        """Agree with the other ranks on the next save, and on whether to store the state or keep it for a replica."""
        now = time.monotonic()
        step_s = 0.0
        first = self._last is None
        if self._last is not None and step > self._last[0]:
            step_s = max(0.0, now - self._last[1] - save_s) / (step - self._last[0])
        self._last = (step, now)
        steps = self._schedule.propose_steps(step_s, save_s)
        store = self._storage is not None and now + steps * step_s - self._stored_at >= self._store_every_s
        keep = not first and self._replica_slots is not None and self._replica_slots.is_state_requested()
        alone = self._holds_shards_alone()
        # If one node's storage is slower than the interval, all nodes wait for it, or each would store different steps.
        busy = self._slots.has_marked_slot
        if world_of(self._group) > 1:
            values = [steps, int(store), int(not keep), self._run, int(save_s * 1e6), int(busy), int(alone)]
            with self._status_page.in_phase(Phase.AGREE):
                agreed = all_reduce_max(values, self._group)
                steps, stored, kept_not, self._run, longest_us, waiting, any_alone = agreed
                # Only the extra time of another rank's copy counts as saving; the rest is waiting for a late rank.
                self._status_page.reassign_time(Phase.SAVE, longest_us / 1e6 - save_s)
            store, keep, busy, alone = bool(stored), not kept_not, bool(waiting), bool(any_alone)
        store = store and not busy
        self._schedule.set_next_save(step, steps)
        self._store_next = store
        self._keep_next = keep and alone
        if self._persister is not None:
            self._persister.set_run(run_name(self._run))
        if store:
            self._stored_at = now

    def _holds_shards_alone(self) -> bool:
        """Return whether this rank has shards that no other node is known to have: losing this node would lose them."""
        rank, local_rank = read("RANK", int), read("LOCAL_RANK", int)
        count = read("LOCAL_WORLD_SIZE", positive_int)
        if rank is None or local_rank is None or count is None or self._group is not None:
            return bool(self._holders)
        first = rank - local_rank
        return bool(self._holders) and self._holders <= set(range(first, first + count))

    def _pause(self, step: int) -> None:
        """Wait until the agent stops this worker or withdraws its request, for a limited time."""
        self._status_page.record_pause(step)
        deadline = time.monotonic() + _PAUSE_S
        while self._status_page.is_pause_requested(step):
            if time.monotonic() > deadline:
                logger.warning("paused after step %d for %.0f s, and the agent did nothing: continuing", step, _PAUSE_S)
                break
            time.sleep(_POLL_S)
        self._status_page.record_resume()

    def _await_agent(self) -> None:
        """Wait for a silent agent, at most `agent_s` seconds: other nodes may have replaced this node."""
        logger.warning(
            "the agent of this node has been silent for %.1f s: waiting for it", self._status_page.agent_silence_s
        )
        with self._status_page.in_phase(Phase.PAUSE):
            deadline = time.monotonic() + self._agent_s
            while self._status_page.agent_silence_s > _UNATTENDED_S:
                if time.monotonic() > deadline:
                    # An agent that responds again recognizes this message, and does not count it as the script's error.
                    what = f"the agent of this node was silent for {self._status_page.agent_silence_s:.0f} s"
                    raise TemporaryError(f"EDL: left the process group: {what}")
                time.sleep(_POLL_S)
