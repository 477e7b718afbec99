"""Between the event loop and the model: jobs go in, worker threads take batches, answers come back.

The workers take the next batch themselves, so the model never waits for the event loop, which may be busy receiving.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Sequence

import grpc

from edl_serving.backend import Backend
from edl_serving.executor import Executor, Observer
from edl_serving.metrics import Metrics
from edl_serving.model import Model
from edl_serving.queueing import BatchQueue, Job
from edl_serving.refusal import Refusal
from edl_serving.request import Request
from edl_serving.settings import ServerSettings
from edl_serving.worker import Worker

__all__ = ["Batcher"]

_log = logging.getLogger(__name__)

_FIRST_GUESS_MS = 100
_LONGEST_HINT_MS = 10_000


class Batcher:
    """The queue and the threads of one model. To be made, and used, on the event loop."""

    def __init__(self, settings: ServerSettings, model: Model, backends: Sequence[Backend], metrics: Metrics) -> None:
        self._settings = settings
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()
        self._queue = BatchQueue(settings.max_batch_rows, settings.max_delay_s, settings.max_queue_rows)
        self._wake = threading.Condition()
        self._closing = False
        self._rate = _Rate()
        observer = Observer(self._computed, metrics.faulted)
        self._workers = [
            Worker(
                backend,
                Executor(backend, model, settings.max_batch_rows, settings.check_nan, observer),
                settings.max_batch_rows,
                self,
            )
            for backend in backends
        ]

    @property
    def queued_rows(self) -> int:
        """Rows that wait."""
        return self._queue.rows

    async def warm_up(self) -> None:
        """Start the threads and warm every backend up. Raises what a backend raises."""
        for worker in self._workers:
            worker.start()
        await asyncio.gather(*[worker.warm for worker in self._workers])

    async def compute(self, request: Request, timeout_s: float | None) -> bytes:
        """The response to a request.

        Cancelling takes the request out of the queue; one that is being computed is computed in vain.

        Args:
            timeout_s: after which nobody waits any more.

        Raises:
            Refusal: the queue is full, the model failed, or time ran out.
        """
        now = time.monotonic()
        reply: asyncio.Future[None] = self._loop.create_future()
        job = Job(request, now, now + timeout_s if timeout_s is not None else float("inf"), reply)
        with self._wake:
            taken = not self._closing and self._queue.push(job)
            if taken:
                self._wake.notify()
        if not taken:
            raise self._full(request)
        try:
            await reply
        except asyncio.CancelledError:
            job.cancelled = True
            with self._wake:
                self._queue.remove(job)
            raise
        if isinstance(job.answer, bytes):
            return job.answer
        raise job.answer or Refusal(grpc.StatusCode.DEADLINE_EXCEEDED, "the deadline passed before it was computed")

    def _full(self, request: Request) -> Refusal:
        if self._closing:
            return Refusal(grpc.StatusCode.UNAVAILABLE, "the server is stopping", retry_after_ms=-1)
        excess = self._queue.rows + request.rows - self._settings.max_queue_rows
        return Refusal(
            grpc.StatusCode.UNAVAILABLE,
            f"the queue is full: {self._queue.rows} of {self._settings.max_queue_rows} rows wait, "
            f"and this request has {request.rows}",
            retry_after_ms=self._rate.milliseconds_for(excess),
        )

    def _computed(self, rows: int, seconds: float) -> None:
        self._rate.add(rows, seconds)
        self._metrics.computed(rows, seconds)

    def next_batch(self) -> list[Job] | None:
        """For a worker: the next batch once one is due; None when the batcher closes."""
        while True:
            with self._wake:
                if self._closing:
                    return None
                now = time.monotonic()
                taken = self._queue.take(now)
                if not taken.jobs and not taken.expired:
                    self._wake.wait(taken.wait_s)
                    continue
                if len(self._workers) > 1 and len(self._queue):
                    self._wake.notify()  # jobs that are left may be due for another worker
            if taken.expired:
                self.hand_back(taken.expired)
            for job in taken.jobs:
                self._metrics.waited(now - job.arrived)
            if taken.jobs:
                return taken.jobs

    def hand_back(self, jobs: list[Job]) -> None:
        """For a worker: wake those who wait for these jobs."""
        try:
            self._loop.call_soon_threadsafe(_settle, jobs)
        except RuntimeError:  # the loop is closed: nobody waits any more
            _log.debug("%d answers came after the event loop was closed", len(jobs))

    async def close(self, timeout_s: float) -> None:
        """Refuse what is queued, let the workers finish their batch, and close the backends.

        A worker that takes longer than `timeout_s` is left behind, as a daemon thread.
        """
        with self._wake:
            self._closing = True
            left = self._queue.clear()
            self._wake.notify_all()
        for job in left:
            job.answer = Refusal(grpc.StatusCode.UNAVAILABLE, "the server is stopping", retry_after_ms=-1)
        _settle(left)
        closed = [worker.closed for worker in self._workers if worker.started]
        if closed:
            _, late = await asyncio.wait(closed, timeout=timeout_s)
            if late:
                _log.warning("%d backends are still computing after %.1f s; left behind", len(late), timeout_s)


def _settle(jobs: list[Job]) -> None:
    for job in jobs:
        if not job.reply.done():
            job.reply.set_result(None)


class _Rate:
    """Rows a second that the model manages while it computes, as a moving average."""

    def __init__(self) -> None:
        self._rows_per_s = 0.0

    def add(self, rows: int, seconds: float) -> None:
        rate = rows / max(seconds, 1e-6)
        self._rows_per_s = rate if self._rows_per_s == 0 else 0.9 * self._rows_per_s + 0.1 * rate

    def milliseconds_for(self, rows: int) -> int:
        """How long these rows take; a guess while nothing is known."""
        if self._rows_per_s == 0:
            return _FIRST_GUESS_MS
        return max(1, min(_LONGEST_HINT_MS, round(1000 * rows / self._rows_per_s)))
