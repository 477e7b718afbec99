"""The status page: shared memory through which a worker and its node's agent report their status to each other.

Every field has a single writer. At any time, the agent can read what a worker wrote, even after the worker was killed
or while it hangs. Nothing is sent, so nothing can be lost or block. Times are readings of `time.monotonic()`, which all
processes of a host share on Linux. Without an agent, the page is private memory, and it contains no requests.
"""

from __future__ import annotations

import ctypes
import enum
import mmap
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from edl.errors import ProtocolError
from edl.settings import read

_SIZE: Final = 4096  # a page of memory, the smallest mapping
_MAGIC: Final = b"EDLBRD04"
_RECENT: Final = 64  # durations kept: enough for a median
_NEVER: Final = -1  # no generation or step yet: both start at 0
_BUSY_WITH_NBYTES: Final = 64  # more than a log line has room for


class Phase(enum.IntEnum):
    """The phases of a worker's time. A worker is in exactly one phase at any time."""

    START = 0  # from the fork to the first step or load: imports, process group, model
    LOAD = 1
    TRAIN = 2
    SAVE = 3
    ROLLBACK = 4  # repeating steps that had been finished before but whose state was lost
    PAUSE = 5  # stopped between two steps so that other nodes can join or leave
    EXIT = 6
    AGREE = 7  # waiting to agree with other ranks on the next save: the cost of a rank that is slow or hangs
    BUSY = 8  # something between two steps that the script announced with its own time limit, such as an evaluation


class _Fields(ctypes.Structure):
    """The page's fields: eight aligned bytes each, so no reader sees half a number. New fields need a new `_MAGIC`."""

    _fields_ = (
        ("magic", ctypes.c_char * len(_MAGIC)),
        ("generation", ctypes.c_int64),
        ("phase", ctypes.c_int64),
        ("since", ctypes.c_double),
        ("step", ctypes.c_int64),
        ("step_at", ctypes.c_double),
        ("paused", ctypes.c_int64),
        ("samples", ctypes.c_int64),
        ("finished", ctypes.c_int64),
        ("busy_limit_s", ctypes.c_double),
        ("pause_at", ctypes.c_int64),  # this and the next are the agent's
        ("beat_at", ctypes.c_double),
        ("totals_s", ctypes.c_double * len(Phase)),
        ("durations_s", ctypes.c_double * _RECENT),
        ("busy_with", ctypes.c_char * _BUSY_WITH_NBYTES),
    )


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
    finished: int = 0  # steps finished by all workers that wrote to this page; a step done again counts again
    busy_with: str = ""  # what the worker does in phase BUSY, in the script's words; else the last such description
    busy_limit_s: float = 0.0  # how long that may take, in seconds


