"""The real Triton, whose own clients do not notice students that borrow it: in the same minute with us and without.

Its model sleeps, so that what is measured is how Triton orders requests, on however few cores. Clients and server run
with a real-time scheduler where this user may have one: else other processes of the machine would be measured as well.
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
import pytest
import tritonclient.grpc as triton_client

from edl.distill import DistillReader, Options
from edl.distill.teachers import Teachers
from edl.distill.transport.priority import Priority, RequestPriority
from tests.plugins_triton import TritonFactory, TritonServer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

MAX_BATCH = 16
REQUESTS = 110  # of the server's own clients in a round; the p99 of all rounds is that of twice as many
ROUNDS = 2
ALLOWED = 1.2
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
    """How long a batch takes, and how large its own clients' requests are."""

    execution_s: float
    row_s: float
    rows: int

    @property
    def request_s(self) -> float:
        return self.execution_s + self.row_s * self.rows


@pytest.fixture(autouse=True)
def _undisturbed() -> Iterator[None]:
    before = os.sched_getscheduler(0), os.sched_getparam(0)
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(10))
    yield
    os.sched_setscheduler(0, *before)


def start(triton: TritonFactory, model: Model, config: str = CONFIG + LEVELS) -> TritonServer:
    source = SOURCE.replace("EXECUTION_S", str(model.execution_s)).replace("ROW_S", str(model.row_s))
    return triton.start_repository("online", "1", source, config)


def ask_as_its_clients(endpoint: str, model: Model, seed: int) -> list[float]:
    """Send requests at random moments, half of what the server can do one by one. Returns the latencies in seconds."""
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
    """A student that takes what it gets, as fast as it comes. Yields the rows of its batches."""
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
    return float(np.percentile(latencies, 99, method="lower"))


@pytest.mark.parametrize(
    ("model", "priority"),
    [(Model(0.04, 0.0, 1), "auto"), (Model(0.01, 0.005, 4), "lowest")],
    ids=["a batch takes its time", "each row takes its time"],
)
def test_own_clients_do_not_notice(triton: TritonFactory, model: Model, priority: Priority) -> None:
    server = start(triton, model)
    alone: list[float] = []
    beside: dict[Priority, list[float]] = {priority: [], "default": []}
    labelled: dict[Priority, int] = {priority: 0, "default": 0}
    ask_as_its_clients(server.endpoint, model, 0)
    for seed in range(ROUNDS):
        alone += ask_as_its_clients(server.endpoint, model, seed)
        for wanted, latencies in beside.items():
            with student(server.endpoint, wanted) as rows:
                before = sum(rows)
                latencies += ask_as_its_clients(server.endpoint, model, seed)
                labelled[wanted] += sum(rows) - before
    ratios = {wanted: p99(latencies) / p99(alone) for wanted, latencies in beside.items()}
    print(f"p99 alone {1000 * p99(alone):.0f} ms; beside students, by that: {ratios}; rows labelled: {labelled}")
    assert ratios[priority] <= ALLOWED
    assert ratios["default"] > 1.5, "without priority they do notice: else this test shows nothing"
    assert labelled[priority] >= ROUNDS * MAX_BATCH, "and the student got something"
    server.stop()


def test_priority_that_does_not_fit(
    triton: TritonFactory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A model without levels, a level beyond them, and a server that is configured anew: labels come all the same."""
    quick = Model(0.002, 0.0, 1)
    server = start(triton, quick, CONFIG)
    for priority in ("auto", "lowest", 7):
        with student(server.endpoint, priority) as rows:
            assert rows[0] == MAX_BATCH
    assert "it has no priority levels: priority=7 has no effect" in caplog.text
    assert "its own clients wait behind requests of ours" in caplog.text
    server.stop()
    server = start(triton, quick)
    with student(server.endpoint, 9):
        assert "it has 2 priority levels, and priority=9 is asked for: 2 is used" in caplog.text
    # Requests whose level the server does not know, as after a restart that the connection did not notice.
    monkeypatch.setattr(
        "edl.distill.transport.client.choose_priority", lambda *args, **rest: RequestPriority(level=1_000_000)
    )
    with student(server.endpoint, "auto") as rows:
        assert rows[0] == MAX_BATCH
    server.stop()
