"""Going on in the same process when workers come and go: the fastest way to recover, which loses no step.

The survivors of a generation drop its broken process group and form the next one, in which they agree on the step and
give their state to whoever lacks it. That works only where torch cooperates: whenever it does not, or takes too long,
the worker ends, and its agent forks another one, which is the ordinary way to recover and needs nothing of this.

::

      a peer is lost, or the agent tells of the next generation
        -> the group's connections are shut down, so that nobody waits in a collective any more (`sockets`)
        -> `train` ends with an exception; what the failed step changed is undone (`boundary`)
        -> the agent's word is waited for (`control`), and all meet in the next generation's store
        -> a new process group, one state for all (`regroup`, `transfer`), and `train` again
"""

from __future__ import annotations

import gc
import logging
import os
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from edl.collective import regroup, transfer
from edl.collective.board import Board, Phase
from edl.collective.boundary import Boundary
from edl.collective.checkpoint import Checkpointer
from edl.collective.control import Control
from edl.collective.encoding import from_json, to_json
from edl.collective.failures import Kind, kind_of
from edl.collective.sockets import GroupSockets
from edl.collective.state import State, WorldChange
from edl.collective.state_fields import unwrapped
from edl.errors import EDLError, SettingsError
from edl.settings import read

__all__ = ["Place", "stay"]

_log = logging.getLogger(__name__)

