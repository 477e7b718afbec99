"""A teacher whose model fails is not ready and not in discovery, until it answers again."""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from edl.discovery import open_registry
from edl.protocol import kserve, names
from edl.protocol.transport import grpc
from edl.testing import LocalTeacher

MODEL = """
import time
from pathlib import Path
import numpy as np

class Moody:
    inputs, outputs, version = ["x:float32[4]"], ["y:float32[4]"], "1"

    def __init__(self, mood):
        self.mood = Path(mood)

    def __call__(self, inputs):
        mood = self.mood.read_text()
        while self.mood.read_text() == "hang":
            time.sleep(0.01)
        if mood == "raise":
            raise ValueError("in a bad mood")
        if mood == "sample" and (inputs["x"] != 7).any():
            raise ValueError("not the sample")
        return {"y": np.full_like(inputs["x"], np.nan) if mood == "nan" else inputs["x"]}

    def warm_up(self, max_rows):
        pass
"""


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, f"not within 30 s: {what}"
        time.sleep(0.01)


@pytest.fixture
def mood(tmp_path: Path) -> Path:
    path = tmp_path / "mood"
    path.write_text("")
    (tmp_path / "moody.py").write_text(MODEL)
    return path


@pytest.fixture
def teacher(mood: Path, tmp_path: Path) -> Iterator[LocalTeacher]:
    # On a busy machine a sound model may take half a second for an answer, and would be taken for a sick one.
    serve = {"canary": "0.05", "canary-timeout": "2s", "metrics-port": 0}
    target = f"{tmp_path}/moody.py:Moody"
    discovery = f"sqlite:///{tmp_path}/discovery.sqlite"
    with LocalTeacher(target, service="s", discovery=discovery, serve=serve, mood=str(mood)) as started:
        yield started


def is_ready(teacher: LocalTeacher) -> bool:
    with grpc.insecure_channel(teacher.endpoint) as channel:
        call = channel.unary_unary(
            names.method("ModelReady"),
            request_serializer=kserve.ModelReadyRequest.SerializeToString,
            response_deserializer=kserve.ModelReadyResponse.FromString,
        )
        return bool(call(kserve.ModelReadyRequest(name="m"), timeout=30).ready)


def healthy(teacher: LocalTeacher) -> float:
    with urllib.request.urlopen(f"http://127.0.0.1:{teacher.metrics_port}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return float(next(line for line in lines if line.startswith("edl_teacher_healthy{")).split()[-1])


@pytest.mark.parametrize(("how", "words"), [("raise", "in a bad mood"), ("nan", "NaN"), ("hang", "no answer within")])
def test_a_sick_model_is_not_found(teacher: LocalTeacher, mood: Path, tmp_path: Path, how: str, words: str) -> None:
    registry = open_registry(f"sqlite:///{tmp_path}/discovery.sqlite")
    try:
        assert is_ready(teacher)
        for _ in range(2):
            assert registry.snapshot("s").instances
            assert healthy(teacher) == 1.0
            mood.write_text(how)
            until(lambda: not registry.snapshot("s").instances, "it leaves discovery")
            assert not is_ready(teacher)
            assert healthy(teacher) == 0.0
            assert words in teacher.log
            mood.write_text("")
            until(lambda: registry.snapshot("s").instances, "it comes back")
            assert is_ready(teacher)
    finally:
        registry.close()
    teacher.terminate()
    assert teacher.wait() == 0, teacher.log


def test_a_full_queue_hides_no_hang(mood: Path, tmp_path: Path) -> None:
    serve = {"canary": "1s", "canary-timeout": "0.5s", "metrics-port": 0}  # the queue is full before the first one
    target = f"{tmp_path}/moody.py:Moody"
    with LocalTeacher(target, serve=serve, max_batch=1, max_queue=4, mood=str(mood)) as teacher, ExitStack() as stack:
        request = kserve.ModelInferRequest(model_name="m")
        request.inputs.add(name="x", datatype="FP32", shape=[1, 4])
        request.raw_input_contents.append(bytes(16))
        options = [("grpc.use_local_subchannel_pool", 1)]  # else all are one connection: one client
        until(lambda: is_ready(teacher), "it is ready")
        mood.write_text("hang")
        answers = []
        for _ in range(8):
            channel = stack.enter_context(grpc.insecure_channel(teacher.endpoint, options))
            call = channel.unary_unary(names.method("ModelInfer"))
            answers.append(call.future(request.SerializeToString(), timeout=60))
        until(lambda: not is_ready(teacher), "it is not ready")
        mood.write_text("")
        until(lambda: is_ready(teacher), "it is ready again")
        assert any(answer.code() is grpc.StatusCode.OK for answer in answers)


def test_a_sick_teacher_drains(teacher: LocalTeacher, mood: Path) -> None:
    mood.write_text("raise")
    until(lambda: not is_ready(teacher), "it is not ready")
    teacher.terminate()
    assert teacher.wait() == 0, teacher.log


def test_canary_is_the_samples_first_row(mood: Path, tmp_path: Path) -> None:
    """The canary is the first of the sample."""
    np.savez(tmp_path / "sample.npz", x=np.full((3, 4), 7, np.float32))
    serve = {"canary": "50ms", "sample": tmp_path / "sample.npz", "metrics-port": 0}
    with LocalTeacher(f"{tmp_path}/moody.py:Moody", serve=serve, mood=str(mood)) as teacher:
        before = rows(teacher)
        mood.write_text("sample")
        until(lambda: rows(teacher) > before + 3, "rows are computed")
        assert is_ready(teacher), teacher.log


def rows(teacher: LocalTeacher) -> float:
    with urllib.request.urlopen(f"http://127.0.0.1:{teacher.metrics_port}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return float(next(line for line in lines if line.startswith("edl_teacher_rows_total{")).split()[-1])
