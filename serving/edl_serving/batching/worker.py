"""The thread of a backend."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable

from edl.protocol.transport import grpc
from edl_serving.backends.backend import Backend
from edl_serving.batching.executor import Executor
from edl_serving.batching.fork_guard import exit_if_forked
from edl_serving.batching.job import InferenceJob
from edl_serving.monitoring.metrics import WorkerMetrics
from edl_serving.request_error import RequestError

__all__ = ["Worker"]

_log = logging.getLogger(__name__)


class Worker:
    """Warms a backend up, computes batches until there are no more, and closes it, all in its thread.

    The thread is a daemon: a model that hangs must not keep the process alive.

    Args:
        backend: the model.
        executor: computes batches on `backend`.
        max_batch_rows: rows of a full batch.
        next_batch: called in the thread; waits for a batch that is due, and returns None to end.
        finish_jobs: called in the thread with the jobs of a computed batch.
        metrics: counts queue times.

    Attributes:
        warm: done once the backend is warmed up; carries what it raised.
        closed: done once the backend is closed.
    """

    def __init__(
        self,
        backend: Backend,
        executor: Executor,
        max_batch_rows: int,
        next_batch: Callable[[], list[InferenceJob] | None],
        finish_jobs: Callable[[list[InferenceJob]], None],
        metrics: WorkerMetrics,
    ) -> None:
        self._backend = backend
        self._executor = executor
        self._max_batch_rows = max_batch_rows
        self._next_batch = next_batch
        self._finish_jobs = finish_jobs
        self._metrics = metrics
        self._discarded = False
        self._loop = asyncio.get_running_loop()
        # Not a `BackgroundLoop`: some models must be warmed up, asked and closed in a single thread; it starts late.
        self._thread = threading.Thread(target=self._run, name="edl-teacher", daemon=True)
        self.warm: asyncio.Future[None] = self._loop.create_future()
        self.closed: asyncio.Future[None] = self._loop.create_future()

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def discard(self) -> None:
        """Close the backend of a worker that may not have been started."""
        if self._thread.ident is None:
            self._discarded = True
            self._thread.start()

    def _run(self) -> None:
        failure = None if self._discarded else self._warm_up()
        self._tell(self.warm, failure)
        if failure is None:
            while (jobs := self._next_batch()) is not None:
                self._compute(jobs)
                jobs = []  # what was computed last is not held while it waits: it may lie in a student's shared memory
        try:
            self._backend.close()
        except Exception as exc:  # noqa: BLE001 - the user's code, and nobody is left to tell
            _log.error("closing the backend raised %s: %s", type(exc).__name__, exc, exc_info=exc)
        self._tell(self.closed, None)

    def _warm_up(self) -> Exception | None:
        pid = os.getpid()
        self._metrics.computing_since_s = time.monotonic()
        try:
            try:
                self._backend.warm_up(self._max_batch_rows)
            finally:
                self._metrics.computing_since_s = None
                exit_if_forked(pid)
        except StopIteration as exc:  # no future can carry it: the server would wait for ever
            failure = RuntimeError(f"warming up raised StopIteration: {exc}")
            failure.__cause__ = exc
            return failure
        except Exception as exc:  # noqa: BLE001 - raised again where the server is started
            return exc
        except BaseException as exc:  # noqa: BLE001 - a model's SystemExit is a failure to start, not an order
            return RuntimeError(f"warming up raised {type(exc).__name__}: {exc}")
        return None

    def _compute(self, jobs: list[InferenceJob]) -> None:
        now = time.monotonic()
        for job in jobs:
            if not job.done:
                job.started = now
                self._metrics.record_queue_time(now - job.arrived)
        try:
            self._executor.run_next_part(jobs)
        except Exception as exc:  # noqa: BLE001 - every job must get an answer, and the thread must go on
            _log.error("answering %d requests raised %s", len(jobs), type(exc).__name__, exc_info=exc)
            for job in jobs:
                if job.answer is None:
                    job.answer = RequestError(
                        grpc.StatusCode.INTERNAL, f"the server failed: {type(exc).__name__}: {exc}"
                    )
        now = time.monotonic()
        for job in jobs:
            job.ended = now
        self._finish_jobs(jobs)

    def _tell(self, future: asyncio.Future[None], failure: Exception | None) -> None:
        def tell() -> None:
            if future.done():
                return
            if failure is None:
                future.set_result(None)
            else:
                future.set_exception(failure)

        try:
            self._loop.call_soon_threadsafe(tell)
        except RuntimeError:  # the loop is closed: nobody waits any more
            _log.debug("the event loop was closed before the backend was")
