"""Executes a batch: merges the inputs, calls the model, checks and splits the outputs, and encodes the responses."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from edl.errors import ProtocolError
from edl.protocol import names
from edl.protocol.tensors import Array, dtype_of, with_objects
from edl.protocol.transport import grpc
from edl.quoting import clip, quote
from edl_serving.backends.backend import Backend, TensorSpec, TopKArrays, is_read_only_error, warn_of_copies
from edl_serving.batching.batch_queue import InferenceJob
from edl_serving.model import ServedModel
from edl_serving.monitoring import WorkerMetrics
from edl_serving.request import encode_response
from edl_serving.request_error import RequestError
from edl_serving.request_plan import RequestPlan
from edl_serving.settings import ServerSettings

_log = logging.getLogger(__name__)


class ModelFault(Exception):
    """A fault of the model rather than of the request; `kind` is "exception", "output" or "nan"."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Executor:
    """Computes batches on a backend. Call it from one thread at a time."""

    def __init__(self, backend: Backend, model: ServedModel, settings: ServerSettings, metrics: WorkerMetrics) -> None:
        self.backend = backend
        self._model = model
        self._max_batch_rows = settings.max_batch_rows
        self._check_nan = settings.check_nan
        self.metrics = metrics
        self._buffers = [np.empty(0, np.uint8) for _ in model.inputs]
        self._throttle = LogThrottle(_log)

    def run_jobs(self, jobs: Sequence[InferenceJob]) -> None:
        """Set the answers of jobs that are not cancelled; never raise. If a batch fails, run its jobs one by one."""
        self.run_next_part(jobs)
        while len(jobs) == 1 and jobs[0].unfinished:
            self.run_next_part(jobs)

    def run_next_part(self, jobs: Sequence[InferenceJob]) -> None:
        """Do the same as `run_jobs`, but compute only the next part of a job that is larger than a batch."""
        jobs = [job for job in jobs if not job.cancelled]
        if not jobs:
            return
        if len(jobs) > 1 and sum(job.rows for job in jobs) > self._max_batch_rows:
            for job in jobs:
                self.run_jobs([job])
            return
        try:
            outputs = self._compute(jobs)
            if outputs is None:
                return
        except RequestError as error:
            # UNAVAILABLE concerns the backend: asking again for each job would only load a full engine more. Any other
            # error may be caused by one request, and the other requests should still be answered.
            if len(jobs) > 1 and error.code is not grpc.StatusCode.UNAVAILABLE:
                self._run_alone(jobs)
                return
            for job in jobs:
                job.answer = error.with_traceback(None)
            return
        except ModelFault as fault:
            if len(jobs) > 1:
                self._throttle.log_error(
                    "batch",
                    f"model {self._model.name!r} {fault}; the {len(jobs)} requests of this batch run one by one",
                    fault.__cause__,
                )
                self._run_alone(jobs)
            else:
                jobs[0].answer = self._report_fault(fault, jobs[0])
            return
        at = 0
        for job in jobs:
            rows = job.rows
            part = outputs if len(jobs) == 1 else {name: array[at : at + rows] for name, array in outputs.items()}
            at += rows
            try:
                self._check_for_nan(job, part)
                job.answer = encode_response(self._model, job.request, part, job.join)
            except ModelFault as fault:
                job.answer = self._report_fault(fault, job)
            except RequestError as error:
                job.answer = error.with_traceback(None)  # the traceback's frames hold the job

    def _run_alone(self, jobs: Sequence[InferenceJob]) -> None:
        for job in jobs:
            if job.deadline > time.monotonic():
                self.run_jobs([job])

    def _compute(self, jobs: Sequence[InferenceJob]) -> Mapping[str, Array] | None:
        rows = sum(job.rows for job in jobs)
        plan = jobs[0].request.plan
        if rows > self._max_batch_rows:
            return self._compute_part(jobs[0])
        if len(jobs) == 1:
            return self._predict_views(jobs[0].request.arrays, rows, plan)
        k = max(job.request.plan.options.top_k or 1 for job in jobs)
        return self._predict(self._merge(jobs, rows), rows, plan, k)

    def _part_end(self, job: InferenceJob) -> int:
        """Return the row at which a job's next part ends: a full batch, or less to keep the last sequence whole."""
        end = min(job.done + self._max_batch_rows, job.rows)
        if self._model.sequence_input is None or end == job.rows:
            return end
        index = [tensor.spec.name for tensor in job.request.plan.inputs].index(self._model.sequence_input)
        starts = np.flatnonzero(job.request.arrays[index][job.done + 1 : end + 1] == 0)
        return job.done + 1 + int(starts[-1])  # never empty, since no sequence is longer than a batch

    def _compute_part(self, job: InferenceJob) -> Mapping[str, Array] | None:
        """Compute the next part of a job that is larger than a batch; return None unless it was the last part."""
        at = job.done
        end = self._part_end(job)
        part = [array[at:end] for array in job.request.arrays]
        whole: dict[str, Array] = job.partial if at else {}
        for name, output in self._predict_views(part, end - at, job.request.plan).items():
            if at == 0:
                whole[name] = np.empty((job.rows, *output.shape[1:]), output.dtype)
            elif output.shape[1:] != whole[name].shape[1:] or output.dtype != whole[name].dtype:
                raise ModelFault("output", f"output {name!r} changes its shape between parts of one request")
            whole[name][at : at + len(output)] = output
        job.done = end
        job.partial = whole
        if job.done < job.rows:
            return None
        job.partial = None
        return whole

    def _merge(self, jobs: Sequence[InferenceJob], rows: int) -> list[Array]:
        """Concatenate the jobs' inputs in reused buffers, because new buffers would cause page faults."""
        merged = []
        for index, first in enumerate(jobs[0].request.arrays):
            shape = (rows, *first.shape[1:])
            if first.dtype == object:
                target = np.empty(shape, object)
            else:
                nbytes = first.itemsize * int(np.prod(shape))
                if len(self._buffers[index]) < nbytes:
                    self._buffers[index] = np.empty(nbytes, np.uint8)
                target = self._buffers[index][:nbytes].view(first.dtype).reshape(shape)
            merged.append(np.concatenate([job.request.arrays[index] for job in jobs], out=target))
        return merged

    def _predict_views(self, arrays: Sequence[Array], rows: int, plan: RequestPlan) -> Mapping[str, Array]:
        """Call `_predict` with arrays that are views of a message or of a student's shared memory."""
        k = plan.options.top_k or 1
        if self.backend.writes_inputs:
            return self._predict([array.copy() for array in arrays], rows, plan, k)
        try:
            return self._predict(arrays, rows, plan, k)
        except ModelFault as fault:
            if fault.__cause__ is None or not is_read_only_error(fault.__cause__):
                raise
        self.backend.writes_inputs = True  # the warm-up did not show this
        warn_of_copies()
        return self._predict([array.copy() for array in arrays], rows, plan, k)

    def _predict(self, arrays: Sequence[Array], rows: int, plan: RequestPlan, k: int) -> Mapping[str, Array]:
        """Call the model with the inputs of `plan`, or the merged inputs of plans that share a batch with it."""
        inputs = {tensor.spec.name: array for tensor, array in zip(plan.inputs, arrays, strict=True)}
        started = time.perf_counter()
        self.metrics.computing_since_s = time.monotonic()
        outputs: Mapping[str, Array | TopKArrays]
        try:
            if self._model.max_top_k is None:
                outputs = self.backend.predict(inputs)
            else:
                outputs = self.backend.predict_top_k(inputs, k, plan.options.temperature)
        except BaseException as exc:
            if isinstance(exc, RequestError):
                raise
            raise ModelFault("exception", f"raised {type(exc).__name__}: {clip(str(exc), 500)}") from exc
        finally:
            self.metrics.computing_since_s = None
            self.metrics.record_batch(rows, time.perf_counter() - started)
        if not isinstance(outputs, Mapping):
            raise ModelFault("output", f"returned {type(outputs).__name__}, not a mapping of names to arrays")
        checked: dict[str, Array] = {}
        for spec in self._model.outputs_of(inputs):
            if spec.name in self._model.top_k_outputs:
                checked.update(_check_top_k(spec, outputs.get(spec.name), rows, k))
            else:
                checked[spec.name] = _check_output(spec, outputs.get(spec.name), rows)
        return checked

    def _check_for_nan(self, job: InferenceJob, outputs: Mapping[str, Array]) -> None:
        if not self._check_nan:
            return
        wanted = {output.spec.name for output in job.request.plan.outputs}
        for name in wanted & self._model.top_k_outputs:
            wanted = (wanted - {name}) | {*names.top_k_names(name)}
        for name in wanted:
            array = outputs[name]
            # `min` propagates NaN, and takes half the time of checking each value.
            if array.dtype.kind == "f" and array.size and np.isnan(array.min()):
                row = int(np.isnan(array).reshape(len(array), -1).any(1).argmax())
                raise ModelFault("nan", f"output {name!r} has NaN in row {row} of {len(array)}")

    def _report_fault(self, fault: ModelFault, job: InferenceJob) -> RequestError:
        cause = fault.__cause__
        self.metrics.faults[fault.kind] += 1
        self._throttle.log_error(
            type(cause or fault).__name__ + fault.kind, f"model {self._model.name!r}: {fault}{job.origin}", cause
        )
        return RequestError(grpc.StatusCode.INTERNAL, f"model {quote(self._model.name)}: {fault}")


