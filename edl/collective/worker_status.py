"""The status page: shared memory through which a worker and its node's agent tell each other how they are.

Every field has a single writer. A worker writes which phase it is in and how far it got. Its agent can read that at any
time, even after the worker was killed or while it hangs. The agent writes its requests to the worker: to pause at a
step. Nothing is sent, so nothing can be lost or block. Times are readings of `time.monotonic()`, which all processes of
a host share on Linux.

Without an agent (`WorkerStatusPage.from_env` outside `edl run`) the page is private memory and requests nothing.
"""

from __future__ import annotations

import enum
import mmap
import os
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from edl.errors import ProtocolError
from edl.settings import read

_SIZE: Final = 4096  # a page of memory, the smallest mapping
_MAGIC: Final = b"EDLBRD03"
_RECENT: Final = 64  # durations kept: enough for a median, and they fill the page up to _BUSY_WITH
_NEVER: Final = -1  # no generation or step yet: both start at 0

# Field numbers. Each field is eight bytes at a multiple of eight, so that a reader never sees half of a field. An agent
# reads pages of workers of the same version only; a change of these numbers is a change of the format.
_GENERATION, _PHASE, _SINCE, _STEP, _STEP_AT, _PAUSED, _SAMPLES, _FINISHED = range(1, 9)
_PAUSE_AT, _BEAT_AT, _BUSY_LIMIT = 16, 17, 18  # apart, to leave room for more fields of the worker
_TOTALS, _DURATIONS, _BUSY_WITH = 24, 64, 128  # where arrays begin: a number per phase, _RECENT durations, a text
_BUSY_WITH_BYTES = 64  # more than a log line has room for; a multiple of a field's size


class Phase(enum.IntEnum):
    """The phases of a worker's time; it is in exactly one of them at any time."""

    START = 0
    """From the fork to the first step or load: imports, process group, model."""
    LOAD = 1
    TRAIN = 2
    SAVE = 3
    ROLLBACK = 4
    """Repeating steps that had been finished before but whose state was lost."""
    PAUSE = 5
    """Stopped between two steps so that other nodes can join or leave."""
    EXIT = 6
    AGREE = 7
    """Waiting to agree with other ranks on the next save: the cost of a rank that is slow or hangs."""
    BUSY = 8
    """Something between two steps that the script announced with its own time limit, such as an evaluation."""


@dataclass(frozen=True)
class WorkerStatus:
    """A reading of a worker's status page."""

    generation: int  # generation of the world that the worker belongs to; -1 before it began
    phase: Phase  # the current phase
    phase_since: float  # when the current phase began, by `time.monotonic()`
    totals_s: dict[Phase, float]  # seconds spent in every phase until now, over all workers that wrote to this page
    step: int  # the last finished step; -1 for none
    step_at: float  # when that step was finished, by `time.monotonic()`
    paused: int  # the step after which the worker paused; -1 if it is not paused
    samples: int  # number of samples that this rank processed, over all workers that wrote to this page
    durations_s: tuple[float, ...]  # seconds that recent steps took, in no particular order
    # Number of steps finished, over all workers that wrote to this page; a step done again counts again
    finished: int = 0
    # What the worker does in phase BUSY, in the script's words; in other phases, the last such description
    busy_with: str = ""
    busy_limit_s: float = 0.0  # how long that may take, in seconds


