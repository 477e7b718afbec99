"""Queues requests and chooses the next batch. A plain state machine without threads or locks.

Clients take turns by start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996), with rows instead of bytes. Each
client has a tag in virtual time. The tag of a new client starts at the tag that is being served now. A tag grows by
the number of rows served to its client. The client with the smallest tag goes next. So a client with few requests waits
only for the current batch and for its own batch, however many requests another client has queued.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from edl.protocol import codec
from edl.quoting import quote
from edl_serving.request import DecodedRequest, Join
from edl_serving.request_error import RequestError

Shapes: TypeAlias = tuple[Hashable, ...]
"""Shapes of a job's inputs without the rows, and everything else that jobs in a batch must share
(`RequestPlan.shapes`)."""


@dataclass(eq=False)
class InferenceJob:
    """A request that the server is processing. Times are those of the monotonic clock."""

    request: DecodedRequest
    rows: int
    shapes: Shapes
    arrived: float
    deadline: float  # when the client stops waiting
    reply: Any = None  # future of a queued job; it is done once `answer` is set
    cancelled: bool = False
    join: Join = codec.RESPONSE.join
    client: str = ""
    nbytes: int = 0  # of the message, of the Python objects made from it, and of the answer
    answer_nbytes: int = 0
    done: int = 0  # rows computed so far, for a job with more rows than a batch holds
    partial: Any = None  # outputs of these rows
    started: float = 0.0  # when the computation began and ended; 0 until then
    ended: float = 0.0
    id: str = ""
    answer: bytes | RequestError | None = None  # the response's bytes, or the error; None until computed

    @property
    def origin(self) -> str:
        """The request's id and client, to append to a log line; empty if the request has no id."""
        of = f" of {self.client}" if self.client else ""
        return f" (request {quote(self.id)}{of})" if self.id else ""

    def timing(self) -> dict[str, Any]:
        ended = self.ended or time.monotonic()
        queue_ms = round(((self.started or ended) - self.arrived) * 1000, 3)
        compute_ms = round((ended - self.started) * 1000, 3) if self.started else 0.0
        return {"rows": self.rows, "queue_ms": queue_ms, "compute_ms": compute_ms}

    @property
    def unfinished(self) -> bool:
        """Whether the job was partly computed and its client still waits for the rest."""
        return self.answer is None and not self.cancelled and 0 < self.done < self.rows

    @classmethod
    def of(
        cls,
        request: DecodedRequest,
        timeout_s: float | None,
        client: str,
        nbytes: int,
        request_id: str,
        join: Join = codec.RESPONSE.join,
    ) -> InferenceJob:
        now = time.monotonic()
        deadline = float("inf") if timeout_s is None else now + timeout_s
        plan = request.plan
        return cls(
            request,
            plan.rows,
            plan.shapes,
            now,
            deadline,
            client=client,
            nbytes=nbytes + plan.object_bytes + plan.answer_bytes,
            answer_nbytes=plan.answer_bytes,
            id=request_id,
            join=join,
        )


_MOST_REMEMBERED = 1024
"""Number of idle clients whose tags are remembered. A client that is forgotten gains at most one turn."""


@dataclass(frozen=True)
class PoppedBatch:
    """The next batch (empty if none is due), jobs whose deadline has passed, and seconds until a batch is due."""

    jobs: list[InferenceJob] = field(default_factory=list)
    expired: list[InferenceJob] = field(default_factory=list)
    wait_s: float | None = None


class _Backlog:
    """The jobs of a client, queued by their shapes."""

    def __init__(self, name: str, tag: int, number: int) -> None:
        self.name = name
        self.tag = tag
        self.number = number  # breaks ties, in the order of arrival
        self.lines: dict[Shapes, deque[InferenceJob]] = {}
        self.rows = self.nbytes = 0

    def jobs(self) -> list[InferenceJob]:
        return sorted(itertools.chain(*self.lines.values()), key=lambda job: job.arrived)


