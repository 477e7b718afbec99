"""The batcher between the event loop and the model: jobs go in, worker threads take batches, responses come back.

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
from edl_serving.batching.job import InferenceJob
from edl_serving.batching.worker import Worker
from edl_serving.model import ServedModel
from edl_serving.monitoring.metrics import Metrics
from edl_serving.request_error import RequestError, invalid_argument
from edl_serving.settings import ServerSettings

__all__ = ["Batcher"]

_log = logging.getLogger(__name__)

_FIRST_HINT_MS = 100
"""When to come again, before a batch was computed: some batches of a large model on a GPU."""
_LONGEST_HINT_MS = 10_000
"""Of a model that takes minutes for its queue: with more, a teacher that joins later finds its students asleep."""
_SLOW_INLINE_S = 0.005
"""An inline `predict` should take microseconds; after so long other requests feel it."""


class Batcher:
    """The queue and the threads of a model. To be made, and used, on the event loop.

    Args:
        settings: of the server.
        model: that is served.
        backends: its instances.
        metrics: counts batches.
    """

    def __init__(
        self, settings: ServerSettings, model: ServedModel, backends: Sequence[Backend], metrics: Metrics
    ) -> None:
        self._settings = settings
        self._model = model
        self._loop = asyncio.get_running_loop()
        self._queue = BatchQueue(
            settings.max_batch_rows, settings.max_delay_s, settings.max_queue_rows, settings.max_queue_bytes
        )
        self._wake = threading.Condition()
        self._closing = False
        self._worker_metrics = [metrics.add_worker() for _ in backends]
        self._executors = [
            Executor(backend, model, settings, counts)
            for backend, counts in zip(backends, self._worker_metrics, strict=True)
        ]
        self._workers = [
            Worker(backend, executor, settings.max_batch_rows, self.next_batch, self.finish_jobs, counts)
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
        """Start the threads and warm the backends up.

        Raises:
            Exception: what a backend raised.
        """
        for worker in self._workers:
            worker.start()
        await asyncio.gather(*[worker.warm for worker in self._workers])

    async def compute(self, job: InferenceJob) -> bytes:
        """Compute a job.

        Cancelling takes the job out of the queue; a job that is being computed is computed in vain.

        Args:
            job: to compute.

        Returns:
            The response's bytes.

        Raises:
            RequestError: the queue is full, the model failed, or time ran out.
        """
        if self._inline:
            self._compute_inline(job)
        else:
            await self._compute_in_batch(job)
        if isinstance(job.answer, bytes):
            return job.answer
        if job.answer is None:
            raise RequestError(grpc.StatusCode.DEADLINE_EXCEEDED, "the deadline passed before it was computed")
        raise job.answer.copy()  # the traceback's frames hold the job, and with the job's own answer it held them

    def _compute_inline(self, job: InferenceJob) -> None:
        if self._closing:
            raise _stopping_error()
        job.started = job.arrived
        self._executors[0].run_jobs([job])
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

    async def _compute_in_batch(self, job: InferenceJob) -> None:
        job.reply = reply = self._loop.create_future()
        with self._wake:
            if self._closing:
                raise _stopping_error()
            refused = self._queue.push_job(job)
            self._wake.notify()
        if refused:
            for other in refused:
                other.answer = self._queue_full_error(other)
            if job in refused:
                return
            _wake_waiters(refused)
        try:
            await reply
        except asyncio.CancelledError:
            job.cancelled = True
            with self._wake:
                self._queue.remove_job(job)
            raise

    def _queue_full_error(self, job: InferenceJob) -> RequestError:
        settings, queue = self._settings, self._queue
        nbytes = queue.charged_nbytes(job)
        if nbytes > settings.max_queue_bytes:  # a hint when to come again would have it come for ever
            return invalid_argument(
                f"this request takes {nbytes:,} bytes, with the objects that its strings become, and "
                f"{settings.max_queue_bytes:,} is all that may wait: send fewer rows (edl serve --max-queue-bytes)"
            )
        if queue.nbytes + nbytes > settings.max_queue_bytes:
            full = f"{queue.nbytes:,} of {settings.max_queue_bytes:,} bytes wait, and this request has {nbytes:,}"
            rows = job.rows
        else:
            rows = max(1, queue.rows + job.rows - settings.max_queue_rows)
            full = f"{queue.rows} of {settings.max_queue_rows} rows wait, and this request has {job.rows}"
        hint_ms = self._estimate_ms(rows)
        return RequestError(grpc.StatusCode.UNAVAILABLE, f"the queue is full: {full}", hint_ms, "queue")

    def _estimate_ms(self, rows: int) -> int:
        """Estimate how long the model takes for these rows, from all that it has computed."""
        busy_s = sum(counts.compute_s.sum for counts in self._worker_metrics) / len(self._worker_metrics)
        done = sum(counts.rows for counts in self._worker_metrics)
        if done == 0:
            return _FIRST_HINT_MS
        return max(1, min(_LONGEST_HINT_MS, round(1000 * rows * busy_s / done)))

    def next_batch(self) -> list[InferenceJob] | None:
        """Wait for a batch that is due, in a worker's thread.

        Returns:
            The batch; None when the batcher closes.
        """
        while True:
            with self._wake:
                if self._closing:
                    return None
                popped = self._queue.pop_batch(time.monotonic())
                if not popped.jobs and not popped.expired:
                    self._wake.wait(popped.wait_s)
                    continue
                if len(self._workers) > 1 and len(self._queue):
                    self._wake.notify()  # what is left may be due for another worker
            if popped.expired:
                self.finish_jobs(popped.expired)
            if popped.jobs:
                return popped.jobs

    def finish_jobs(self, jobs: list[InferenceJob]) -> None:
        """Pass on the answers of a batch, from a worker's thread; requeue the rest of a partly computed job."""
        if len(jobs) == 1 and jobs[0].unfinished:
            with self._wake:
                if not self._closing:
                    self._queue.requeue_job(jobs[0])
                    return
            jobs[0].answer = _stopping_error()
        try:
            self._loop.call_soon_threadsafe(_wake_waiters, jobs)
        except RuntimeError:  # the loop is closed: nobody waits any more
            _log.debug("%d answers came after the event loop was closed", len(jobs))

    async def close(self, timeout_s: float) -> None:
        """Refuse what is queued, let the workers finish their batch, and close the backends.

        Args:
            timeout_s: after which a worker's thread is left behind.
        """
        with self._wake:
            self._closing = True
            left = self._queue.clear()
            self._wake.notify_all()
        for job in left:
            job.answer = _stopping_error()
        _wake_waiters(left)
        for worker in self._workers:
            worker.discard()
        _, late = await asyncio.wait([worker.closed for worker in self._workers], timeout=timeout_s)
        if late and timeout_s > 0:
            _log.warning("%d of %d backends still compute after %.1f s: left", len(late), len(self._workers), timeout_s)


def _wake_waiters(jobs: list[InferenceJob]) -> None:
    for job in jobs:
        if not job.reply.done():
            job.reply.set_result(None)


def _stopping_error() -> RequestError:
    return RequestError(grpc.StatusCode.UNAVAILABLE, "the server is stopping")
