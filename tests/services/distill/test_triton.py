"""Students of the real Triton: shared memory, sizes of requests, versions that it loads meanwhile, its own clients."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as tritonclient

from benchmarks._borrowed import MAX_BATCH, Model, student
from benchmarks._borrowed import start as start_online
from edl.cli.label import main
from edl.distill import DistillReader, Options, Teachers
from edl.distill.cache import SoftLabelCache, load_labels
from edl.distill.transport.schema import RequestPriority
from edl.errors import NoTeacherError
from tests.fast.distill.reading import sample, why_unused
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
    words = r"of 32 rows within 1 s, and 20 rows are what .*: set batch_rows"
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
version_policy: {latest: {num_versions: 2}}
"""


class Bert:
    """A Triton whose labels are the inputs times its latest version's number."""

    def __init__(self, server: TritonServer) -> None:
        self.server, self.latest = server, 1

    def add_version(self, *, replacing: bool) -> None:
        old, self.latest = self.latest, self.latest + 1
        self.server.add_version(str(self.latest), instead_of=str(old) if replacing else "")


@pytest.fixture(scope="module")
def bert(triton: TritonFactory) -> Iterator[Bert]:
    server = triton.start_repository("bert", "1", MODEL, CONFIG)
    yield Bert(server)
    server.kill()


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    # Who asks the teachers for their version gives up after a second, and stays with the one that it knows.
    monkeypatch.setattr("edl.distill.engine.engine._REFRESH_TIMEOUT_S", DEADLINE_S)


def bert_reader(
    bert: Bert, cache: SoftLabelCache | None = None, rows: Callable[[], Iterator[Any]] | None = None, **settings: Any
) -> DistillReader:
    if cache is not None:
        settings |= {"cache": cache, "id_field": 1}
    reader = DistillReader(["x", None], ["y"], teachers=bert.server.endpoint, teacher_batch_size=4, **settings)
    return reader.set_sample_generator(rows or (lambda: map(sample, range(1, ROWS + 1))))


class Halves:
    """A source whose second half comes when the version has been replaced."""

    def __init__(self, bert: Bert) -> None:
        self._bert, self._replaced = bert, threading.Event()

    def rows(self) -> Iterator[Any]:
        for number in range(1, ROWS + 1):
            if number == ROWS // 2 + 1:
                assert self._replaced.wait(DEADLINE_S)
            yield sample(number)

    def read(self, reader: DistillReader) -> Iterator[Any]:
        epoch = reader()
        for _ in range(ROWS // 2):
            yield next(epoch)
        self._bert.add_version(replacing=True)
        self._replaced.set()
        yield from epoch


def test_an_answer_is_kept_under_its_version(bert: Bert, caplog: pytest.LogCaptureFixture) -> None:
    before, halves = bert.latest, Halves(bert)
    with SoftLabelCache() as cache, bert_reader(bert, cache, halves.rows) as reader:
        rows = list(halves.read(reader))
        assert [scales(rows[: ROWS // 2]), scales(rows[ROWS // 2 :])] == [{before}, {before + 1}]
        assert caplog.text.count("labels of two models are mixed") == 1, "that versions are mixed is said, and once"
        wait_until(lambda: kept(cache) == {str(before): {before}, str(before + 1): {before + 1}}, "each under its own")
        for _ in range(2):
            assert scales(list(reader())) == {before + 1}, "the next epoch is of the version that is there"
            assert reader.stats().rows_asked == ROWS * 3 // 2, "what that has labelled is not asked for again"


def test_a_pinned_version_is_the_only_one(bert: Bert, tmp_path: Path) -> None:
    bert.add_version(replacing=False)
    for version, scale in (("", bert.latest), (str(bert.latest - 1), bert.latest - 1), (str(bert.latest), bert.latest)):
        with SoftLabelCache() as cache:
            with bert_reader(bert, cache, version=version) as reader:
                for _ in range(2):
                    assert scales(list(reader())) == {scale}, f"version={version!r}"
                assert reader.stats().rows_asked == ROWS
            wait_until(lambda scale=scale, cache=cache: kept(cache) == {str(scale): {scale}})  # type: ignore[misc]
    why_unused(bert_reader(bert, version="777"), "of model 'bert', and version='777' is asked for")
    np.save(tmp_path / "x.npy", np.repeat(np.arange(ROWS, dtype=np.float32)[:, None], 4, axis=1))
    command = [str(tmp_path / "x.npy"), "--teachers", bert.server.endpoint, "--inputs", "x", "--outputs", "y"]
    command += ["--output", str(tmp_path / "labels"), "--model-version", str(bert.latest - 1)]
    assert main(command) == 0
    labels = load_labels(tmp_path / "labels")
    assert labels.key.version == str(bert.latest - 1)
    assert labels.rows([7])["y"][0, 0] == 7.0 * (bert.latest - 1)  # type: ignore[index]


# Its own clients, which students may borrow it from; `benchmarks/borrowed_triton.py` measures how long they wait.

QUICK = Model(0.002, 0.0, 1)


def test_own_clients_are_served_beside(
    triton: TritonFactory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server = start_online(triton, QUICK)
    with student(server.endpoint, 9) as rows, tritonclient.InferenceServerClient(server.endpoint) as client:
        assert "it has 2 priority levels, and priority=9 is asked for: 2 is used" in caplog.text
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
