"""The real Triton, whose answers name the version that they are of, and which loads another one while it serves."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edl.cli.cmd_label import main
from edl.distill import DistillReader, Options
from edl.distill.cache import SoftLabelCache, load_labels
from edl.distill.teachers import Teachers
from edl.errors import BadOutputError, EDLError, NoTeacherError
from tests.fast.distill.reading import words_of_failure
from tests.plugins_triton import TritonFactory, TritonServer

ROWS = 80
MODEL = """
import triton_python_backend_utils as pb


class TritonPythonModel:
    def initialize(self, args):
        self.scale = float(args["model_version"]) * SCALE

    def execute(self, requests):
        rows = [pb.get_input_tensor_by_name(request, "x").as_numpy() for request in requests]
        return [pb.InferenceResponse([pb.Tensor("y", (x * self.scale).astype("float32"))]) for x in rows]
"""
CONFIG = """
backend: "python"
max_batch_size: 32
input [{name: "x" data_type: TYPE_FP32 dims: [4]}]
output [{name: "y" data_type: TYPE_FP32 dims: [4]}]
version_policy: {latest: {num_versions: 2}}
"""

Start = Callable[..., TritonServer]


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    # Who asks the teachers for their version gives up after a second, and stays with the one that it knows.
    monkeypatch.setattr("edl.distill.engine.engine._REFRESH_TIMEOUT_S", 20.0)


@pytest.fixture
def bert(triton: TritonFactory) -> Iterator[Start]:
    started: list[TritonServer] = []

    def start(scale: float = 1.0) -> TritonServer:
        source = MODEL.replace("SCALE", str(scale))
        started.append(triton.start_repository("bert", "1", source, CONFIG))
        return started[-1]

    yield start
    for server in started:
        server.kill()


def source(pause_at: int = ROWS, go_on: threading.Event | None = None) -> Callable[[], Iterator[Any]]:
    def samples() -> Iterator[Any]:
        for number in range(ROWS):
            if number == pause_at and go_on is not None:
                assert go_on.wait(60)
            yield np.full(4, number, np.float32), number

    return samples


def reader_of(teachers: Any, cache: SoftLabelCache | None = None, **arguments: Any) -> DistillReader:
    arguments.setdefault("options", Options(teacher_timeout_s=30))
    if cache is not None:
        arguments |= {"cache": cache, "id_field": 1}
    return DistillReader(["x", None], ["y"], teachers=teachers, teacher_batch_size=4, **arguments)


def scales(rows: list[Any], output: int = 2) -> set[float]:
    """What the labels of these rows were multiplied with; 0 tells nothing."""
    return {float(row[output][0]) / row[1] for row in rows if row[1]}


def kept(cache: SoftLabelCache) -> dict[tuple[str, str], set[float]]:
    """For each service and version in the cache, the scales of its labels."""
    found: dict[tuple[str, str], set[float]] = {}
    for key in cache.keys():  # noqa: SIM118 - not a mapping
        view = cache.view(key)
        ids = [number for number in view.ids() if number]
        labels: Any = view.get(ids).outputs["y"]
        found[key.service, key.version] = {float(y[0]) / int(number) for number, y in zip(ids, labels, strict=True)}
    return found


def replaced_within_an_epoch(server: TritonServer, reader: DistillReader, go_on: threading.Event) -> list[Any]:
    epoch = reader()
    rows = [next(epoch) for _ in range(40)]
    server.add_version("2", instead_of="1")
    go_on.set()
    return rows + list(epoch)


def test_an_answer_is_kept_under_its_version(bert: Start, caplog: pytest.LogCaptureFixture) -> None:
    server, go_on = bert(), threading.Event()
    with SoftLabelCache() as cache, reader_of(server.endpoint, cache) as reader:
        reader.set_sample_generator(source(40, go_on))
        with caplog.at_level(logging.WARNING, "edl.distill"):
            rows = replaced_within_an_epoch(server, reader, go_on)
        assert scales(rows[:40]) == {1.0}
        assert scales(rows[40:]) == {2.0}
        mixed = [record for record in caplog.records if "two versions of a model are mixed" in record.getMessage()]
        assert len(mixed) == 1, "that versions are mixed is said, and once"
        place = server.endpoint
        assert kept(cache) == {(place, "1"): {1.0}, (place, "2"): {2.0}}, "labels of version 2 are kept under 1"
        assert scales(list(reader())) == {2.0}, "the next epoch is of the version that is there"
        asked = reader.stats().rows_asked
        assert asked == ROWS + 40, "what version 2 has labelled is not asked for again"
        assert scales(list(reader())) == {2.0}
        assert reader.stats().rows_asked == asked


@pytest.mark.slow
def test_a_mixture_is_refused_where_told_to(bert: Start) -> None:
    server, go_on = bert(), threading.Event()
    options = Options(teacher_timeout_s=10, mixed_versions="refuse")
    with reader_of(server.endpoint, options=options).set_sample_generator(source(40, go_on)) as reader:
        with pytest.raises((BadOutputError, NoTeacherError), match=r"version '2'.*labels are of '1'"):
            replaced_within_an_epoch(server, reader, go_on)
        assert scales(list(reader())) == {2.0}, "the next epoch is of version 2 alone"


def test_services_of_one_version(bert: Start) -> None:
    """Services of one version are told apart."""
    first, second = bert(1.0), bert(10.0)
    groups = [Teachers(endpoints=(server.endpoint,)) for server in (first, second)]
    with SoftLabelCache() as cache, reader_of(groups, cache).set_sample_generator(source()) as reader:
        for _ in range(3):
            rows = list(reader())
            assert (scales(rows, 2), scales(rows, 3)) == ({1.0}, {10.0}), "one service's labels come from the other"
        assert reader.stats().rows_asked == 2 * ROWS
    assert first.endpoint != second.endpoint


def test_a_pinned_version_is_the_only_one(bert: Start, tmp_path: Path) -> None:
    server = bert()
    server.add_version("2")
    for version, scale in (("", 2.0), ("1", 1.0), ("2", 2.0)):
        with SoftLabelCache() as cache:
            with reader_of(server.endpoint, cache, version=version).set_sample_generator(source()) as reader:
                for _ in range(2):
                    assert scales(list(reader())) == {scale}, f"version={version!r}"
                assert reader.stats().rows_asked == ROWS
            assert kept(cache) == {(server.endpoint, version or "2"): {scale}}
    np.save(tmp_path / "x.npy", np.repeat(np.arange(ROWS, dtype=np.float32)[:, None], 4, axis=1))
    command = [str(tmp_path / "x.npy"), "--teachers", server.endpoint, "--inputs", "x", "--outputs", "y"]
    assert main([*command, "--output", str(tmp_path / "labels"), "--model-version", "1"]) == 0
    labels = load_labels(tmp_path / "labels")
    assert labels.key.version == "1"
    assert labels.rows([7])["y"][0, 0] == 7.0  # type: ignore[index]


def test_a_pinned_version_that_is_not_there(bert: Start) -> None:
    server = bert()

    def make(timeout_s: float) -> DistillReader:
        options = Options(teacher_timeout_s=timeout_s)
        return reader_of(server.endpoint, version="7", options=options).set_sample_generator(source())

    words = "has version '1' of model 'bert', and version='7' is asked for"
    assert words in words_of_failure(words, make)


def test_a_pinned_version_that_is_unloaded(bert: Start) -> None:
    server, go_on = bert(), threading.Event()
    options, rows = Options(teacher_timeout_s=3), []
    with reader_of(server.endpoint, version="1", options=options).set_sample_generator(source(40, go_on)) as reader:
        epoch = reader()
        rows += [next(epoch) for _ in range(40)]
        server.add_version("2", instead_of="1")
        go_on.set()
        with pytest.raises(EDLError):
            rows.extend(epoch)
    assert scales(rows) == {1.0}, "an error in place of a label of another version"
