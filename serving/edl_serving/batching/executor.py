"""One batch from inputs to answers: merge, predict, check, split, encode."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence

import numpy as np

from edl.errors import ProtocolError
from edl.protocol.tensors import dtype_of, with_objects
from edl.protocol.transport import grpc
from edl_serving.backends.backend import Array, Backend, TensorSpec
from edl_serving.backends.input_writes import complains_of_read_only, log_copies
from edl_serving.batching.fork_guard import end_if_forked
from edl_serving.batching.job import Job
from edl_serving.messages.response import encode_answer
from edl_serving.model import Model
from edl_serving.monitoring.log_throttle import Complaints
from edl_serving.monitoring.metrics import WorkerMetrics
from edl_serving.request_error import Refusal, clip, quote
from edl_serving.settings import ServerSettings

__all__ = ["Executor", "ModelFault"]

_log = logging.getLogger(__name__)


class ModelFault(Exception):
    """The model, not the request, is at fault.

    Attributes:
        kind: "exception", "output" or "nan".
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Executor:
    """Computes batches on one backend. Used by one thread at a time."""

    def __init__(self, backend: Backend, model: Model, settings: ServerSettings, metrics: WorkerMetrics) -> None:
        self._backend = backend
        self._model = model
        self._max_batch_rows = settings.max_batch_rows
        self._check_nan = settings.check_nan
        self._metrics = metrics
        self._buffers = [np.empty(0, np.uint8) for _ in model.inputs]
        self._complaints = Complaints(_log)
        self._pid = os.getpid()

    def run(self, jobs: Sequence[Job]) -> None:
        """Set the answer of every job that somebody still waits for. Raises nothing.

        When the model fails on several requests together, each is computed once more alone, so that only the ones at
        fault are answered with the error.
        """
        self.step(jobs)
        while len(jobs) == 1 and jobs[0].unfinished:
            self.step(jobs)

    def step(self, jobs: Sequence[Job]) -> None:
        """As `run`, but of a single job with more rows than a batch only the next part: see `Job.unfinished`."""
        jobs = [job for job in jobs if not job.cancelled]
        if not jobs:
            return
        if len(jobs) > 1 and sum(job.rows for job in jobs) > self._max_batch_rows:
            for job in jobs:
                self.run([job])
            return
        try:
            outputs = self._compute(jobs)
            if outputs is None:
                return
        except ModelFault as fault:
            if len(jobs) > 1:
                self._complaints.add(
                    "batch",
                    f"model {self._model.name!r} {fault}; its batch of {len(jobs)} requests is computed one by one",
                    fault.__cause__,
                )
                for job in jobs:
                    if job.deadline > time.monotonic():
                        self.run([job])
            else:
                jobs[0].answer = self._blame(fault, jobs[0])
            return
        at = 0
        for job in jobs:
            rows = job.rows
            part = outputs if len(jobs) == 1 else {name: array[at : at + rows] for name, array in outputs.items()}
            at += rows
            try:
                self._refuse_nan(job, part)
                job.answer = encode_answer(self._model, job.request, part, job.id_bytes)
            except ModelFault as fault:
                job.answer = self._blame(fault, job)
            except Refusal as refusal:
                job.answer = refusal

    def _compute(self, jobs: Sequence[Job]) -> Mapping[str, Array] | None:
        rows = sum(job.rows for job in jobs)
        if rows > self._max_batch_rows:
            return self._compute_part(jobs[0])
        if len(jobs) == 1:
            return self._predict_views(jobs[0].request.arrays, rows)
        return self._predict(self._merge(jobs, rows), rows)

    def _compute_part(self, job: Job) -> Mapping[str, Array] | None:
        """The outputs of a job that is larger than a batch, None if there are parts to come."""
        at = job.done
        part = [array[at : at + self._max_batch_rows] for array in job.request.arrays]
        whole: dict[str, Array] = job.partial if at else {}
        for name, output in self._predict_views(part, len(part[0])).items():
            if at == 0:
                whole[name] = np.empty((job.rows, *output.shape[1:]), output.dtype)
            elif output.shape[1:] != whole[name].shape[1:] or output.dtype != whole[name].dtype:
                raise ModelFault("output", f"output {name!r} changes its shape between parts of one request")
            whole[name][at : at + len(output)] = output
        job.done, job.partial = at + len(part[0]), whole
        if job.done < job.rows:
            return None
        job.partial = None
        return whole

    def _merge(self, jobs: Sequence[Job], rows: int) -> list[Array]:
        """The jobs' inputs one after the other, in buffers that are used again: fresh ones would cost page faults."""
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

    def _predict_views(self, arrays: Sequence[Array], rows: int) -> Mapping[str, Array]:
        """As `_predict`, of memory that belongs to a message or a student."""
        if self._backend.writes_inputs:
            return self._predict([array.copy() for array in arrays], rows)
        try:
            return self._predict(arrays, rows)
        except ModelFault as fault:
            if fault.__cause__ is None or not complains_of_read_only(fault.__cause__):
                raise
        self._backend.writes_inputs = True  # which its warm-up did not show
        log_copies()
        return self._predict([array.copy() for array in arrays], rows)

    def _predict(self, arrays: Sequence[Array], rows: int) -> Mapping[str, Array]:
        inputs = {spec.name: array for spec, array in zip(self._model.inputs, arrays, strict=True)}
        started = time.perf_counter()
        try:
            outputs = self._backend.predict(inputs)
            end_if_forked(self._pid)
        except BaseException as exc:
            end_if_forked(self._pid)
            raise ModelFault("exception", f"raised {type(exc).__name__}: {clip(str(exc), 500)}") from exc
        finally:
            self._metrics.computed(rows, time.perf_counter() - started)
        if not isinstance(outputs, Mapping):
            raise ModelFault("output", f"returned {type(outputs).__name__}, not a mapping of names to arrays")
        return {spec.name: _checked(spec, outputs.get(spec.name), rows) for spec in self._model.outputs}

    def _refuse_nan(self, job: Job, outputs: Mapping[str, Array]) -> None:
        if not self._check_nan:
            return
        for name in {wanted.spec.name for wanted in job.request.plan.outputs}:
            array = outputs[name]
            # `min` hands NaN on, and is done in half the time of a look at each.
            if array.dtype.kind == "f" and array.size and np.isnan(array.min()):
                row = int(np.isnan(array).reshape(len(array), -1).any(1).argmax())
                raise ModelFault("nan", f"output {name!r} has NaN in row {row} of {len(array)}")

    def _blame(self, fault: ModelFault, job: Job) -> Refusal:
        cause = fault.__cause__
        self._metrics.faulted(fault.kind)
        self._complaints.add(
            type(cause or fault).__name__ + fault.kind, f"model {self._model.name!r}: {fault}{job.origin}", cause
        )
        return Refusal(grpc.StatusCode.INTERNAL, f"model {quote(self._model.name)}: {fault}")


def _checked(spec: TensorSpec, output: object, rows: int) -> Array:
    """The output, if it is what the model promised."""
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
