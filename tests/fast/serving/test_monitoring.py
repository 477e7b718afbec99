"""A server from warm-up to draining, and what an operator sees: metrics, probes over HTTP, the access log."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import signal
import socket
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from grpc_health.v1 import health_pb2
from prometheus_client import CollectorRegistry, Gauge

from edl.errors import SettingsError
from edl.http_server.health import HealthChecks, HealthServer
from edl.log_output import JsonFormatter
from edl.protocol.transport import grpc
from edl_serving import Array, ServerSettings, TeacherServer, serve
from edl_serving.monitoring import AccessLog
from edl_serving.request_plan import request_id_of, valid_traceparent
from tests.fast.serving.conftest import TIMEOUT_S, Client, Connect, StartInside
from tests.fast.serving.fakes import Base, Gated, Moody
from tests.interrupting import deadline
from tests.waiting import DEADLINE_S, wait_until


@pytest.fixture
def server(stack: contextlib.ExitStack) -> HealthServer:
    registry = CollectorRegistry()
    Gauge("answer", "Of everything.", registry=registry).set(42)
    return stack.enter_context(contextlib.closing(HealthServer("127.0.0.1", 0, registry, HealthChecks())))


def ask(port: int | None, path: str, method: str = "GET") -> tuple[int, str]:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", method=method)
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_not_live_while_the_model_hangs(inside: StartInside, connect: Connect) -> None:
    model = Gated()
    server = inside(model, metrics_port=0, stall_timeout_s=1.0)
    port = server.server.metrics_port
    assert ask(port, "/livez")[0] == 200
    call = connect(server.target).start(np.zeros((1, 4), np.float32))
    wait_until(lambda: ask(port, "/livez")[0] == 503)
    assert "[-]model failed: a call of the model has taken" in ask(port, "/livez")[1]
    assert ask(port, "/readyz") == (200, "[+]model ok\nreadyz check passed\n")
    server.call(server.server.leave())
    assert ask(port, "/readyz") == (503, "[-]model failed: draining\nreadyz check failed\n")
    model.gate.set()
    call.result()
    wait_until(lambda: ask(port, "/livez")[0] == 200)


def test_half_requests_hold_few_threads(server: HealthServer) -> None:
    before = threading.active_count()
    with contextlib.ExitStack() as stack:
        for _ in range(120):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), TIMEOUT_S))
            client.sendall(b"GET /metrics HTTP/1.1\r\n")
        assert "answer 42.0" in ask(server.port, "/metrics")[1], "a scraper is served beside them"
        wait_until(lambda: threading.active_count() - before <= 16)
    assert "answer 42.0" in ask(server.port, "/metrics")[1]


def test_metrics_over_http(inside: StartInside, connect: Connect) -> None:
    server = inside(Moody(), max_batch_rows=8, metrics_port=0)
    client = connect(server.target)
    client.infer(np.zeros((3, 4), np.float32))
    assert client.start(np.ones((1, 4), np.float32)).exception() is not None
    assert client.start(np.full((1, 4), 2, np.float32)).exception() is not None
    assert client.infer_bytes.future(b"\xff").exception() is not None
    found = set(ask(server.server.metrics_port, "/metrics")[1].splitlines())
    assert {
        'edl_teacher_requests_total{model="m",outcome="ok"} 1.0',
        'edl_teacher_requests_total{model="m",outcome="internal"} 2.0',
        'edl_teacher_requests_total{model="m",outcome="invalid_argument"} 1.0',
        'edl_teacher_model_faults_total{kind="exception",model="m"} 1.0',
        'edl_teacher_model_faults_total{kind="nan",model="m"} 1.0',
        'edl_teacher_model_faults_total{kind="output",model="m"} 0.0',
        'edl_teacher_rows_total{model="m"} 5.0',
        'edl_teacher_batch_rows_bucket{le="4.0",model="m"} 3.0',
        'edl_teacher_queue_seconds_count{model="m"} 3.0',
        'edl_teacher_compute_seconds_count{model="m"} 3.0',
        'edl_teacher_queue_rows{model="m"} 0.0',
    } <= found
    assert any(line.startswith('edl_teacher_in_flight{model="m"}') for line in found)


SPAN = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_ids_from_the_network_are_checked() -> None:
    assert valid_traceparent(SPAN) == SPAN
    no_ids = [f"00-{'0' * 32}-b7ad6b7169203331-01", f"00-0af7651916cd43dd8448eb211c80319c-{'0' * 16}-01"]
    for text in (None, b"\xff", "", "ff" + SPAN[2:], SPAN.upper(), SPAN[:-1], SPAN + "-" + "x" * 1000, *no_ids):
        assert valid_traceparent(text) == "", text
    for found, expected in (("a" * 1000, "a" * 128), (b"\xff", "")):
        assert request_id_of({"x-request-id": found}) == expected  # type: ignore[dict-item]


def test_json_lines_hold_any_message() -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter("edl serve"))
    logger = logging.Logger("edl_serving.x")
    logger.addHandler(handler)
    logger.warning("a %s\nb\x1b[31m", 'quote "', extra={"rows": 3, "level": "own", "path": Path("x")})
    try:
        raise ValueError("deep\ninside")
    except ValueError:
        logger.exception("failed")
    first, second = [json.loads(line) for line in stream.getvalue().splitlines()]
    said = {"message": 'a quote "\nb\x1b[31m', "level": "warning", "logger": "edl_serving.x", "command": "edl serve"}
    assert {**said, "rows": 3, "path": "x"}.items() <= first.items()
    assert second["exception"].endswith("ValueError: deep\ninside")


@pytest.fixture(autouse=True)
def patient_close(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edl_serving.monitoring._CLOSE_S", DEADLINE_S)


def lines_of(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_the_access_log_may_be_rotated(tmp_path: Path) -> None:
    path = tmp_path / "access.log"
    log = AccessLog(str(path), "m", "1")
    log.write_request(status="OK", id="first")
    wait_until(lambda: lines_of(path))
    path.rename(tmp_path / "access.log.1")
    log.write_request(status="OK", id="second")
    log.close()
    assert [line["id"] for line in lines_of(tmp_path / "access.log.1")] == ["first"]
    assert [line["id"] for line in lines_of(path)] == ["second"]


def test_impossible_access_logs_are_refused(tmp_path: Path) -> None:
    """To open a pipe that nobody reads would wait for a reader for ever, and SIGTERM would not end that."""
    with pytest.raises(SettingsError, match=r"nowhere.*cannot be written"):
        AccessLog(str(tmp_path / "nowhere" / "access.log"), "m", "1")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with deadline(60, "opening a pipe"), pytest.raises(SettingsError, match="this pipe has no reader"):
        AccessLog(str(pipe), "m", "1")


def test_a_full_disk_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    log = AccessLog("/dev/full", "m", "1")
    for _ in range(100):
        log.write_request(status="OK", id="lost")
    log.close()
    said = [record.getMessage() for record in caplog.records if record.name == "edl_serving.monitoring"]
    assert len(said) == 1, said
    assert "No space left" in said[0]


def test_a_pipe_that_hangs_holds_nothing_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edl_serving.monitoring._CLOSE_S", 0.1)
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        log = AccessLog(str(path), "m", "1")
        for number in range(30_000):  # a pipe holds 64 kB, and the queue 10,000 lines
            log.write_request(status="OK", id=number)
        log.close()
        assert any("hangs" in record.getMessage() for record in caplog.records)
    finally:
        os.set_blocking(reader, True)
        while os.read(reader, 1 << 20):  # so that its thread can end
            pass
        os.close(reader)


def test_dropped_lines_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edl_serving.monitoring._MOST_WAITING", 10)
    path = tmp_path / "access.log"
    log = AccessLog(str(path), "m", "1")
    for number in range(1000):
        log.write_request(status="OK", id=number)
    wait_until(lambda: len(lines_of(path)) >= 10)
    log.write_request(status="OK", id="last")
    log.close()
    lines = lines_of(path)
    dropped = sum(int(str(line.get("dropped", 0))) for line in lines)
    assert dropped > 0
    assert len(lines) + dropped == 1001


X: Array = np.ones((1, 4), np.float32)
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def health(client: Client, service: str = "") -> int:
    check = client.channel.unary_unary(
        "/grpc.health.v1.Health/Check",
        request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
        response_deserializer=health_pb2.HealthCheckResponse.FromString,
    )
    status: int = check(health_pb2.HealthCheckRequest(service=service), timeout=TIMEOUT_S).status
    return status


class SlowStart(Base):
    """Warms up until it may."""

    def __init__(self) -> None:
        self.entered, self.warm = threading.Event(), threading.Event()

    def warm_up(self, max_rows: int) -> None:
        self.entered.set()
        assert self.warm.wait(TIMEOUT_S)


def test_ready_from_warm_up_to_draining(inside: StartInside, connect: Connect) -> None:
    model = SlowStart()
    server = inside(model, wait=False)
    assert model.entered.wait(TIMEOUT_S)
    client = connect(server.target)
    assert client.ask("ServerLive").live
    assert not client.ask("ServerReady").ready
    assert health(client) == NOT_SERVING
    (found,) = client.ask("RepositoryIndex").models
    assert (found.state, found.reason) == ("UNAVAILABLE", "starting")
    error = client.start(X).exception()
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert "warming up" in error.details()
    model.warm.set()
    server.starting.result(TIMEOUT_S)
    assert client.ask("ServerReady").ready
    assert client.ask("ModelReady", name="m").ready
    assert health(client) == health(client, "m") == health(client, "inference.GRPCInferenceService") == SERVING
    assert [model.state for model in client.ask("RepositoryIndex").models] == ["READY"]

    watch = client.channel.unary_stream(
        "/grpc.health.v1.Health/Watch",
        request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
        response_deserializer=health_pb2.HealthCheckResponse.FromString,
    )
    statuses = watch(health_pb2.HealthCheckRequest(service="m"), timeout=TIMEOUT_S)
    assert next(statuses).status == SERVING
    server.call(server.server.leave())
    assert next(statuses).status == NOT_SERVING
    assert health(client) == health(client, "m") == NOT_SERVING
    assert not client.ask("ServerReady").ready
    assert not client.ask("ModelReady", name="m").ready
    assert client.ask("ServerLive").live
    assert len(client.infer(X)["logits"]) == 1, "a student that has not heard of it yet is served"
    assert server.call(server.server.drain(TIMEOUT_S / 2)), "a watch of health holds up the end"


class Signalled(Base):
    """Ends the server by a signal when it warms up or, unless it shall then, when it has joined discovery."""

    closed = False

    def __init__(self, *, warming: bool = False) -> None:
        self.warming = warming
        self.ended = threading.Event()

    def warm_up(self, max_rows: int) -> None:
        if self.warming:
            os.kill(os.getpid(), signal.SIGTERM)
            self.ended.wait(TIMEOUT_S)

    def close(self) -> None:
        self.closed = True


def end(_: TeacherServer) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


SETTINGS = ServerSettings("m", drain_timeout_s=1.0)


def test_leaving_discovery_may_fail_or_hang(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise OSError("discovery is down")

    assert serve(SETTINGS, Signalled(), join=end, leave=fail) == 0
    assert "leaving discovery raised OSError: discovery is down" in caplog.text
    hanging = threading.Event()
    assert serve(SETTINGS, Signalled(), join=end, leave=lambda: hanging.wait(TIMEOUT_S) and None) == 0
    hanging.set()
    assert "leaving discovery takes longer than 0.5 s" in caplog.text


def test_signal_while_warming_up() -> None:
    model = Signalled(warming=True)
    joined: list[Any] = []
    assert serve(SETTINGS, model, join=joined.append) == 0
    model.ended.set()
    assert not joined
