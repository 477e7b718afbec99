"""The batcher between the event loop and the model: it queues jobs; worker threads compute batches and return answers.

Workers take the next batch themselves, so the model never waits for the event loop, which may be busy receiving. The
canary tests readiness by sending a sample row through the queue and the model.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future

from edl.background import start_call
from edl.notifier import wait_within
from edl.protocol import kserve, names
from edl.protocol.tensors import Array
from edl.protocol.transport import grpc
from edl_serving.backends.backend import Backend
from edl_serving.batching.batch_queue import BatchQueue, InferenceJob
from edl_serving.batching.executor import Executor
from edl_serving.model import ServedModel
from edl_serving.monitoring import Metrics
from edl_serving.request import DecodedRequest
from edl_serving.request_error import RequestError, invalid_argument
from edl_serving.request_plan import plan_request
from edl_serving.settings import ServerSettings

_log = logging.getLogger(__name__)


class Worker:
    """Warms up a backend, computes batches until the batcher closes, then closes the backend, all in one thread.

    Some models must be warmed up, called and closed in a single thread. The worker's thread is a daemon thread, so that
    a hanging model does not keep the process alive. The futures `warm` and `closed` are done once the backend has been
    warmed up and closed, respectively.
    """

    def __init__(self, batcher: Batcher, executor: Executor) -> None:
        self._batcher = batcher
        self._executor = executor
        self._metrics = executor.metrics
        self.warm: Future[None] = Future()
        self.warm.set_running_or_notify_cancel()  # so that a cancelled waiter cannot cancel it
        self.closed: Future[None] | None = None

    def start(self, *, discard: bool = False) -> Future[None]:
        """Start the thread; if `discard` is True, the thread only closes the backend."""
        self.closed = start_call("edl-teacher", lambda: self._run(discard))
        return self.closed

    def _run(self, discard: bool) -> None:
        if not discard and self._warm_up():
            while (jobs := self._batcher.next_batch()) is not None:
                self._compute(jobs)
                jobs = []  # release the last batch before waiting: its inputs may be in a student's shared memory
        try:
            self._executor.backend.close()
        except Exception as exc:  # noqa: BLE001 - the user's code, and no caller is left
            _log.error("closing the backend raised %s: %s", type(exc).__name__, exc, exc_info=exc)

    def _warm_up(self) -> bool:
        self._metrics.computing_since_s = time.monotonic()
        try:
            self._executor.backend.warm_up(self._batcher.max_batch_rows)
        except BaseException as exc:  # noqa: BLE001 - raised again where the server is started
            failure: BaseException = exc
            # A model's SystemExit means that starting failed, and asyncio futures cannot hold a StopIteration.
            if not isinstance(exc, Exception) or isinstance(exc, StopIteration):
                failure = RuntimeError(f"warming up raised {type(exc).__name__}: {exc}")
                failure.__cause__ = exc
            self.warm.set_exception(failure)
            return False
        finally:
            self._metrics.computing_since_s = None
        self.warm.set_result(None)
        return True

    def _compute(self, jobs: list[InferenceJob]) -> None:
        now = time.monotonic()
        for job in jobs:
            if not job.done:
                job.started = now
                self._metrics.queue_s.observe(now - job.arrived)
        try:
            self._executor.run_next_part(jobs)
        except Exception as exc:  # noqa: BLE001 - every job must get an answer, and the thread must go on
            _log.error("answering %d requests raised %s", len(jobs), type(exc).__name__, exc_info=exc)
            error = RequestError(grpc.StatusCode.INTERNAL, f"the server failed: {type(exc).__name__}: {exc}")
            for job in jobs:
                job.answer = job.answer or error
        now = time.monotonic()
        for job in jobs:
            job.ended = now
        self._batcher.finish_jobs(jobs)


_FIRST_HINT_MS = 100
"""Retry hint before the first batch is computed: the time that a large model on a GPU needs for a few batches."""
_LONGEST_HINT_MS = 10_000
"""Longest retry hint, for a queue that takes minutes. With a longer hint, a teacher that joins later would get no
requests."""


class Batcher:
    """The queue and the worker threads of a model. Create and use it on the event loop."""

    def __init__(
        self, settings: ServerSettings, model: ServedModel, backends: Sequence[Backend], metrics: Metrics
    ) -> None:
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        self.max_batch_rows = settings.max_batch_rows
        self.queue = BatchQueue(
            settings.max_batch_rows, settings.max_delay_s, settings.max_queue_rows, settings.max_queue_bytes
        )
        self._wake = threading.Condition()
        self._closing = False
        self._executors = [Executor(backend, model, settings, metrics.add_worker()) for backend in backends]
        self._workers = [Worker(self, executor) for executor in self._executors]

    async def warm_up(self) -> None:
        for worker in self._workers:
            worker.start()
        await asyncio.gather(*[asyncio.wrap_future(worker.warm) for worker in self._workers])

    async def compute(self, job: InferenceJob) -> bytes:
        """Compute a job. Cancellation removes a waiting job from the queue, and drops the outputs of a running one."""
        await self._wait_for_answer(job)
        if isinstance(job.answer, bytes):
            return job.answer
        if job.answer is None:
            raise RequestError(grpc.StatusCode.DEADLINE_EXCEEDED, "the deadline passed before the request was computed")
        raise job.answer.copy()  # a copy, because its traceback's frames hold the job: a reference cycle

    async def _wait_for_answer(self, job: InferenceJob) -> None:
        job.reply = reply = self._loop.create_future()
        with self._wake:
            if self._closing:
                raise _stopping_error()
            refused = self.queue.push_job(job)
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
                self.queue.remove_job(job)
            raise

    def _queue_full_error(self, job: InferenceJob) -> RequestError:
        settings, queue = self._settings, self.queue
        nbytes = queue.charged_nbytes(job)
        if nbytes > settings.max_queue_bytes:  # it never fits, so a hint would make the client retry for ever
            return invalid_argument(
                f"this request takes {nbytes:,} bytes, including the objects that its strings become, but "
                f"the queue holds at most {settings.max_queue_bytes:,}: send fewer rows (edl serve --max-queue-bytes)"
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
        done = sum(executor.metrics.rows for executor in self._executors)
        if done == 0:
            return _FIRST_HINT_MS
        busy_s = sum(executor.metrics.compute_s.sum for executor in self._executors) / len(self._executors)
        return max(1, min(_LONGEST_HINT_MS, round(1000 * rows * busy_s / done)))

    def next_batch(self) -> list[InferenceJob] | None:
        """Wait in a worker's thread for a batch that is due; return None when the batcher closes."""
        while True:
            with self._wake:
                if self._closing:
                    return None
                popped = self.queue.pop_batch(time.monotonic())
                if not popped.jobs and not popped.expired:
                    self._wake.wait(popped.wait_s)
                    continue
                if len(self._workers) > 1 and len(self.queue):
                    self._wake.notify()  # what is left may be due for another worker
            if popped.expired:
                self.finish_jobs(popped.expired)
            if popped.jobs:
                return popped.jobs

    def finish_jobs(self, jobs: list[InferenceJob]) -> None:
        """Deliver the answers of a batch from a worker's thread, or requeue the rest of a partly computed job."""
        if len(jobs) == 1 and jobs[0].unfinished:
            with self._wake:
                if not self._closing:
                    self.queue.requeue_job(jobs[0])
                    return
            jobs[0].answer = _stopping_error()
        try:
            self._loop.call_soon_threadsafe(_wake_waiters, jobs)
        except RuntimeError:  # the loop is closed, so nothing waits for the answers
            _log.debug("%d answers arrived after the event loop was closed", len(jobs))

    async def close(self, timeout_s: float) -> None:
        """Refuse queued jobs, give the workers up to `timeout_s` to finish their batches, and close the backends."""
        with self._wake:
            self._closing = True
            left = self.queue.clear()
            self._wake.notify_all()
        for job in left:
            job.answer = _stopping_error()
        _wake_waiters(left)
        ending = [asyncio.wrap_future(worker.closed or worker.start(discard=True)) for worker in self._workers]
        _, late = await asyncio.wait(ending, timeout=timeout_s)
        for closed in late:
            closed.cancel()  # so that a thread that ends later does not try to wake a closed loop
        if late and timeout_s > 0:
            _log.warning(
                "%d of %d backends still computing after %.1f s: abandoned", len(late), len(self._workers), timeout_s
            )


