"""Which requests wait, and which of them make the next batch: a plain state machine without clock, thread or lock."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from edl_serving.request import Request

__all__ = ["BatchQueue", "Job", "Taken"]


@dataclass(eq=False)
class Job:
    """A request on its way through the server.

    Attributes:
        request: what to compute.
        rows: how many, above 0.
        shapes: of its inputs without the rows; jobs with the same ones can share a batch.
        arrived: when, in seconds of a monotonic clock.
        deadline: after which nobody waits for the answer.
        reply: whatever the owner needs to hand the answer over.
        cancelled: nobody waits any more.
        id_bytes: for an answer on a stream, the id that it carries (`codec.id_field`); None for a call of its own.
        answer: the response's bytes, or the error; None until computed.
    """

    request: Request
    rows: int
    shapes: tuple[tuple[int, ...], ...]
    arrived: float
    deadline: float
    reply: Any = None
    cancelled: bool = False
    id_bytes: bytes | None = None
    answer: bytes | Exception | None = None


@dataclass(frozen=True)
class Taken:
    """What `BatchQueue.take` found.

    Attributes:
        jobs: the next batch; empty if none is due.
        expired: jobs whose deadline has passed: they are out of the queue and must not be computed.
        wait_s: if no batch is due, when one will be; None while nothing waits.
    """

    jobs: list[Job] = field(default_factory=list)
    expired: list[Job] = field(default_factory=list)
    wait_s: float | None = None


class BatchQueue:
    """Jobs in order of arrival, grouped by the shapes that can share a batch.

    A batch holds at most `max_batch_rows`, unless it is a single job that is larger by itself. Jobs of one shape never
    overtake each other, and the job that has waited longest decides which shape is next.

    Args:
        max_batch_rows: rows of a full batch.
        max_delay_s: how long a job may wait for others before its batch is due though not full.
        max_queue_rows: rows that may wait.
    """

    def __init__(self, max_batch_rows: int, max_delay_s: float, max_queue_rows: int) -> None:
        self._max_batch_rows = max_batch_rows
        self._max_delay_s = max_delay_s
        self._max_queue_rows = max_queue_rows
        self._lines: dict[tuple[tuple[int, ...], ...], deque[Job]] = {}
        self.rows = 0

    def __len__(self) -> int:
        return sum(len(line) for line in self._lines.values())

    def push(self, job: Job) -> bool:
        """Queue a job; False, and nothing done, if there is no room for its rows."""
        if self.rows + job.rows > self._max_queue_rows:
            return False
        self.rows += job.rows
        self._lines.setdefault(job.shapes, deque()).append(job)
        return True

    def remove(self, job: Job) -> bool:
        """Take a job out; False if it is not in here (any more)."""
        line = self._lines.get(job.shapes)
        if line is None or job not in line:
            return False
        line.remove(job)
        self.rows -= job.rows
        if not line:
            del self._lines[job.shapes]
        return True

    def take(self, now: float) -> Taken:
        """The next batch that is due at `now`."""
        expired = self._drop_expired(now)
        if not self._lines:
            return Taken(expired=expired)
        oldest = sorted(self._lines.values(), key=lambda line: line[0].arrived) if len(self._lines) > 1 else None
        for line in oldest or self._lines.values():
            if line[0].arrived + self._max_delay_s <= now or self._fills_a_batch(line):
                return Taken(self._pop_batch(line), expired)
        due = min(line[0].arrived for line in self._lines.values()) + self._max_delay_s
        return Taken(expired=expired, wait_s=due - now)

    def clear(self) -> list[Job]:
        """Empty the queue; what was in it."""
        jobs = [job for line in self._lines.values() for job in line]
        self._lines.clear()
        self.rows = 0
        return jobs

    def _drop_expired(self, now: float) -> list[Job]:
        expired = [job for line in self._lines.values() for job in line if job.deadline <= now]
        for job in expired:
            self.remove(job)
        return expired

    def _fills_a_batch(self, line: deque[Job]) -> bool:
        rows = 0
        for job in line:
            rows += job.rows
            if rows >= self._max_batch_rows:
                return True
        return False

    def _pop_batch(self, line: deque[Job]) -> list[Job]:
        jobs = [line.popleft()]
        rows = jobs[0].rows
        while line and rows + line[0].rows <= self._max_batch_rows:
            jobs.append(line.popleft())
            rows += jobs[-1].rows
        self.rows -= rows
        if not line:
            del self._lines[jobs[0].shapes]
        return jobs
