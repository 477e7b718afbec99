"""Training that stays in its process when workers come and go: the fastest way to recover, which loses no step.

The survivors of a generation drop its broken process group and form the next, in which they agree on the step and
give their state to ranks that lack it. That works only where torch cooperates: where it does not, or takes too long,
the worker ends, and its agent forks another, which is the ordinary way to recover and needs nothing of this.

::

      a peer is lost, or the agent announces the next generation
        -> the group's connections are shut down, so that no rank waits in a collective any more (`sockets`)
        -> `train` ends with an exception; what the failed step changed is undone (`step_snapshot`)
        -> the worker waits for the agent's announcement (`control_pipe`), then for all ranks, in the new store
        -> a new process group, the same state on all ranks (`recovery_plan`, `transfer`), and `train` again
"""

from __future__ import annotations

import gc
import logging
import os
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from edl.collective.agent.health.failures import ExitCause, find_exit_cause
from edl.collective.agent.processes.redirection import redirect_output
from edl.collective.checkpoint.checkpointer import Checkpointer
from edl.collective.checkpoint.encoding import from_json, to_json
from edl.collective.checkpoint.memory import transfer
from edl.collective.checkpoint.state.state import State, WorldChange
from edl.collective.inprocess.control_pipe import ControlPipe
from edl.collective.inprocess.process_group import LEFT, AbortableProcessGroup, unsupported_reason
from edl.collective.inprocess.recovery_plan import RankState, plan_recovery
from edl.collective.inprocess.step_snapshot import StepSnapshot
from edl.collective.unwrapping import unwrapped
from edl.collective.worker_status import Phase, WorkerStatusPage
from edl.errors import SettingsError
from edl.settings import read