class BatchQueue:
    """Jobs by client, grouped by the shapes that can share a batch.

    A job with more than `max_batch_rows` rows is a batch by itself. It is computed in parts, and queued again after
    each part (`requeue_job`). Jobs of one client and shape never overtake each other. The next batch has the shape of
    the jobs of the client whose turn it is; if these jobs have several shapes, it has the shape of the job that has
    waited longest.

    If a job does not fit, the latest jobs of the client with the largest share of the queue are evicted, as long as the
    remaining share of that client is at least the share of the new job's client. So a single client may use the whole
    queue, but cannot keep other clients out of it.

    The answer of a waiting job does not exist yet. So a job that exceeds the queue's bytes only because of its answer
    is accepted; it takes all bytes of the queue and waits alone.
    """

    def __init__(
        self, max_batch_rows: int, max_delay_s: float, max_queue_rows: int, max_queue_bytes: int = 1 << 62
    ) -> None:
        self._max_batch_rows = max_batch_rows
        self._max_delay_s = max_delay_s
        self._max_queue_rows = max_queue_rows
        self._max_queue_bytes = max_queue_bytes
        self._clients: dict[str, _Backlog] = {}
        self._virtual_time = 0  # tag of the job that was popped last
        self._finish_tags: dict[str, int] = {}  # for clients without a job that were served more than their share
        self._numbers = itertools.count()
        self.rows = 0
        self.nbytes = 0

    def __len__(self) -> int:
        return sum(len(line) for client in self._clients.values() for line in client.lines.values())

    def push_job(self, job: InferenceJob) -> list[InferenceJob]:
        """Queue a job; return the jobs that do not fit: none, the job itself, or jobs evicted to make room for it."""
        evicted: list[InferenceJob] = []
        nbytes = self.nbytes + self.charged_nbytes(job)
        if self.rows + job.rows > self._max_queue_rows or nbytes > self._max_queue_bytes:
            found = self._evictions_for(job)
            if found is None:
                return [job]
            for other in found:
                self.remove_job(other)
            evicted = found
        self._queue_for(job).append(job)
        return evicted

    def charged_nbytes(self, job: InferenceJob) -> int:
        """Return the bytes that a job takes in the queue; its answer counts only up to the queue's size."""
        return max(min(job.nbytes, self._max_queue_bytes), job.nbytes - job.answer_nbytes)

    def requeue_job(self, job: InferenceJob) -> None:
        """Queue the rest of a partly computed job as its client's next job."""
        self._queue_for(job).appendleft(job)

    def remove_job(self, job: InferenceJob) -> bool:
        client = self._clients.get(job.client)
        line = client.lines.get(job.shapes) if client is not None else None
        if client is None or line is None or job not in line:
            return False
        line.remove(job)
        self._account_removal(client, line, job)
        return True

    def pop_batch(self, now: float) -> PoppedBatch:
        expired = self._drop_expired(now)
        if not self._clients:
            return PoppedBatch(expired=expired)
        shapes = self._due_shapes(now)
        if shapes is not None:
            return PoppedBatch(self._pop_batch(shapes), expired)
        heads = (line[0].arrived for client in self._clients.values() for line in client.lines.values())
        return PoppedBatch(expired=expired, wait_s=min(heads) + self._max_delay_s - now)

    def clear(self) -> list[InferenceJob]:
        jobs = [job for client in self._clients.values() for line in client.lines.values() for job in line]
        self._clients.clear()
        self.rows = self.nbytes = 0
        return jobs

    def _queue_for(self, job: InferenceJob) -> deque[InferenceJob]:
        client = self._clients.get(job.client)
        if client is None:
            tag = max(self._virtual_time, self._finish_tags.pop(job.client, 0))
            client = self._clients[job.client] = _Backlog(job.client, tag, next(self._numbers))
        self._count(client, job, 1)
        return client.lines.setdefault(job.shapes, deque())

    def _count(self, client: _Backlog, job: InferenceJob, sign: int) -> None:
        rows, nbytes = job.rows - job.done, self.charged_nbytes(job)
        self.rows += sign * rows
        client.rows += sign * rows
        self.nbytes += sign * nbytes
        client.nbytes += sign * nbytes

    def _account_removal(self, client: _Backlog, line: deque[InferenceJob], job: InferenceJob) -> None:
        self._count(client, job, -1)
        if line:
            return
        del client.lines[job.shapes]
        if client.lines:
            return
        del self._clients[client.name]
        if client.tag > self._virtual_time:
            if len(self._finish_tags) >= _MOST_REMEMBERED:
                self._finish_tags = {name: tag for name, tag in self._finish_tags.items() if tag > self._virtual_time}
            if len(self._finish_tags) < _MOST_REMEMBERED:
                self._finish_tags[client.name] = client.tag

    def _evictions_for(self, job: InferenceJob) -> list[InferenceJob] | None:
        """Return the jobs to evict so that a job fits; None if evicting them would be unfair."""
        rows = self.rows + job.rows - self._max_queue_rows
        charged = self.charged_nbytes(job)
        nbytes = self.nbytes + charged - self._max_queue_bytes
        own = self._clients.get(job.client)
        wanted = self._share((own.rows if own else 0) + job.rows, (own.nbytes if own else 0) + charged)
        has = {name: (client.rows, client.nbytes) for name, client in self._clients.items() if client is not own}
        latest = {name: iter(reversed(self._clients[name].jobs())) for name in has}
        chosen: list[InferenceJob] = []
        while rows > 0 or nbytes > 0:
            most = max(has, key=lambda name: self._share(*has[name]), default=None)
            other = next(latest[most], None) if most is not None else None
            if most is None or other is None:
                return None
            freed = self.charged_nbytes(other)
            kept = has[most][0] - other.rows + other.done, has[most][1] - freed
            if other.done or self._share(*kept) < wanted:
                return None
            has[most] = kept
            chosen.append(other)
            rows -= other.rows
            nbytes -= freed
        return chosen

    def _share(self, rows: int, nbytes: int) -> float:
        return max(rows / self._max_queue_rows, nbytes / self._max_queue_bytes)

    def _drop_expired(self, now: float) -> list[InferenceJob]:
        expired = []
        for client in self._clients.values():
            for line in client.lines.values():
                expired += [job for job in line if job.deadline <= now]
        for job in expired:
            self.remove_job(job)
        return expired

    def _due_shapes(self, now: float) -> Shapes | None:
        clients: Iterable[_Backlog] = self._clients.values()
        if len(self._clients) > 1:
            clients = sorted(clients, key=lambda client: (client.tag, client.number))
        for client in clients:
            lines: Iterable[tuple[Shapes, deque[InferenceJob]]] = client.lines.items()
            if len(client.lines) > 1:
                lines = sorted(lines, key=lambda entry: entry[1][0].arrived)
            for shapes, line in lines:
                if line[0].arrived + self._max_delay_s <= now or self._fills_a_batch(shapes):
                    return shapes
        return None

    def _fills_a_batch(self, shapes: Shapes) -> bool:
        rows = 0
        for client in self._clients.values():
            for job in client.lines.get(shapes, ()):
                rows += job.rows - job.done
                if rows >= self._max_batch_rows:
                    return True
        return False

    def _pop_batch(self, shapes: Shapes) -> list[InferenceJob]:
        most = self._max_batch_rows
        turns = [(client.tag, client.number, client) for client in self._clients.values() if shapes in client.lines]
        if len(turns) > 1:
            heapq.heapify(turns)
        jobs: list[InferenceJob] = []
        rows = 0
        while turns and rows < most:
            client = turns[0][2]
            line = client.lines[shapes]
            left = line[0].rows - line[0].done
            if jobs and rows + left > most:
                heapq.heappop(turns)  # the client keeps its tag, so it goes first in the next batch
                continue
            job = line.popleft()
            jobs.append(job)
            rows += left
            self._virtual_time = max(self._virtual_time, client.tag)
            client.tag += min(left, most)
            self._account_removal(client, line, job)
            if line:
                heapq.heapreplace(turns, (client.tag, client.number, client))
            else:
                heapq.heappop(turns)
        return jobs
