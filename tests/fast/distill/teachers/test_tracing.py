"""One id for a request on both sides: in the student's errors, the teacher's log, and its access log."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edl.distill import DistillReader, Options
from edl.distill.dispatch.policy import Policy
from edl.errors import BadOutputError
from edl.testing import LocalTeacher
from tests.fast.distill.conftest import Start, until
from tests.fast.distill.reading import check, reader_of, samples

OPTIONS = Options(teacher_timeout_s=60, linger_s=30.0)
"""Each request is full: a source that gets no time for a moment is not silent."""
SPAN = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
MODEL = """
class Moody:
    inputs, outputs, version = ["x:float32[4]"], ["y:float32[4]"], "1"

    def __call__(self, inputs):
        if (inputs["x"] == 13).any():
            raise ValueError("thirteen")
        return {"y": inputs["x"]}

    def warm_up(self, max_rows):
        pass
"""


def access_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.parametrize("shared_memory", [True, False])
def test_each_request_has_an_access_line(start: Start, tmp_path: Path, shared_memory: bool) -> None:
    path = tmp_path / "access.log"
    serve = {"access-log": path, "shared-memory": shared_memory}
    teacher = start("echo", delay_s=0.002, serve=serve)
    with reader_of(teacher, options=OPTIONS) as reader:
        reader.set_sample_generator(samples(80))
        check(list(reader()), 80)
    until(lambda: sum(line["rows"] for line in access_lines(path)) >= 80, 30)
    lines = access_lines(path)
    ids = [line["id"] for line in lines]
    assert len(set(ids)) == len(ids)
    assert {len(each) for each in ids} == {16}
    assert {line["traceparent"][3:35] for line in lines} == {lines[0]["traceparent"][3:35]}
    for line in lines:
        assert line["status"] == "OK"
        assert line["model"] == "m"
        assert line["client"].startswith("ipv4:127.0.0.1:")
        assert line["rows"] == 4
        assert line["compute_ms"] >= 2
        assert line["queue_ms"] >= 0
        assert line["bytes"] > 0


def test_an_error_is_found_by_its_id(start: Start, tmp_path: Path) -> None:
    (tmp_path / "moody.py").write_text(MODEL)
    path = tmp_path / "access.log"
    teacher = start(f"{tmp_path}/moody.py:Moody", serve={"access-log": path, "log-format": "json"})
    options = Options(policy=Policy(task_failures=1))
    with DistillReader(["x"], ["y"], teachers=[teacher.endpoint], options=options) as reader:
        reader.set_batch_generator(lambda: iter([(np.full((2, 4), 13, np.float32),)]))
        with pytest.raises(BadOutputError) as raised:
            list(reader())
    found = re.search(r"\(request ([0-9a-f]{16})\)", str(raised.value))
    assert found is not None, str(raised.value)
    until(lambda: any(line["id"] == found[1] for line in access_lines(path)), 30)
    line = next(line for line in access_lines(path) if line["id"] == found[1])
    assert line["status"] == "INTERNAL"
    log = [json.loads(entry) for entry in teacher.log.splitlines() if entry.startswith("{")]
    said = [entry for entry in log if found[1] in entry["message"]]
    assert said, teacher.log
    assert said[0]["level"] == "error"
    assert "thirteen" in said[0]["exception"]


def test_the_users_span_reaches_the_teacher(start: Start, tmp_path: Path) -> None:
    trace = pytest.importorskip("opentelemetry.trace")
    path = tmp_path / "access.log"
    teacher: LocalTeacher = start("echo", serve={"access-log": path})
    context = trace.SpanContext(int(SPAN[3:35], 16), int(SPAN[36:52], 16), False, trace.TraceFlags(1))
    with reader_of(teacher, options=OPTIONS) as reader:
        reader.set_sample_generator(samples(40))
        with trace.use_span(trace.NonRecordingSpan(context)):
            epoch = reader()
            check(list(epoch), 40)
        check(list(reader()), 40)
    until(lambda: sum(line["rows"] for line in access_lines(path)) >= 80, 30)
    spans = [line["traceparent"] == SPAN for line in access_lines(path)]
    assert spans == [True] * (len(spans) // 2) + [False] * (len(spans) // 2)


def test_a_refused_request_has_a_line_too(start: Start, tmp_path: Path) -> None:
    from edl.protocol import names
    from edl.protocol.transport import grpc

    path = tmp_path / "access.log"
    teacher = start("echo", serve={"access-log": path})
    channel = grpc.insecure_channel(teacher.endpoint)
    call = channel.unary_unary(names.method("ModelInfer"))
    with pytest.raises(grpc.RpcError):
        call(b"nonsense", timeout=30, metadata=(("x-request-id", "mine"), ("traceparent", SPAN)))
    channel.close()
    until(lambda: bool(access_lines(path)), 30)
    line = access_lines(path)[0]
    assert (line["id"], line["traceparent"], line["status"]) == ("mine", SPAN, "INVALID_ARGUMENT")
    assert "rows" not in line
