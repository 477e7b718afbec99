"""Students of the real Triton: shared memory, sizes of requests, versions that it loads meanwhile, its own clients."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as tritonclient

from benchmarks._borrowed import MAX_BATCH, Model, student
from benchmarks._borrowed import start as start_online
from edl.distill import DistillReader, Options, Teachers
from edl.distill.cache import SoftLabelCache
from edl.distill.transport.schema import RequestPriority
from edl.errors import NoTeacherError
from tests.fast.distill.reading import sample
from tests.fast.distill.teachers.test_versions import kept, scales
from tests.fast.distill.transport.test_lost_memory import (
    check,
    clients,
    lose_memory_in_an_epoch,
    reader_of,
    registered_names,
)
from tests.plugins_triton import TritonFactory, TritonServer
from tests.waiting import DEADLINE_S, wait_until

TEACHER = {"output": "logits", "model": "teacher"}


@pytest.fixture(scope="module")
def row_sums(triton: TritonFactory) -> Iterator[TritonServer]:
    """A Triton of model `teacher`, x:FP32[4] -> logits:FP32[10], which takes 20 rows in a request."""
    server = triton.start(max_batch=20)
    yield server
    server.stop()


def test_memory_lost_in_mid_epoch(row_sums: TritonServer) -> None:
    lose_memory_in_an_epoch(row_sums.endpoint, **TEACHER)


def test_it_lets_go_when_readers_close(row_sums: TritonServer) -> None:
    for number in range(3):
        with reader_of(row_sums.endpoint, **TEACHER) as reader:
            epoch = reader()
            for _ in itertools.islice(epoch, 30):  # number 1 is closed with requests under way
                pass
            if number != 1:
                list(epoch)
            assert registered_names(reader), "shared memory was to be in use"
        with tritonclient.InferenceServerClient(row_sums.endpoint) as other:
            left = other.get_system_shared_memory_status(as_json=True)
            assert not left.get("regions"), f"Triton keeps it for ever: {left}"


def test_restarted_while_idle(triton: TritonFactory) -> None:
    """gRPC connects again by itself, to a server that knows nothing of the memory."""
    server = triton.start()
    with reader_of(server.endpoint, **TEACHER) as reader:
        check(list(reader()))
        server.stop()
        server = triton.start(port=server.port)
        check(list(reader()))
        assert all(client.shares_memory for client in clients(reader))
    server.stop()


def test_its_max_batch_size_is_kept(row_sums: TritonServer) -> None:
    def batch_of(rows: int) -> tuple[Any, Any]:
        return np.repeat(np.arange(rows)[:, None], 4, 1).astype("f4"), np.arange(rows)

    def reader(**settings: Any) -> DistillReader:
        teachers = Teachers(endpoints=(row_sums.endpoint,), model="teacher")
        return DistillReader(["x", None], ["logits"], teachers=teachers, **settings)

    with reader() as made:
        for rows, (_, numbers, labels) in zip(
            (50, 7), made.set_batch_generator(lambda: [batch_of(50), batch_of(7)])(), strict=True
        ):
            assert labels.shape == (rows, 10)
            assert (labels[:, 0] == 4 * numbers).all()
    with reader() as made:
        made.set_sample_generator(lambda: ((row, number) for number, row in enumerate(batch_of(45)[0])))
        assert [label[0] for *_, label in made()] == [4 * number for number in range(45)]
    words = r"of 32 rows within 1 s.*accepts up to 20 rows: set batch_rows"
    made = reader(teacher_batch_size=32, options=Options(teacher_timeout_s=1))
    with made.set_batch_generator(lambda: [batch_of(50)]), pytest.raises(NoTeacherError, match=words):
        list(made())


# Versions, which it loads and unloads while it serves, and which its answers name.

ROWS = 80
MODEL = """
import triton_python_backend_utils as pb


class TritonPythonModel:
    def initialize(self, args):
        self.scale = float(args["model_version"])

    def execute(self, requests):
        rows = [pb.get_input_tensor_by_name(request, "x").as_numpy() for request in requests]
        return [pb.InferenceResponse([pb.Tensor("y", (x * self.scale).astype("float32"))]) for x in rows]
"""
CONFIG = """
backend: "python"
max_batch_size: 65536
input [{name: "x" data_type: TYPE_FP32 dims: [4]}]
output [{name: "y" data_type: TYPE_FP32 dims: [4]}]
"""


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    # Who asks the teachers for their version gives up after a second, and stays with the one that it knows.
    monkeypatch.setattr("edl.distill.engine.engine._REFRESH_TIMEOUT_S", DEADLINE_S)


def test_an_answer_is_kept_under_its_version(triton: TritonFactory, caplog: pytest.LogCaptureFixture) -> None:
    """Triton replaces version 1 by version 2 in the middle of an epoch."""
    server, replaced = triton.start_repository("bert", "1", MODEL, CONFIG), threading.Event()

    def rows() -> Iterator[Any]:
        yield from map(sample, range(1, ROWS // 2 + 1))
        assert replaced.wait(DEADLINE_S)
        yield from map(sample, range(ROWS // 2 + 1, ROWS + 1))

    cache = SoftLabelCache()
    reader = DistillReader(
        ["x", None], ["y"], teachers=server.endpoint, teacher_batch_size=4, cache=cache, id_field=1
    ).set_sample_generator(rows)
    with cache, reader:
        epoch = reader()
        first = list(itertools.islice(epoch, ROWS // 2))
        server.replace_version("1", "2")
        replaced.set()
        assert [scales(first), scales(list(epoch))] == [{1}, {2}]
        assert caplog.text.count("labels of two models are mixed") == 1, "that versions are mixed is said, and once"
        wait_until(lambda: kept(cache) == {"1": {1}, "2": {2}}, "each under its own")
        for _ in range(2):
            assert scales(list(reader())) == {2}, "the next epoch is of the version that is there"
            assert reader.stats().rows_asked == ROWS * 3 // 2, "what that has labelled is not asked for again"
    server.kill()


# Its own clients, which students may borrow it from; `benchmarks/borrowed_triton.py` measures how long they wait.

QUICK = Model(0.002, 0.0, 1)


def test_own_clients_are_served_beside(
    triton: TritonFactory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server = start_online(triton, QUICK)
    with student(server.endpoint, 9) as rows, tritonclient.InferenceServerClient(server.endpoint) as client:
        assert "it has 2 priority levels, but priority=9 is requested: 2 is used" in caplog.text
        x = tritonclient.InferInput("x", [1, 4], "FP32")
        for number in range(20):
            x.set_data_from_numpy(np.full((1, 4), number, np.float32))
            assert (client.infer("online", [x]).as_numpy("y") == number).all()
        assert rows
    # Requests whose level the server does not know, as after a restart that the connection did not notice.
    choose = "edl.distill.transport.calls.choose_priority"
    monkeypatch.setattr(choose, lambda *args, **rest: RequestPriority(level=1_000_000))
    with student(server.endpoint, "auto") as rows:
        assert rows[0] == MAX_BATCH
    server.stop()
