"""The thread that one backend lives in."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from typing import Protocol

from edl.protocol.transport import grpc
from edl_serving.backends.backend import Backend
from edl_serving.batching.executor import Executor
from edl_serving.batching.fork_guard import end_if_forked
from edl_serving.batching.job import Job
from edl_serving.monitoring.metrics import WorkerMetrics
from edl_serving.request_error import Refusal

__all__ = ["Worker"]

_log = logging.getLogger(__name__)


class Source(Protocol):
    """Where a worker gets its batches from, and hands the answers to. Both are called in the worker's thread."""

    def next_batch(self) -> list[Job] | None:
        """The next batch, once one is due; None to end."""

    def hand_back(self, jobs: list[Job]) -> None:
        """These jobs have been dealt with, but for a single one that is `unfinished`: its rest makes a batch later."""


class Worker:
    """Warms a backend up, computes batches until there are no more, and closes it, all in one thread.

    The thread is a daemon: a model that hangs must not keep the process alive.

    Attributes:
        warm: done once the backend is warmed up; carries what it raised.
        closed: done once the backend is closed.
    """

    def __init__(
        self, backend: Backend, executor: Executor, max_batch_rows: int, source: Source, metrics: WorkerMetrics
    ) -> None:
        self._backend = backend
        self._executor = executor
        self._max_batch_rows = max_batch_rows
        self._source = source
        self._metrics = metrics
        self._discarded = False
        self._loop = asyncio.get_running_loop()
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
            while (jobs := self._source.next_batch()) is not None:
                self._compute(jobs)
                jobs = []  # what was computed last is not held while it waits: it may lie in a student's shared memory
        try:
            self._backend.close()
        except Exception as exc:  # noqa: BLE001 - the user's code, and nobody is left to tell
            _log.error("closing the backend raised %s: %s", type(exc).__name__, exc, exc_info=exc)
        self._tell(self.closed, None)

    def _warm_up(self) -> Exception | None:
        pid = os.getpid()
        try:
            try:
                self._backend.warm_up(self._max_batch_rows)
            finally:
                end_if_forked(pid)
        except StopIteration as exc:  # no future can carry it: the server would wait for ever
            failure = RuntimeError(f"warming up raised StopIteration: {exc}")
            failure.__cause__ = exc
            return failure
        except Exception as exc:  # noqa: BLE001 - raised again where the server is started
            return exc
        except BaseException as exc:  # noqa: BLE001 - a model's SystemExit is a failure to start, not an order
            return RuntimeError(f"warming up raised {type(exc).__name__}: {exc}")
        return None

    def _compute(self, jobs: list[Job]) -> None:
        now = time.monotonic()
        for job in jobs:
            if not job.done:
                job.started = now
                self._metrics.waited(now - job.arrived)
        try:
            self._executor.step(jobs)
        except Exception as exc:  # noqa: BLE001 - every job must get an answer, and the thread must go on
            _log.error("answering %d requests raised %s", len(jobs), type(exc).__name__, exc_info=exc)
            for job in jobs:
                if job.answer is None:
                    job.answer = Refusal(grpc.StatusCode.INTERNAL, f"the server failed: {type(exc).__name__}: {exc}")
        now = time.monotonic()
        for job in jobs:
            job.ended = now
        self._source.hand_back(jobs)

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