class WorkerStatusPage:
    """A worker's status page. The agent calls `create`, and the worker calls `from_env`."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._page = _Fields.from_buffer(memory)

    @classmethod
    def create(cls, path: Path) -> WorkerStatusPage:
        """Make a new, empty page in a file at `path`, which must be in memory (`/dev/shm`)."""
        path.write_bytes(bytes(_SIZE))
        page = cls._map(path)
        page._clear()
        page._page.magic = _MAGIC
        return page

    @classmethod
    def open(cls, path: Path) -> WorkerStatusPage:
        page = cls._map(path)
        if page._page.magic != _MAGIC:
            raise ProtocolError(f"{path} is not a status page of this version of EDL")
        return page

    @classmethod
    def from_env(cls) -> WorkerStatusPage:
        path = read("EDL_BOARD", Path)
        if path is not None:
            return cls.open(path)
        page = cls(mmap.mmap(-1, _SIZE))
        page._clear()
        return page

    # --- The worker's side. ---

    def record_worker_start(self, generation: int) -> None:
        """Record that a worker starts. The time until now counts towards the last worker's phase."""
        self._page.paused = _NEVER
        self.enter_phase(Phase.START)
        self._page.generation = generation

    def enter_phase(self, phase: Phase) -> Phase:
        page, now = self._page, time.monotonic()
        before = Phase(page.phase)
        page.totals_s[before] += now - page.since
        page.since = now
        page.phase = phase
        return before

    @contextmanager
    def in_phase(self, phase: Phase) -> Iterator[None]:
        """Switch to a phase for the block, then back to the previous phase."""
        before = self.enter_phase(phase)
        try:
            yield
        finally:
            self.enter_phase(before)

    @contextmanager
    def in_busy_phase(self, what: str, limit_s: float) -> Iterator[None]:
        page = self._page
        before = page.busy_with, page.busy_limit_s
        page.busy_with, page.busy_limit_s = what.encode()[:_BUSY_WITH_NBYTES], limit_s
        try:
            with self.in_phase(Phase.BUSY):
                yield
        finally:
            page.busy_with, page.busy_limit_s = before  # what an enclosing block announced

    def reassign_time(self, phase: Phase, seconds: float) -> None:
        """Count the first `seconds` of the current phase (all of a shorter phase) towards another phase."""
        page = self._page
        seconds = min(max(seconds, 0.0), time.monotonic() - page.since)
        page.since += seconds
        page.totals_s[phase] += seconds

    def finish_step(self, step: int, samples: int = 0) -> None:
        page, now = self._page, time.monotonic()
        if page.finished and step == page.step + 1:
            page.durations_s[page.finished % _RECENT] = now - page.step_at
        page.finished += 1
        page.step_at = now
        page.samples += samples
        page.step = step

    def is_pause_requested(self, step: int) -> bool:
        return bool(0 <= self._page.pause_at <= step)

    def record_pause(self, step: int) -> None:
        """Record that this worker saved its state and paused. The worker then waits to be stopped."""
        self.enter_phase(Phase.PAUSE)
        self._page.paused = step

    def record_resume(self) -> None:
        """Record that training continues because the agent withdrew its request to pause."""
        self._page.paused = _NEVER
        self.enter_phase(Phase.TRAIN)

    @property
    def agent_silence_s(self) -> float:
        """Seconds since the agent's last heartbeat; 0 without an agent. A stopped agent may have lost its lease."""
        beat_at = self._page.beat_at
        return max(0.0, time.monotonic() - beat_at) if beat_at else 0.0

    # --- The agent's side. ---

    def record_agent_heartbeat(self, at: float) -> None:
        """Tell the worker when the agent last knew this node's place in the job."""
        self._page.beat_at = at

    def request_pause(self, step: int | None) -> None:
        self._page.pause_at = _NEVER if step is None else step

    def read_status(self) -> WorkerStatus:
        """Read what the worker wrote, counting its current phase until now."""
        page, now = self._page, time.monotonic()
        phase, since = Phase(page.phase), page.since
        totals = {kind: page.totals_s[kind] for kind in Phase}
        totals[phase] += max(0.0, now - since)
        return WorkerStatus(
            generation=page.generation,
            phase=phase,
            phase_since=since,
            totals_s=totals,
            step=page.step,
            step_at=page.step_at,
            paused=page.paused,
            samples=page.samples,
            durations_s=tuple(seconds for seconds in page.durations_s if seconds > 0),
            finished=page.finished,
            busy_with=page.busy_with.decode(errors="replace"),
            busy_limit_s=page.busy_limit_s,
        )

    @classmethod
    def _map(cls, path: Path) -> WorkerStatusPage:
        with path.open("r+b") as file:
            if os.fstat(file.fileno()).st_size < _SIZE:
                raise ProtocolError(f"{path} is too short for a status page")
            return cls(mmap.mmap(file.fileno(), _SIZE))

    def _clear(self) -> None:
        page = self._page
        page.generation = page.step = page.paused = page.pause_at = _NEVER
        page.since = time.monotonic()