class WorkerStatusPage:
    """A worker's status page. The agent calls `create`, the worker `from_env`."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory

    @classmethod
    def create(cls, path: Path) -> WorkerStatusPage:
        """Make a new, empty page in a file at `path`, which must be in memory (`/dev/shm`)."""
        path.write_bytes(bytes(_SIZE))
        page = cls._map(path)
        page._clear()
        page._memory[: len(_MAGIC)] = _MAGIC
        return page

    @classmethod
    def open(cls, path: Path) -> WorkerStatusPage:
        """Open the page that an agent created."""
        page = cls._map(path)
        if page._memory[: len(_MAGIC)] != _MAGIC:
            raise ProtocolError(f"{path} is not a status page of this version of EDL")
        return page

    @classmethod
    def from_env(cls) -> WorkerStatusPage:
        """Open the page that `EDL_BOARD` names, or private memory without an agent."""
        path = read("EDL_BOARD", Path)
        if path is not None:
            return cls.open(path)
        page = cls(mmap.mmap(-1, _SIZE))
        page._clear()
        return page

    # --- The worker's side. ---

    def record_worker_start(self, generation: int) -> None:
        """Record that a worker starts. The time until now counts as the last worker's phase."""
        self._set(_PAUSED, _NEVER)
        self.enter_phase(Phase.START)
        self._set(_GENERATION, generation)

    def enter_phase(self, phase: Phase) -> Phase:
        """Switch to a phase, and return the previous one."""
        now = time.monotonic()
        before = Phase(self._get(_PHASE))
        total = _TOTALS + before
        self._set_time(total, self._get_time(total) + now - self._get_time(_SINCE))
        self._set_time(_SINCE, now)
        self._set(_PHASE, phase)
        return before

    @contextmanager
    def in_phase(self, phase: Phase) -> Iterator[None]:
        """Switch to a phase for the block, then back to the previous one."""
        before = self.enter_phase(phase)
        try:
            yield
        finally:
            self.enter_phase(before)

    @contextmanager
    def in_busy_phase(self, what: str, limit_s: float) -> Iterator[None]:
        """Switch to phase BUSY for the block, then back to the previous phase."""
        text = what.encode()[:_BUSY_WITH_BYTES].ljust(_BUSY_WITH_BYTES, b"\0")
        begin, before = _BUSY_WITH * 8, self._busy()
        self._memory[begin : begin + _BUSY_WITH_BYTES] = text
        self._set_time(_BUSY_LIMIT, limit_s)
        try:
            with self.in_phase(Phase.BUSY):
                yield
        finally:  # restores what an enclosing block announced
            self._memory[begin : begin + _BUSY_WITH_BYTES] = before[0]
            self._set_time(_BUSY_LIMIT, before[1])

    def _busy(self) -> tuple[bytes, float]:
        begin = _BUSY_WITH * 8
        return bytes(self._memory[begin : begin + _BUSY_WITH_BYTES]), self._get_time(_BUSY_LIMIT)

    def reassign_time(self, phase: Phase, seconds: float) -> None:
        """Count the first `seconds` of the current phase, or all of it if it is shorter, towards another phase."""
        since, total = self._get_time(_SINCE), _TOTALS + phase
        seconds = min(max(seconds, 0.0), time.monotonic() - since)
        self._set_time(_SINCE, since + seconds)
        self._set_time(total, self._get_time(total) + seconds)

    def finish_step(self, step: int, samples: int = 0) -> None:
        """Record a finished step."""
        now = time.monotonic()
        finished = self._get(_FINISHED)
        if finished and step == self._get(_STEP) + 1:
            self._set_time(_DURATIONS + finished % _RECENT, now - self._get_time(_STEP_AT))
        self._set(_FINISHED, finished + 1)
        self._set_time(_STEP_AT, now)
        self._set(_SAMPLES, self._get(_SAMPLES) + samples)
        self._set(_STEP, step)

    def is_pause_requested(self, step: int) -> bool:
        """Return whether the agent requested a pause after this step or an earlier one."""
        return 0 <= self._get(_PAUSE_AT) <= step

    def record_pause(self, step: int) -> None:
        """Record that this worker saved its state and paused. It then waits to be stopped."""
        self.enter_phase(Phase.PAUSE)
        self._set(_PAUSED, step)

    def record_resume(self) -> None:
        """Record that training continues because the agent withdrew its request to pause."""
        self._set(_PAUSED, _NEVER)
        self.enter_phase(Phase.TRAIN)

    @property
    def agent_silence_s(self) -> float:
        """Seconds since the agent's last heartbeat; 0 without an agent.

        A stopped agent may have lost its lease, and other nodes may train in its place. A worker that waits does no
        harm.
        """
        beat_at = self._get_time(_BEAT_AT)
        return max(0.0, time.monotonic() - beat_at) if beat_at else 0.0

    # --- The agent's side. ---

    def record_agent_heartbeat(self, at: float) -> None:
        """Tell the worker that its agent was alive at a moment (`time.monotonic()`).

        It must not be later than the agent's newest information about its place in the job.
        """
        self._set_time(_BEAT_AT, at)

    def request_pause(self, step: int | None) -> None:
        """Ask the worker to save and pause after a step; None withdraws the request."""
        self._set(_PAUSE_AT, _NEVER if step is None else step)

    def read_status(self) -> WorkerStatus:
        """Read what the worker wrote, counting its current phase until now."""
        now = time.monotonic()
        phase = Phase(self._get(_PHASE))
        since = self._get_time(_SINCE)
        totals = {kind: self._get_time(_TOTALS + kind) for kind in Phase}
        totals[phase] += max(0.0, now - since)
        busy_with, busy_limit_s = self._busy()
        durations = tuple(self._get_time(_DURATIONS + slot) for slot in range(_RECENT))
        return WorkerStatus(
            generation=self._get(_GENERATION),
            phase=phase,
            phase_since=since,
            totals_s=totals,
            step=self._get(_STEP),
            step_at=self._get_time(_STEP_AT),
            paused=self._get(_PAUSED),
            samples=self._get(_SAMPLES),
            durations_s=tuple(seconds for seconds in durations if seconds > 0),
            finished=self._get(_FINISHED),
            busy_with=busy_with.rstrip(b"\0").decode(errors="replace"),
            busy_limit_s=busy_limit_s,
        )

    def close(self) -> None:
        """Unmap the page. The file stays; its creator removes it."""
        self._memory.close()

    @classmethod
    def _map(cls, path: Path) -> WorkerStatusPage:
        with path.open("r+b") as file:
            if os.fstat(file.fileno()).st_size < _SIZE:
                raise ProtocolError(f"{path} is too short for a status page")
            return cls(mmap.mmap(file.fileno(), _SIZE))

    def _clear(self) -> None:
        for field in (_GENERATION, _STEP, _PAUSED, _PAUSE_AT):
            self._set(field, _NEVER)
        self._set_time(_SINCE, time.monotonic())

    def _get(self, field: int) -> int:
        value: int = struct.unpack_from("<q", self._memory, field * 8)[0]
        return value

    def _set(self, field: int, value: int) -> None:
        struct.pack_into("<q", self._memory, field * 8, value)

    def _get_time(self, field: int) -> float:
        value: float = struct.unpack_from("<d", self._memory, field * 8)[0]
        return value

    def _set_time(self, field: int, value: float) -> None:
        struct.pack_into("<d", self._memory, field * 8, value)
