"""The status page: shared memory through which a worker and its node's agent report their status to each other.

Every field has a single writer. At any time, the agent can read what a worker wrote, even after the worker was killed
or while it hangs. Nothing is sent, so nothing can be lost or block. Times are readings of `time.monotonic()`, which all
processes of a host share on Linux. Without an agent, the page is private memory, and it contains no requests.

A worker's fields belong together: the limit of an evaluation that has ended would make the next phase look like a hang.
So the page holds two copies of them, and a counter says which one readers use. A worker changes the other copy and then
increments the counter. With a lock around a single copy, a worker killed in the middle would block readers for ever.
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
_MAGIC: Final = b"EDLBRD05"
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


class _Record(ctypes.Structure):
    """What a worker reports. A field with a new meaning, here or in the page, needs a new `_MAGIC`."""

    _fields_ = (
        ("generation", ctypes.c_int64),
        ("phase", ctypes.c_int64),
        ("since", ctypes.c_double),
        ("step", ctypes.c_int64),
        ("step_at", ctypes.c_double),
        ("paused", ctypes.c_int64),
        ("samples", ctypes.c_int64),
        ("finished", ctypes.c_int64),
        ("busy_limit_s", ctypes.c_double),
        ("totals_s", ctypes.c_double * len(Phase)),
        ("durations_s", ctypes.c_double * _RECENT),
        ("busy_with", ctypes.c_char * _BUSY_WITH_NBYTES),
    )


class _Fields(ctypes.Structure):
    """The page's fields. Those outside the records are eight aligned bytes each, so no reader sees half a number."""

    _fields_ = (
        ("magic", ctypes.c_char * len(_MAGIC)),
        ("changes", ctypes.c_int64),  # number of finished changes; records[changes % 2] is the record to read
        ("pause_at", ctypes.c_int64),  # this and the next are the agent's
        ("beat_at", ctypes.c_double),
        ("records", _Record * 2),
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
        self._records = self._page.records

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
        self.enter_phase(Phase.START, paused=_NEVER, generation=generation)

    def enter_phase(self, phase: Phase, **fields: float | bytes) -> Phase:
        """Switch to a phase and set fields of the record at the same moment. Returns the previous phase."""
        record, now = self._begin_change(), time.monotonic()
        before = Phase(record.phase)
        record.totals_s[before] += now - record.since
        record.since = now
        record.phase = phase
        for name, value in fields.items():
            setattr(record, name, value)
        self._page.changes += 1
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
        outer = self._read_record()
        before = self.enter_phase(Phase.BUSY, busy_with=what.encode()[:_BUSY_WITH_NBYTES], busy_limit_s=limit_s)
        try:
            yield
        finally:  # what an enclosing block announced
            self.enter_phase(before, busy_with=outer.busy_with, busy_limit_s=outer.busy_limit_s)

    def reassign_time(self, phase: Phase, seconds: float) -> None:
        """Count the first `seconds` of the current phase (all of a shorter phase) towards another phase."""
        record = self._begin_change()
        seconds = min(max(seconds, 0.0), time.monotonic() - record.since)
        record.since += seconds
        record.totals_s[phase] += seconds
        self._page.changes += 1

    def finish_step(self, step: int, samples: int = 0) -> None:
        record, now = self._begin_change(), time.monotonic()
        if record.finished and step == record.step + 1:
            record.durations_s[record.finished % _RECENT] = now - record.step_at
        record.finished += 1
        record.step_at = now
        record.samples += samples
        record.step = step
        self._page.changes += 1

    def is_pause_requested(self, step: int) -> bool:
        return bool(0 <= self._page.pause_at <= step)

    def record_pause(self, step: int) -> None:
        """Record that this worker saved its state and paused. The worker then waits to be stopped."""
        self.enter_phase(Phase.PAUSE, paused=step)

    def record_resume(self) -> None:
        """Record that training continues because the agent withdrew its request to pause."""
        self.enter_phase(Phase.TRAIN, paused=_NEVER)

    @property
    def agent_silence_s(self) -> float:
        """Seconds since the agent's last heartbeat; 0 without an agent. A stopped agent may have lost its lease."""
        beat_at = self._page.beat_at
        return max(0.0, time.monotonic() - beat_at) if beat_at else 0.0

    def _begin_change(self) -> _Record:
        """Return a copy of the record to change. Readers see it when the caller increments the page's `changes`."""
        used = self._page.changes % 2
        self._records[1 - used] = self._records[used]
        record: _Record = self._records[1 - used]
        return record

    # --- The agent's side. ---

    def record_agent_heartbeat(self, at: float) -> None:
        """Tell the worker when the agent last knew this node's place in the job."""
        self._page.beat_at = at

    def request_pause(self, step: int | None) -> None:
        self._page.pause_at = _NEVER if step is None else step

    def read_status(self) -> WorkerStatus:
        """Read what the worker wrote, counting its current phase until now."""
        record, now = self._read_record(), time.monotonic()
        phase = Phase(record.phase)
        totals = {kind: record.totals_s[kind] for kind in Phase}
        totals[phase] += max(0.0, now - record.since)
        return WorkerStatus(
            generation=record.generation,
            phase=phase,
            phase_since=record.since,
            totals_s=totals,
            step=record.step,
            step_at=record.step_at,
            paused=record.paused,
            samples=record.samples,
            durations_s=tuple(seconds for seconds in record.durations_s if seconds > 0),
            finished=record.finished,
            busy_with=record.busy_with.decode(errors="replace"),
            busy_limit_s=record.busy_limit_s,
        )

    def _read_record(self) -> _Record:
        """Copy the record. The worker overwrites it only after another change, which makes this read it again."""
        while True:
            changes = self._page.changes
            record = _Record.from_buffer_copy(self._records[changes % 2])
            if self._page.changes == changes:
                return record

    @classmethod
    def _map(cls, path: Path) -> WorkerStatusPage:
        with path.open("r+b") as file:
            if os.fstat(file.fileno()).st_size < _SIZE:
                raise ProtocolError(f"{path} is too short for a status page")
            return cls(mmap.mmap(file.fileno(), _SIZE))

    def _clear(self) -> None:
        record = self._records[0]
        record.generation = record.step = record.paused = self._page.pause_at = _NEVER
        record.since = time.monotonic()