__all__ = ["Place", "run_in_process", "stay"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Place:
    """A worker's place in a generation.

    Attributes:
        rank: as `torch.distributed` has it.
        size: the number of ranks.
        local_rank: among the workers of this node.
        generation: grows by one with each change of the world.
        step: the last finished step, -1 for none: go on after it.
    """

    rank: int
    size: int
    local_rank: int
    generation: int
    step: int


def run_in_process(
    train: Callable[[Place], object],
    *,
    state: State,
    checkpointer: Checkpointer,
    backend: str = "gloo",
    timeout_s: float = 10.0,
    patience_s: float = 5.0,
    meeting_s: float = 600.0,
) -> None:
    """Call `train(place)` in each generation, in this same process, until it returns on every rank.

    `train` makes anew all that knows the process group, `DistributedDataParallel` first of all, goes on after
    `place.step`, and calls `checkpointer.save(step)` right after each update, before any other collective. It is left
    by an exception, so it keeps nothing of a generation elsewhere. The process group is made here.

    Outside `edl run` there is a single generation, and errors are raised as they come.

    Args:
        train: the training loop.
        state: of the job, with bare modules; the same on all ranks save for `local` fields.
        checkpointer: of `state`. If no survivor has a whole state, `restore` brings back what was saved.
        backend: of torch. With another than gloo workers are forked anew, as without `run_in_process`.
        timeout_s: of collectives, in seconds. A rank that keeps others waiting for longer counts as lost.
        patience_s: how long to wait, after contact was lost, for the agent to announce the next generation, in seconds.
        meeting_s: how long to wait for all ranks to come to a new generation, and at the end of the last, in seconds.

    Raises:
        SettingsError: the state or the arguments cannot be used so.
        Exception: what `train` raised, if it was not for a lost peer, or if no new generation followed.
    """
    if dist.is_initialized():
        raise SettingsError("run_in_process() makes the process group itself: remove init_process_group() before it")
    _check_state(state)
    _InProcessLoop(train, state, checkpointer, _Settings(backend, timeout_s, patience_s, meeting_s)).run()


stay = run_in_process
"""The former name of `run_in_process`, which stays valid."""


@dataclass(frozen=True)
class _Settings:
    backend: str
    timeout_s: float
    patience_s: float
    meeting_s: float


class _NextGeneration(BaseException):
    """Leaves `train` between two steps. No `Exception`, so that no handler of the user's takes it for an error."""


class _InProcessLoop:
    """A worker's training through its generations."""

    def __init__(
        self, train: Callable[[Place], object], state: State, checkpointer: Checkpointer, settings: _Settings
    ) -> None:
        self._train = train
        self._state = state
        self._checkpointer = checkpointer
        self._settings = settings
        self._status_page = WorkerStatusPage.from_env()
        self._snapshot = StepSnapshot(state)
        self._rank_state = RankState()
        self._group: AbortableProcessGroup | None = None
        self._control = ControlPipe.from_env(self._abort_group)

    def run(self) -> None:
        """Train until the end."""
        unsupported = unsupported_reason(self._settings.backend)
        self._checkpointer.set_step_hooks(self._finish_step, self._interrupt)
        try:
            with self._control:
                if unsupported:
                    logger.warning("%s: workers are forked anew instead of going on in process", unsupported)
                elif self._control.path is not None:
                    self._status_page.record_in_process()
                while (error := self._run_generation()) is not None:
                    self._wait_for_next(error)
        finally:
            self._checkpointer.set_step_hooks(_ignore, _ignore)
            self._snapshot.close()

    def _run_generation(self) -> BaseException | None:
        """Train in the present generation. Returns None when training is done, else the exception that ended it."""
        group = AbortableProcessGroup(
            read("RANK", int) or 0, read("WORLD_SIZE", int) or 1, self._settings.backend, self._settings.timeout_s
        )
        try:
            place = self._join_generation(group)
            self._checkpointer.finish_evaluations()
            self._train(place)
            if self._control.path is not None:
                # Should a rank be lost now, the last steps are not trained again.
                self._status_page.enter_phase(Phase.EXIT)
                group.wait_for_ranks("done", self._settings.meeting_s, self._interrupt)
        except (Exception, _NextGeneration) as exc:
            group.abort()  # others may wait for this rank
            if not self._recoverable(exc):
                raise
            return exc
        group.destroy()
        return None

    def _wait_for_next(self, error: BaseException) -> None:
        """Leave the last generation behind, and wait for the next.

        Raises:
            Exception: `error`, or another in its place, if there is no next generation.
        """
        began = time.monotonic()
        self._status_page.enter_phase(Phase.PAUSE)
        if not isinstance(error, _NextGeneration):
            logger.info("lost contact with another rank (%s)", type(error).__name__)
            logger.debug("what was raised", exc_info=error)
        _clear_frames(error)
        if self._group is not None:
            self._group.destroy()
        self._group = None
        gc.collect()  # a DistributedDataParallel lies in cycles, and as long as it lives it hooks into backward
        left = time.monotonic()
        environ = self._control.wait_for_environment(self._settings.patience_s)
        kept = any(type(found) is DistributedDataParallel for found in gc.get_objects())
        if environ is None or kept:
            what = f"no next generation within {self._settings.patience_s:g} s"
            if kept:
                what = "a DistributedDataParallel of the last generation is still there: keep it in train() only"
                logger.warning("%s; this worker makes way for a new one", what)
            raise ConnectionError(f"{LEFT}: {what}") if isinstance(error, _NextGeneration) else error
        os.environ.update(environ)
        redirect_output(environ)
        logger.info("left in %.3f s, told of the next generation %.3f s later", left - began, time.monotonic() - left)
        if not self._snapshot.rollback():
            self._rank_state = RankState()

    def _join_generation(self, group: AbortableProcessGroup) -> Place:
        """Form the present generation's group with the other ranks, and agree on a state. Returns this rank's place."""
        began = time.monotonic()
        generation = read("EDL_GENERATION", int) or 0
        if self._control.path is not None:
            # Before it connects: a store that answers late, and new workers that still start, are no reason for the
            # agent to replace this worker, which has let go of the last generation.
            self._status_page.join_generation(generation)
            group.connect_store(self._interrupt)
            group.wait_for_ranks("came", self._settings.meeting_s, self._interrupt)
        met = time.monotonic()
        group.track_sockets()
        self._group = group
        self._interrupt()  # now that the other thread can reach the group: see ControlPipe
        group.init_group()
        made = time.monotonic()
        step = self._share_state(generation, group)
        group.end_tracking()
        logger.info("met in %.3f s, group %.3f s, state %.3f s", met - began, made - met, time.monotonic() - made)
        return Place(group.rank, group.size, read("LOCAL_RANK", int) or 0, generation, step)

    def _share_state(self, generation: int, group: AbortableProcessGroup) -> int:
        """Bring the same state to all ranks. Returns the last finished step."""
        self._checkpointer.change_generation(generation)
        states = [from_json(data) for data in transfer.gather_bytes(to_json(asdict(self._rank_state)))]
        plan = plan_recovery([RankState(**state) for state in states])
        if plan is None or group.rank in plan.behind:  # should it fail half-way, what is here will be good for nothing
            self._snapshot.discard()
            self._rank_state = RankState()
        if plan is None:
            step = self._checkpointer.restore(evaluate=False)
        else:
            step = plan.step
            if plan.behind:
                self._status_page.enter_phase(Phase.LOAD)
                transfer.broadcast_state(self._state, plan.source)
            if plan.size != group.size:
                self._state.adjust(WorldChange(plan.size, group.size, step))
            self._status_page.enter_phase(Phase.TRAIN)
        self._snapshot.take()
        self._rank_state = RankState(step, generation, group.size, live=True)
        return step

    def _finish_step(self, step: int) -> None:
        """Take a snapshot of the state after a step."""
        self._snapshot.take()
        self._rank_state = replace(self._rank_state, step=step)

    def _interrupt(self) -> None:
        """Leave `train`, if the next generation is known."""
        if self._control.has_next_generation:
            raise _NextGeneration

    def _abort_group(self) -> None:
        """End waits in collectives, from the thread that reads what the agent writes."""
        if self._group is not None:
            self._group.abort()

    def _recoverable(self, exc: BaseException) -> bool:
        """Return whether another generation may follow."""
        if self._control.path is None:
            return False
        if isinstance(exc, _NextGeneration) or self._control.has_next_generation:
            return True
        texts = (f"{cause}\n{type(cause).__name__}: {cause}" for cause in _causes(exc))
        return any(find_exit_cause(1, text) is ExitCause.PEER_LOST for text in texts)


def _check_state(state: State) -> None:
    for name in sorted(state.per_rank()):
        raise SettingsError(
            f"field {name} of the State is each rank's own place in its data: a worker that is forked anew "
            "cannot be given the place of the lost one in process. Call init_process_group() and train without "
            "run_in_process(), or use ElasticSampler"
        )
    for name in state:
        value = getattr(state, name)
        if isinstance(value, DistributedDataParallel):
            raise SettingsError(
                f"field {name} of the State is wrapped in DistributedDataParallel, which belongs to one generation: "
                "give the State the bare module, and wrap it inside train()"
            )
        if isinstance(value, torch.nn.Module):
            tensors = [*unwrapped(value).parameters(), *unwrapped(value).buffers()]
            if any(type(tensor).__name__ == "DTensor" for tensor in tensors):
                raise SettingsError(
                    f"field {name} of the State is sharded: no survivor has all of it, so it cannot go on in process. "
                    "Call init_process_group() and train without run_in_process(): workers are then forked anew"
                )


def _causes(exc: BaseException) -> Iterator[BaseException]:
    """Yield an exception, and the exceptions that led to it."""
    seen: set[int] = set()
    following: BaseException | None = exc
    while following is not None and id(following) not in seen:
        yield following
        seen.add(id(following))
        following = following.__cause__ or following.__context__


def _clear_frames(exc: BaseException) -> None:
    """Let go of the local variables of the frames that an exception came through."""
    for cause in _causes(exc):
        traceback.clear_frames(cause.__traceback__)


def _ignore(*_: object) -> None:
    """Do nothing after a step."""