_TESTED: Final = ((2, 13), (3, 0))
"""Versions of torch, from the first until before the second, whose broken groups were seen to let go."""
_POLL_S: Final = 0.005


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
        backend: gloo; others are accepted, see `docs/recovery.md`.
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
        self._board = Board.from_env()
        self._boundary = Boundary(state)
        self._report = regroup.Report()
        self._sockets: GroupSockets | None = None
        self._store: Store | None = None
        self._control = Control.from_env(self._wake)

    def run(self) -> None:
        untested = _untested(self._settings.backend)
        self._checkpointer.attend(self._finished, self._interrupt)
        try:
            with self._control:
                if untested:
                    _log.warning("%s: workers will be forked anew instead of going on in process", untested)
                elif self._control.path is not None:
                    self._board.stay()
                while (lost := self._generation()) is not None:
                    self._next(lost)
        finally:
            self._checkpointer.attend(_nothing, _nothing)
            self._boundary.close()

    def _generation(self) -> BaseException | None:
        """Train in the present generation. Returns None when it is done, else what it was that ended it."""
        try:
            place = self._form()
            self._train(place)
            self._part(place)
        except (Exception, _Regroup) as exc:
            self._break()  # others may wait for this rank in a collective
            if not self._recoverable(exc):
                raise
            return exc
        dist.destroy_process_group()
        return None

    def _next(self, lost: BaseException) -> None:
        """Leave the last generation behind, and wait for the next one.

        Raises:
            BaseException: `lost`, if there is no next one.
        """
        began = time.monotonic()
        self._board.enter(Phase.PAUSE)
        if not isinstance(lost, _Regroup):
            _log.info("rank %s lost contact: %s", os.environ.get("RANK"), str(lost).split("\n", 1)[0])
        _forget_frames(lost)
        if dist.is_initialized():
            dist.destroy_process_group()
        self._store = None
        gc.collect()  # a DistributedDataParallel lies in cycles, and as long as it lives it hooks into backward
        left = time.monotonic()
        environ = self._control.take(self._settings.patience_s)
        if environ is None:
            raise lost
        os.environ.update(environ)
        told = time.monotonic()
        _log.info(
            "generation %s: left in %.3f s, told after %.3f s", environ["EDL_GENERATION"], left - began, told - left
        )
        if not self._boundary.undo():
            self._report = regroup.Report()

    # --- Forming a generation. ---

    def _form(self) -> Place:
        rank, size = read("RANK", int) or 0, read("WORLD_SIZE", int) or 1
        generation = read("EDL_GENERATION", int) or 0
        timeout = timedelta(seconds=self._settings.timeout_s)
        self._sockets = GroupSockets()
        self._interrupt()  # after the sockets can be reached: see Control
        began = time.monotonic()
        if self._control.path is not None:
            self._store = _agents_store(timeout)
            self._board.form(generation)
            self._meet("came", rank, size)
        met = time.monotonic()
        _make_group(self._settings.backend, self._store, rank, size, timeout)
        self._sockets.done()
        made = time.monotonic()
        step = self._agree(generation, rank, size)
        agreed = time.monotonic()
        _log.info("all came in %.3f s, group %.3f s, state %.3f s", met - began, made - met, agreed - made)
        return Place(rank, size, read("LOCAL_RANK", int) or 0, generation, step)

    def _agree(self, generation: int, rank: int, size: int) -> int:
        """Have one state on all ranks. Returns the last finished step."""
        self._checkpointer.renew(generation)
        said = [from_json(data) for data in transfer.gather_bytes(to_json(asdict(self._report)))]
        reports = [regroup.Report(**report) for report in said]
        plan = regroup.plan(reports)
        if plan is None or rank in plan.behind:  # should it fail half-way, what is here will be good for nothing
            self._boundary.forget()
            self._report = regroup.Report()
        if plan is None:
            step = self._checkpointer.restore()
        else:
            step = plan.step
            if plan.behind:
                self._board.enter(Phase.LOAD)
                transfer.broadcast_state(self._state, plan.source)
            if plan.size != size:
                self._state.adjust(WorldChange(plan.size, size, step))
            self._board.enter(Phase.TRAIN)
        self._boundary.note()
        self._report = regroup.Report(step, generation, size, live=True)
        return step

    def _meet(self, where: str, rank: int, size: int) -> None:
        """Wait until all ranks are here.

        Raises:
            EDLError: some did not come in time.
        """
        assert self._store is not None
        self._store.set(f"{where}/{rank}", "")
        keys = [f"{where}/{each}" for each in range(size)]
        deadline = time.monotonic() + self._settings.meeting_s
        while not self._store.check(keys):
            self._interrupt()
            if time.monotonic() > deadline:
                lacking = [each for each in range(size) if not self._store.check([f"{where}/{each}"])]
                raise EDLError(f"ranks {lacking} have not come within {self._settings.meeting_s:g} s")
            time.sleep(_POLL_S)

    def _part(self, place: Place) -> None:
        """Wait for the others to finish as well: should one be lost now, the last steps are not trained again."""
        if self._control.path is not None:
            self._meet("done", place.rank, place.size)

    # --- What happens while it trains. ---

    def _finished(self, step: int) -> None:
        """The checkpointer was told of a finished step."""
        self._boundary.note()
        self._report = regroup.Report(step, self._report.generation, self._report.size, live=True)

    def _interrupt(self) -> None:
        """Leave, if the next generation is known."""
        if self._control.coming:
            raise _Regroup

    def _wake(self) -> None:
        """From the thread that listens to the agent: whoever waits in a collective shall wait no more."""
        self._break()

    def _break(self) -> None:
        sockets = self._sockets
        if sockets is not None:
            sockets.shut_down()

    def _recoverable(self, exc: BaseException) -> bool:
        """Whether another generation may follow."""
        if self._control.path is None:
            return False
        if isinstance(exc, _Regroup) or self._control.coming:
            return True
        return any(kind_of(1, f"{one}\n{type(one).__name__}: {one}") is Kind.CONTACT for one in _chain(exc))


def _make_group(backend: str, store: Store | None, rank: int, size: int, timeout: timedelta) -> None:
    if store is not None:
        store = PrefixStore("group", store)
    elif read("RANK", int) is None:  # plain `python train.py`
        store = HashStore()
    if store is None:
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)


def _agents_store(timeout: timedelta) -> Store:
    """The store that the agent of the first node holds for this generation alone."""
    address, port = read("MASTER_ADDR", str), read("MASTER_PORT", int)
    if address is None or port is None:
        raise SettingsError("MASTER_ADDR and MASTER_PORT are not set: start this program with `edl run`")
    return TCPStore(address, port, is_master=False, timeout=timeout)


def _check_state(state: State) -> None:
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


def _untested(backend: str) -> str:
    """Why this torch or backend is not trusted to let go of a broken group; empty if it is."""
    first, end = _TESTED
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if not first <= version < end:
        return f"torch {torch.__version__} is not among the versions {first[0]}.{first[1]} to <{end[0]}.{end[1]}"
    return "" if backend == "gloo" else f"backend {backend} is not gloo"


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