def _wake_waiters(jobs: list[InferenceJob]) -> None:
    for job in jobs:
        if not job.reply.done():
            job.reply.set_result(None)


def _stopping_error() -> RequestError:
    return RequestError(grpc.StatusCode.UNAVAILABLE, "the server is stopping")


_NAME = "canary"  # its name as a client; it takes turns with the other clients


class Canary:
    """Sends a sample row to the model at intervals, and calls `changed` when the model starts or stops answering."""

    def __init__(
        self,
        batcher: Batcher,
        model: ServedModel,
        row: Mapping[str, Array],
        every_s: float,
        timeout_s: float,
        changed: Callable[[bool], Awaitable[None]],
    ) -> None:
        self._batcher = batcher
        self._every_s = every_s
        self._timeout_s = timeout_s
        self._changed = changed
        header = kserve.ModelInferRequest(model_name=model.name, id=_NAME)
        inputs = model.inputs_of(())
        for spec in inputs:
            header.inputs.add(name=spec.name, datatype=spec.datatype, shape=row[spec.name].shape)
        if model.max_top_k is not None:
            header.parameters[names.TOP_K].int64_param = model.max_top_k
        self._request = DecodedRequest(plan_request(header, model, 1), tuple(row[spec.name] for spec in inputs), {})
        self._model = model.name
        self.healthy = True

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._every_s)
            why = await self._ask()
            if why is None or self.healthy == (not why):
                continue
            self.healthy = not why
            if why:
                _log.error("model %r fails on a row of the sample, so this teacher is not ready: %s", self._model, why)
            else:
                _log.warning("model %r answers a row of the sample again; this teacher is ready", self._model)
            await self._changed(self.healthy)

    async def _ask(self) -> str | None:
        """Send a row; return what is wrong: "" if the model answered, None if this cannot be determined now."""
        job = InferenceJob.of(self._request, self._timeout_s, _NAME, 0, _NAME)
        try:
            await wait_within(self._batcher.compute(job), self._timeout_s)
        except asyncio.TimeoutError:
            return f"no answer within {self._timeout_s:g} s"
        except RequestError as error:
            if error.code is grpc.StatusCode.UNAVAILABLE:
                return None
            if error.code is grpc.StatusCode.DEADLINE_EXCEEDED:
                return f"no answer within {self._timeout_s:g} s"
            return error.message
        return ""
