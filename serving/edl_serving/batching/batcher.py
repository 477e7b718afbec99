"""Between the event loop and the model: jobs go in, worker threads take batches, answers come back.

The workers take the next batch themselves, so the model never waits for the event loop, which may be busy receiving.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Sequence

from edl.protocol.transport import grpc
from edl_serving.backends.backend import Backend
from edl_serving.batching.batch_queue import BatchQueue
from edl_serving.batching.executor import Executor
from edl_serving.batching.job import Job
from edl_serving.batching.worker import Worker
from edl_serving.model import Model
from edl_serving.monitoring.metrics import Metrics
from edl_serving.request_error import Refusal, invalid
from edl_serving.settings import ServerSettings

__all__ = ["Batcher"]

_log = logging.getLogger(__name__)

_FIRST_HINT_MS = 100
_LONGEST_HINT_MS = 10_000
_SLOW_INLINE_S = 0.005


class Batcher:
    """The queue and the threads of one model. To be made, and used, on the event loop."""

    def __init__(self, settings: ServerSettings, model: Model, backends: Sequence[Backend], metrics: Metrics) -> None:
        self._settings = settings
        self._model = model
        self._loop = asyncio.get_running_loop()
        self._queue = BatchQueue(
            settings.max_batch_rows, settings.max_delay_s, settings.max_queue_rows, settings.max_queue_bytes
        )
        self._wake = threading.Condition()
        self._closing = False
        self._worker_metrics = [metrics.worker() for _ in backends]
        self._executors = [
            Executor(backend, model, settings, counts)
            for backend, counts in zip(backends, self._worker_metrics, strict=True)
        ]
        self._workers = [
            Worker(backend, executor, settings.max_batch_rows, self, counts)
            for backend, executor, counts in zip(backends, self._executors, self._worker_metrics, strict=True)
        ]
        self._inline = all(backend.inline for backend in backends)
        self._warned = False

    @property
    def queued_rows(self) -> int:
        """Rows that wait."""
        return self._queue.rows

    @property
    def queued_bytes(self) -> int:
        """Bytes of the requests that wait."""
        return self._queue.nbytes

    @property
    def computed_rows(self) -> int:
        """Rows that the model was called with, in calls that have ended."""
        return sum(counts.rows for counts in self._worker_metrics)

    async def warm_up(self) -> None:
        """Start the threads and warm every backend up. Raises what a backend raises."""
        for worker in self._workers:
            worker.start()
        await asyncio.gather(*[worker.warm for worker in self._workers])

    async def compute(self, job: Job) -> bytes:
        """The response to a request.

        Cancelling takes the request out of the queue; one that is being computed is computed in vain.

        Raises:
            Refusal: the queue is full, the model failed, or time ran out.
        """
        if self._inline:
            self._compute_inline(job)
        else:
            await self._compute_in_batch(job)
        if isinstance(job.answer, bytes):
            return job.answer
        raise job.answer or Refusal(grpc.StatusCode.DEADLINE_EXCEEDED, "the deadline passed before it was computed")

    def _compute_inline(self, job: Job) -> None:
        if self._closing:
            raise _stopping()
        job.started = job.arrived
        self._executors[0].run([job])
        job.ended = time.monotonic()
        taken_s = job.ended - job.arrived
        if taken_s > _SLOW_INLINE_S and not self._warned:
            self._warned = True
            _log.warning(
                "model %r is declared inline, but a request of %d rows took %.1f ms, while everything else waited",
                self._model.name,
                job.rows,
                taken_s * 1000,
            )

    async def _compute_in_batch(self, job: Job) -> None:
        job.reply = reply = self._loop.create_future()
        with self._wake:
            if self._closing:
                raise _stopping()
            refused = self._queue.push(job)
            self._wake.notify()
        if refused:
            for other in refused:
                other.answer = self._full(other)
            if job in refused:
                return
            _settle(refused)
        try:
            await reply
        except asyncio.CancelledError:
            job.cancelled = True
            with self._wake:
                self._queue.remove(job)
            raise

    def _full(self, job: Job) -> Refusal:
        settings, queue = self._settings, self._queue
        if job.nbytes > settings.max_queue_bytes:  # a hint when to come again would have it come for ever
            return invalid(
                f"this request takes {job.nbytes:,} bytes, with the objects that its strings become, and "
                f"{settings.max_queue_bytes:,} is all that may wait: send fewer rows (edl serve --max-queue-bytes)"
            )
        if queue.nbytes + job.nbytes > settings.max_queue_bytes:
            full = f"{queue.nbytes:,} of {settings.max_queue_bytes:,} bytes wait, and this request has {job.nbytes:,}"
            rows = job.rows
        else:
            rows = max(1, queue.rows + job.rows - settings.max_queue_rows)
            full = f"{queue.rows} of {settings.max_queue_rows} rows wait, and this request has {job.rows}"
        hint_ms = self._milliseconds_for(rows)
        return Refusal(grpc.StatusCode.UNAVAILABLE, f"the queue is full: {full}", hint_ms, "queue")

    def _milliseconds_for(self, rows: int) -> int:
        """How long the model takes for these rows, going by all that it has computed."""
        busy_s = sum(counts.compute_s.sum for counts in self._worker_metrics) / len(self._worker_metrics)
        done = sum(counts.rows for counts in self._worker_metrics)
        if done == 0:
            return _FIRST_HINT_MS
        return max(1, min(_LONGEST_HINT_MS, round(1000 * rows * busy_s / done)))

    def next_batch(self) -> list[Job] | None:
        """For a worker: the next batch once one is due; None when the batcher closes."""
        while True:
            with self._wake:
                if self._closing:
                    return None
                taken = self._queue.take(time.monotonic())
                if not taken.jobs and not taken.expired:
                    self._wake.wait(taken.wait_s)
                    continue
                if len(self._workers) > 1 and len(self._queue):
                    self._wake.notify()  # what is left may be due for another worker
            if taken.expired:
                self.hand_back(taken.expired)
            if taken.jobs:
                return taken.jobs

    def hand_back(self, jobs: list[Job]) -> None:
        """For a worker: wake those who wait for these jobs, or queue what is left of one that was computed in part."""
        if len(jobs) == 1 and jobs[0].unfinished:
            with self._wake:
                if not self._closing:
                    self._queue.put_back(jobs[0])
                    return
            jobs[0].answer = _stopping()
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
            job.answer = _stopping()
        _settle(left)
        for worker in self._workers:
            worker.discard()
        _, late = await asyncio.wait([worker.closed for worker in self._workers], timeout=timeout_s)
        if late and timeout_s > 0:
            _log.warning("%d of %d backends still compute after %.1f s: left", len(late), len(self._workers), timeout_s)


def _settle(jobs: list[Job]) -> None:
    for job in jobs:
        if not job.reply.done():
            job.reply.set_result(None)


def _stopping() -> Refusal:
    return Refusal(grpc.StatusCode.UNAVAILABLE, "the server is stopping")
