"""Servers that say little of versions: a small KServe v2 server stands in for all but Triton and ours."""

from __future__ import annotations

import logging
import multiprocessing
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edl.cli.cmd_label import main
from edl.distill import DistillReader, Options
from edl.distill.cache import SoftLabelCache
from edl.distill.dispatch.policy import Policy
from edl.errors import BadOutputError, EDLError, SettingsError
from edl.protocol import codec, kserve, names
from edl.protocol.transport import grpc
from tests.fast.distill.conftest import Start
from tests.fast.distill.reading import words_of_failure

ROWS = 40


@dataclass
class Foreign:
    """A KServe v2 server.

    Attributes:
        listed: versions in the model's metadata.
        answered: the version that the next answer names, and what it is multiplied with.
        asked: versions that requests named.
        implements_index: whether it lists its models.
    """

    listed: Sequence[str] = ()
    answered: Callable[[str], tuple[str, float]] = lambda asked: ("", 1.0)
    asked: list[str] = field(default_factory=list)
    endpoint: str = ""
    implements_index: bool = True

    def start(self) -> Foreign:
        tensor = kserve.ModelMetadataResponse.TensorMetadata
        x, y = (tensor(name=name, datatype="FP32", shape=[-1, 4]) for name in "xy")
        meta = kserve.ModelMetadataResponse(name="m", versions=self.listed, inputs=[x], outputs=[y])
        answers = {
            "ServerReady": kserve.ServerReadyResponse(ready=True),
            "ServerMetadata": kserve.ServerMetadataResponse(),
            "ModelReady": kserve.ModelReadyResponse(ready=True),
            "ModelMetadata": meta,
            "RepositoryIndex": kserve.RepositoryIndexResponse(
                models=[kserve.RepositoryIndexResponse.ModelIndex(name="m", state="READY")]
            ),
        }
        if not self.implements_index:
            del answers["RepositoryIndex"]
        handlers: dict[str, Any] = {
            name: grpc.unary_unary_rpc_method_handler(lambda _, context, answer=answer: answer.SerializeToString())
            for name, answer in answers.items()
        }
        handlers["ModelInfer"] = grpc.unary_unary_rpc_method_handler(self._infer)
        self._server = grpc.server(ThreadPoolExecutor(4))
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(names.SERVICE, handlers),))
        self.endpoint = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()
        return self

    def close(self) -> None:
        self._server.stop(0).wait()

    def _infer(self, data: bytes, context: Any) -> bytes:
        header, raw = codec.split_request(data)
        request = codec.parse_request(header)
        self.asked.append(request.model_version)
        version, scale = self.answered(request.model_version)
        x = np.frombuffer(raw[0], "<f4").reshape(-1, 4)
        answer = kserve.ModelInferResponse(model_name="m", model_version=version)
        answer.outputs.add(name="y", datatype="FP32", shape=x.shape)
        return codec.encode_response(answer, [(x * np.float32(scale)).tobytes()])


@pytest.fixture
def foreign() -> Iterator[Callable[..., Foreign]]:
    started: list[Foreign] = []

    def start(*arguments: Any, **settings: Any) -> Foreign:
        started.append(Foreign(*arguments, **settings).start())
        return started[-1]

    yield start
    for server in started:
        server.close()


def samples() -> Iterator[Any]:
    for number in range(ROWS):
        yield np.full(4, number, np.float32), number


def reader_of(teachers: Any, cache: SoftLabelCache, **arguments: Any) -> DistillReader:
    # A teacher with a wrong answer is asked again soon, and not after half a minute.
    arguments.setdefault("options", Options(teacher_timeout_s=30, policy=Policy(aside_s=0.1, open_min_s=0.1)))
    reader = DistillReader(
        ["x", None], ["y"], teachers=teachers, teacher_batch_size=4, cache=cache, id_field=1, **arguments
    )
    return reader.set_sample_generator(samples)


def scales(rows: list[Any]) -> set[float]:
    return {float(y[0]) / number for _, number, y in rows if number}


def test_no_version_no_cache(foreign: Callable[..., Foreign], caplog: pytest.LogCaptureFixture) -> None:
    server = foreign()
    with SoftLabelCache() as cache, reader_of(server.endpoint, cache) as reader:
        with caplog.at_level(logging.WARNING, "edl.distill"):
            for _ in range(2):
                assert scales(list(reader())) == {1.0}
        assert reader.stats().rows_asked == 2 * ROWS, "labels of any model that is served there"
        assert reader.stats().rows_not_cached == 2 * ROWS
        assert not cache.keys()
    said = [record for record in caplog.records if "do not say which version" in record.getMessage()]
    assert len(said) == 1


