"""Going on in the same process when workers come and go: the fastest way to recover, which loses no step.

The survivors of a generation drop its broken process group and form the next one, in which they agree on the step and
give their state to whoever lacks it. That works only where torch cooperates: whenever it does not, or takes too long,
the worker ends, and its agent forks another one, which is the ordinary way to recover and needs nothing of this.

::

      a peer is lost, or the agent tells of the next generation
        -> the group's connections are shut down, so that nobody waits in a collective any more (`sockets`)
        -> `train` ends with an exception; what the failed step changed is undone (`step_snapshot`)
        -> the agent's word is waited for (`control_pipe`), and all meet in the next generation's store
        -> a new process group, one state for all (`recovery_plan`, `transfer`), and `train` again
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
from edl.collective.inprocess import recovery_plan as regroup
from edl.collective.inprocess.control_pipe import Control
from edl.collective.inprocess.process_group import LEFT, BreakableGroup, doubt
from edl.collective.inprocess.step_snapshot import Boundary
from edl.collective.unwrapping import unwrapped
from edl.collective.worker_status import Phase, WorkerStatusPage
from edl.errors import SettingsError
from edl.settings import read

__all__ = ["Place", "stay"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Place:
    """A worker's place in a generation.

    Attributes:
        rank, size: as `torch.distributed` has them.
        local_rank: among the workers of this node.
        generation: grows by one with each change of the world.
        step: the last finished step, -1 for none: go on with the one after it.
    """

    rank: int
    size: int
    local_rank: int
    generation: int
    step: int


def stay(
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

    `train` makes anew whatever knows the process group, `DistributedDataParallel` first of all, goes on after
    `place.step`, and calls `checkpointer.save(step)` right after each update, before any other collective. It is left
    by an exception, so it keeps nothing of a generation elsewhere. The process group is made here.

    Outside `edl run` there is one generation, and errors are raised as they come.

    Args:
        train: the training loop.
        state: what the job is, with bare modules; every rank's is the same save for `local` fields.
        checkpointer: of `state`. If no survivor has a whole state, `restore` brings back what was saved.
        backend: of torch. With others than gloo workers are forked anew, as without `stay`.
        timeout_s: of collectives. A rank that keeps others waiting for longer counts as lost.
        patience_s: how long to wait, after contact was lost, for the agent to tell of the next generation.
        meeting_s: how long to wait for all ranks to come to a new generation, and at the end of the last.

    Raises:
        SettingsError: the state or the arguments cannot be used so.
        Exception: what `train` raised, if it was not for a lost peer, or if no new generation followed.
    """
    if dist.is_initialized():
        raise SettingsError("stay() makes the process group itself: remove init_process_group() before it")
    _check_state(state)
    _Stay(train, state, checkpointer, _Settings(backend, timeout_s, patience_s, meeting_s)).run()


@dataclass(frozen=True)
class _Settings:
    backend: str
    timeout_s: float
    patience_s: float
    meeting_s: float


class _Regroup(BaseException):
    """Leaves `train` between two steps. No `Exception`, so that no handler of the user's takes it for an error."""


