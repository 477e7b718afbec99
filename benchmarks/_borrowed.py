"""An online model in a real Triton, the model's own clients, and students that borrow it.

The model sleeps, so that the benchmark measures how Triton orders requests, even on few cores. Clients and server run
under a real-time scheduler if the user may use one, so that other processes on the machine do not affect the result.
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import tritonclient.grpc as triton_client

from edl.distill import DistillReader, Options
from edl.distill.teachers import Teachers
from edl.distill.transport.schema import Priority
from tests.plugins_triton import TritonFactory, TritonServer

__all__ = ["CONFIG", "LEVELS", "MAX_BATCH", "Model", "ask_as_its_clients", "p99", "start", "student", "undisturbed"]

MAX_BATCH = 16
REQUESTS = 110
"""Requests that the model's own clients send in a round."""
SOURCE = """
import time
import triton_python_backend_utils as pb


class TritonPythonModel:
    def execute(self, requests):
        rows = [pb.get_input_tensor_by_name(request, "x").as_numpy() for request in requests]
        time.sleep(EXECUTION_S + ROW_S * sum(len(x) for x in rows))
        return [pb.InferenceResponse([pb.Tensor("y", x)]) for x in rows]
"""
CONFIG = """
backend: "python"
max_batch_size: 16
input [{name: "x" data_type: TYPE_FP32 dims: [4]}]
output [{name: "y" data_type: TYPE_FP32 dims: [4]}]
instance_group [{count: 1 kind: KIND_CPU}]
"""
LEVELS = "dynamic_batching { priority_levels: 2 default_priority_level: 1 max_queue_delay_microseconds: 1000 }\n"


@dataclass(frozen=True)
class Model:
    """The duration of a batch, and the size of a request from the model's own clients."""

    execution_s: float
    row_s: float
    rows: int

    @property
    def request_s(self) -> float:
        """Return the seconds that such a request takes by itself."""
        return self.execution_s + self.row_s * self.rows


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Run the block, and processes that it starts, with priority over all others, if the user may do so."""
    before = os.sched_getscheduler(0), os.sched_getparam(0)
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(10))
    try:
        yield
    finally:
        os.sched_setscheduler(0, *before)


def start(triton: TritonFactory, model: Model, config: str = CONFIG + LEVELS) -> TritonServer:
    """Start a Triton server with the model."""
    source = SOURCE.replace("EXECUTION_S", str(model.execution_s)).replace("ROW_S", str(model.row_s))
    return triton.start_repository("online", "1", source, config)


def ask_as_its_clients(endpoint: str, model: Model, seed: int) -> list[float]:
    """Send requests at random times, at half of the rate that the server can handle. Return latencies in seconds."""
    moments = random.Random(seed)
    latencies: list[float] = []
    answered = threading.Semaphore(0)

    def record(sent_at: float, result: Any, error: Any) -> None:
        if error is None:
            latencies.append(time.monotonic() - sent_at)
        answered.release()

    with triton_client.InferenceServerClient(endpoint) as client:
        due = time.monotonic()
        for _ in range(REQUESTS):
            due += moments.expovariate(0.5 / model.request_s)
            time.sleep(max(0.0, due - time.monotonic()))
            x = triton_client.InferInput("x", [model.rows, 4], "FP32")
            x.set_data_from_numpy(np.zeros((model.rows, 4), np.float32))
            client.async_infer("online", [x], partial(record, time.monotonic()))
        for _ in range(REQUESTS):
            assert answered.acquire(timeout=30.0), "an answer"
    assert len(latencies) == REQUESTS
    return latencies


@contextlib.contextmanager
def student(endpoint: str, priority: Priority) -> Iterator[list[int]]:
    """Run a student that takes labels as fast as they arrive, and yield the list of its batches' row counts."""
    ended = threading.Event()
    rows: list[int] = []

    def batches() -> Iterator[tuple[np.ndarray[Any, Any]]]:
        while not ended.is_set():
            yield (np.random.default_rng(len(rows)).random((MAX_BATCH, 4), np.float32),)

    def train() -> None:
        with DistillReader(
            ["x"], ["y"], teachers=Teachers(endpoints=(endpoint,), priority=priority), options=Options()
        ) as reader:
            reader.set_batch_generator(batches)
            for x, y in reader():
                np.testing.assert_array_equal(x, y)
                rows.append(len(x))

    thread = threading.Thread(target=train)
    thread.start()
    try:
        deadline = time.monotonic() + 30.0
        while not rows:
            assert time.monotonic() < deadline, "the first labels"
            time.sleep(0.01)
        yield rows
    finally:
        ended.set()
        thread.join(60.0)
    assert not thread.is_alive()


def p99(latencies: list[float]) -> float:
    """Return the latency that 99 of 100 requests do not exceed."""
    return float(np.percentile(latencies, 99, method="lower"))