def test_a_version_that_the_user_names(
    foreign: Callable[..., Foreign], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = foreign()
    with SoftLabelCache() as cache, reader_of(server.endpoint, cache, version="mine") as reader:
        for _ in range(2):
            assert scales(list(reader())) == {1.0}
        assert reader.stats().rows_asked == ROWS
        assert [key.version for key in cache.keys()] == ["mine"]  # noqa: SIM118 - not a mapping
    assert any("as version= names it" in record.getMessage() for record in caplog.records), "it cannot be checked"
    assert set(server.asked) == {""}, "a server that knows no versions is asked for none"
    np.save(tmp_path / "x.npy", np.zeros((3, 4), np.float32))
    command = [str(tmp_path / "x.npy"), "--teachers", server.endpoint, "--inputs", "x", "--outputs", "y", "--output"]
    with pytest.raises(SettingsError, match="--model-version"):
        main([*command, str(tmp_path / "labels")])
    assert main([*command, str(tmp_path / "labels"), "--model-version", "mine"]) == 0


def test_answers_decide_which_version_it_is(foreign: Callable[..., Foreign]) -> None:
    """A server that has several, and answers with another one than the newest; or with each in turn."""
    server = foreign(("1", "2"), lambda asked: (asked or "1", float(asked or 1)))
    with SoftLabelCache() as cache, reader_of(server.endpoint, cache) as reader:
        for _ in range(3):
            assert scales(list(reader())) == {1.0}
        assert {key.version for key in cache.keys()} == {"1"}  # noqa: SIM118 - not a mapping
        assert reader.stats().rows_asked == ROWS
    turns = iter(range(10**6))
    balanced = foreign(("1",), lambda asked: (("1", 1.0), ("2", 2.0))[next(turns) % 2])
    with SoftLabelCache() as cache, reader_of(balanced.endpoint, cache) as reader:
        assert scales(list(reader())) == {1.0, 2.0}, "two servers behind one address"
        for key in cache.keys():  # noqa: SIM118 - not a mapping
            view = cache.view(key)
            labels: Any = view.get(view.ids()).outputs["y"]
            ratio = labels[:, 0] / np.maximum(np.asarray(view.ids()), 1)
            assert set(ratio.tolist()) <= {0.0, float(key.version)}, "a label under another version than its own"


@pytest.mark.parametrize("version", ["2", ""])
def test_a_pin_that_a_server_ignores(foreign: Callable[..., Foreign], version: str) -> None:
    """An answer of another version, or one that may be of any, is no label."""
    server = foreign(("1", "2"), lambda asked: (version, 2.0))
    with SoftLabelCache() as cache, reader_of(server.endpoint, cache, version="1") as reader:
        with pytest.raises((BadOutputError, EDLError), match="version"):
            list(reader())
        assert not cache.keys()
    assert set(server.asked) == {"1"}, "the version goes with each request"


def test_a_version_that_is_no_name(foreign: Callable[..., Foreign]) -> None:
    server = foreign(("1",), lambda asked: ("\x1b[2J" * 1000, 2.0))
    with SoftLabelCache() as cache, reader_of(server.endpoint, cache) as reader:
        with pytest.raises(BadOutputError, match="which is none"):
            list(reader())
        assert not cache.keys()


def test_one_folder_and_two_services(foreign: Callable[..., Foreign], tmp_path: Path) -> None:
    """One reader after the other, which know nothing of each other."""
    for _ in range(2):
        for scale in (1.0, 2.0):
            server = foreign(("1",), lambda asked, scale=scale: ("1", scale))
            with SoftLabelCache(0, tmp_path) as cache, reader_of(server.endpoint, cache) as reader:
                for _ in range(2):
                    assert scales(list(reader())) == {scale}, "labels of the service that was there before"


def _student(folder: Path, endpoint: str, scale: float, done: Any) -> None:
    wrong = 0
    with SoftLabelCache(0, folder, flush_interval_s=0.02) as cache, reader_of(endpoint, cache) as reader:
        for _ in range(6):
            wrong += scales(list(reader())) != {scale}
    done.put((scale, wrong))


@pytest.mark.slow
def test_two_services_share_a_folder(start: Start, tmp_path: Path) -> None:
    """Two students two services one folder."""
    context = multiprocessing.get_context("spawn")
    done = context.Queue()
    students = []
    for scale, count in ((1.0, 2), (3.0, 1)):
        teacher = start("echo", version="1", scale=scale)
        arguments = (tmp_path, teacher.endpoint, scale, done)
        students += [context.Process(target=_student, args=arguments, daemon=True) for _ in range(count)]
    for student in students:
        student.start()
    results = [done.get(timeout=60) for _ in students]
    for student in students:
        student.join(30)
    assert sorted(results) == [(1.0, 0), (1.0, 0), (3.0, 0)], "epochs with another teacher's labels"
    with SoftLabelCache(0, tmp_path) as cache:
        assert len(cache.keys()) == 2
        assert all(cache.view(key).get(range(ROWS)).complete for key in cache.keys())  # noqa: SIM118 - not a mapping


def test_no_index_says_name_the_model(foreign: Callable[..., Foreign]) -> None:
    server = foreign(implements_index=False)

    def make(timeout_s: float) -> DistillReader:
        reader = DistillReader(["x"], ["y"], teachers=[server.endpoint], options=Options(teacher_timeout_s=timeout_s))
        return reader.set_sample_generator(lambda: iter([(np.zeros(4, np.float32),)]))

    words = "does not implement RepositoryIndex: name the model, Teachers(model"
    assert words in words_of_failure(re.escape(words), make)