class _Stay:
    """One worker, through its generations."""

    def __init__(
        self, train: Callable[[Place], object], state: State, checkpointer: Checkpointer, settings: _Settings
    ) -> None:
        self._train = train
        self._state = state
        self._checkpointer = checkpointer
        self._settings = settings
        self._status_page = WorkerStatusPage.from_env()
        self._boundary = Boundary(state)
        self._report = regroup.Report()
        self._group: BreakableGroup | None = None
        self._control = Control.from_env(self._shatter)

    def run(self) -> None:
        """Train until the end."""
        mistrust = doubt(self._settings.backend)
        self._checkpointer.set_step_hooks(self._finished, self._interrupt)
        try:
            with self._control:
                if mistrust:
                    _log.warning("%s: workers are forked anew instead of going on in process", mistrust)
                elif self._control.path is not None:
                    self._status_page.record_in_process()
                while (lost := self._generation()) is not None:
                    self._next(lost)
        finally:
            self._checkpointer.set_step_hooks(_nothing, _nothing)
            self._boundary.close()

    def _generation(self) -> BaseException | None:
        """Train in the present generation. Returns None when it is done, else what it was that ended it."""
        group = BreakableGroup(
            read("RANK", int) or 0, read("WORLD_SIZE", int) or 1, self._settings.backend, self._settings.timeout_s
        )
        try:
            place = self._form(group)
            self._checkpointer.finish_evaluations()
            self._train(place)
            if self._control.path is not None:
                # Should one be lost now, the last steps are not trained again.
                self._status_page.enter_phase(Phase.EXIT)
                group.meet("done", self._settings.meeting_s, self._interrupt)
        except (Exception, _Regroup) as exc:
            group.shatter()  # others may wait for this rank
            if not self._recoverable(exc):
                raise
            return exc
        group.drop()
        return None

    def _next(self, lost: BaseException) -> None:
        """Leave the last generation behind, and wait for the next one.

        Raises:
            Exception: `lost`, or one in its place, if there is no next one.
        """
        began = time.monotonic()
        self._status_page.enter_phase(Phase.PAUSE)
        if not isinstance(lost, _Regroup):
            _log.info("lost contact with another rank (%s)", type(lost).__name__)
            _log.debug("what was raised", exc_info=lost)
        _forget_frames(lost)
        if self._group is not None:
            self._group.drop()
        self._group = None
        gc.collect()  # a DistributedDataParallel lies in cycles, and as long as it lives it hooks into backward
        left = time.monotonic()
        environ = self._control.take(self._settings.patience_s)
        kept = any(type(one) is DistributedDataParallel for one in gc.get_objects())
        if environ is None or kept:
            what = f"no next generation within {self._settings.patience_s:g} s"
            if kept:
                what = "a DistributedDataParallel of the last generation is still there: keep it in train() only"
                _log.warning("%s; this worker makes way for a new one", what)
            raise ConnectionError(f"{LEFT}: {what}") if isinstance(lost, _Regroup) else lost
        os.environ.update(environ)
        redirect_output(environ)
        _log.info("left in %.3f s, told of the next generation %.3f s later", left - began, time.monotonic() - left)
        if not self._boundary.undo():
            self._report = regroup.Report()

    def _form(self, group: BreakableGroup) -> Place:
        """Be a member of the present generation, with the state that all agree on."""
        began = time.monotonic()
        generation = read("EDL_GENERATION", int) or 0
        if self._control.path is not None:
            # Before it connects: a store that answers late, and new workers that still start, are no reason for the
            # agent to replace this worker, which has let go of the last generation.
            self._status_page.join_generation(generation)
            group.connect(self._interrupt)
            group.meet("came", self._settings.meeting_s, self._interrupt)
        met = time.monotonic()
        group.prepare()
        self._group = group
        self._interrupt()  # now that the other thread can reach the group: see Control
        group.make()
        made = time.monotonic()
        step = self._agree(generation, group)
        group.done()
        _log.info("met in %.3f s, group %.3f s, state %.3f s", met - began, made - met, time.monotonic() - made)
        return Place(group.rank, group.size, read("LOCAL_RANK", int) or 0, generation, step)

    def _agree(self, generation: int, group: BreakableGroup) -> int:
        """Have one state on all ranks. Returns the last finished step."""
        self._checkpointer.change_generation(generation)
        said = [from_json(data) for data in transfer.gather_bytes(to_json(asdict(self._report)))]
        plan = regroup.plan([regroup.Report(**report) for report in said])
        if plan is None or group.rank in plan.behind:  # should it fail half-way, what is here will be good for nothing
            self._boundary.forget()
            self._report = regroup.Report()
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
        self._boundary.note()
        self._report = regroup.Report(step, generation, group.size, live=True)
        return step

    def _finished(self, step: int) -> None:
        """The checkpointer was told of a finished step."""
        self._boundary.note()
        self._report = replace(self._report, step=step)

    def _interrupt(self) -> None:
        """Leave, if the next generation is known."""
        if self._control.coming:
            raise _Regroup

    def _shatter(self) -> None:
        """From the thread that listens to the agent: whoever waits in a collective shall wait no more."""
        if self._group is not None:
            self._group.shatter()

    def _recoverable(self, exc: BaseException) -> bool:
        """Whether another generation may follow."""
        if self._control.path is None:
            return False
        if isinstance(exc, _Regroup) or self._control.coming:
            return True
        return any(
            find_exit_cause(1, f"{one}\n{type(one).__name__}: {one}") is ExitCause.CONTACT for one in _chain(exc)
        )


def _check_state(state: State) -> None:
    for name in sorted(state.per_rank()):
        raise SettingsError(
            f"field {name} of the State is each rank's own place in its data: a worker that is forked anew "
            "cannot be given the place of the lost one in process. Call init_process_group() and train without stay(), "
            "or use ElasticSampler"
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
                    "Call init_process_group() and train without stay(): workers are then forked anew"
                )


def _chain(exc: BaseException) -> Iterator[BaseException]:
    """An exception, and those that led to it."""
    seen: set[int] = set()
    following: BaseException | None = exc
    while following is not None and id(following) not in seen:
        yield following
        seen.add(id(following))
        following = following.__cause__ or following.__context__


def _forget_frames(exc: BaseException) -> None:
    """Let go of the local variables of the frames that an exception came through."""
    for one in _chain(exc):
        traceback.clear_frames(one.__traceback__)


def _nothing(*_: object) -> None:
    """Nobody attends."""