def _check_top_k(spec: TensorSpec, output: object, rows: int, k: int) -> dict[str, Array]:
    """Return the parts of a top-k output, keyed by their names in the response; raise if they do not match the spec."""
    if output is not None and not isinstance(output, TopKArrays):
        raise ModelFault("output", f"output {spec.name!r} is a {type(output).__name__}, not TopKArrays")
    leading = spec.shape[:-1]
    kinds = (("INT32", (*leading, k)), (spec.datatype, (*leading, k)), ("FP32", leading))
    parts = output or (None, None, None)
    return {
        name: _check_output(TensorSpec(name, datatype, shape), part, rows)
        for name, part, (datatype, shape) in zip(names.top_k_names(spec.name), parts, kinds, strict=True)
    }


def _check_output(spec: TensorSpec, output: object, rows: int) -> Array:
    if output is None:
        raise ModelFault("output", f"output {spec.name!r} is missing")
    if not isinstance(output, np.ndarray):
        raise ModelFault("output", f"output {spec.name!r} is a {type(output).__name__}, not a numpy array")
    if spec.datatype == "BYTES":
        if output.dtype.kind not in "SUO" or (
            output.dtype.kind == "O" and not all(isinstance(item, (str, bytes)) for item in output.reshape(-1))
        ):
            raise ModelFault("output", f"output {spec.name!r} has elements that are neither str nor bytes")
        try:
            output = with_objects(output)
        except ProtocolError as exc:
            raise ModelFault("output", f"output {spec.name!r}: {exc}") from exc
    elif output.dtype != dtype_of(spec.datatype):
        raise ModelFault("output", f"output {spec.name!r} is {output.dtype}, not {dtype_of(spec.datatype)}")
    wanted = (rows, *spec.shape)
    if output.shape != wanted and not (
        len(output.shape) == len(wanted)
        and all(size == want or want == -1 for size, want in zip(output.shape, wanted, strict=True))
    ):
        raise ModelFault("output", f"output {spec.name!r} has shape {list(output.shape)}, not {list(wanted)}")
    return output


_EVERY_S = 10.0  # at most 9,000 lines a day, but often enough to see that the fault persists


class LogThrottle:
    """Logs the first fault of each kind in full, and then at most one line with a count every ten seconds."""

    def __init__(self, log: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._clock = clock
        self._logged: dict[str, tuple[float, int]] = {}  # kind -> when a line was written, faults since

    def log_error(self, kind: str, message: str, exc: BaseException | None = None) -> None:
        now = self._clock()
        if kind not in self._logged:
            self._logged[kind] = (now, 0)
            self._log.error("%s", message, exc_info=exc)
            return
        written_at, since = self._logged[kind]
        since += 1
        if now - written_at < _EVERY_S:
            self._logged[kind] = (written_at, since)
            return
        self._logged[kind] = (now, 0)
        self._log.error("%s (%d faults of this kind in %.0f s)", message, since, now - written_at)
