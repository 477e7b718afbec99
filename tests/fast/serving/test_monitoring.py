"""Metrics, `/livez` and `/readyz` over HTTP: what they say, and that nothing keeps a scraper from its answer."""

from __future__ import annotations

import contextlib
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, Gauge

from edl_serving.monitoring.metrics import Metrics
from edl_serving.monitoring.metrics_server import MetricsServer
from edl_serving.monitoring.probes import HealthProbes
from tests.fast.serving.conftest import TIMEOUT_S, Connect, StartInside
from tests.fast.serving.models import Gated, Moody
from tests.waiting import wait_until


@pytest.fixture
def probes() -> HealthProbes:
    return HealthProbes()


@pytest.fixture
def server(probes: HealthProbes) -> Iterator[MetricsServer]:
    registry = CollectorRegistry()
    Gauge("answer", "Of everything.", registry=registry).set(42)
    server = MetricsServer(registry, "127.0.0.1", 0, probes)
    yield server
    server.close()


def ask(port: int | None, path: str, method: str = "GET") -> tuple[int, str]:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", method=method)
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_call_of_the_model_that_hangs() -> None:
    metrics = Metrics("m", clock=lambda: 100.0)
    workers = [metrics.add_worker(), metrics.add_worker()]
    workers[1].computing_since_s = 10.0
    assert metrics.find_stall(100) == ""
    assert metrics.find_stall(60) == "a call of the model takes 90 s already, and 60 s are the limit"
    workers[1].computing_since_s = None
    assert metrics.find_stall(1) == ""


def test_not_live_while_the_model_hangs(inside: StartInside, connect: Connect) -> None:
    model = Gated()
    server = inside(model, metrics_port=0, stall_timeout_s=1.0)
    port = server.server.metrics_port
    assert ask(port, "/livez")[0] == 200
    call = connect(server.target).start(np.zeros((1, 4), np.float32))
    wait_until(lambda: ask(port, "/livez")[0] == 503)
    assert "[-]model failed: a call of the model takes" in ask(port, "/livez")[1]
    assert ask(port, "/readyz") == (200, "[+]model ok\nreadyz check passed\n")
    server.call(server.server.leave())
    assert ask(port, "/readyz") == (503, "[-]model failed: draining\nreadyz check failed\n")
    model.gate.set()
    call.result()
    wait_until(lambda: ask(port, "/livez")[0] == 200)


def test_half_requests_hold_few_threads(server: MetricsServer) -> None:
    before = threading.active_count()
    with contextlib.ExitStack() as stack:
        for _ in range(120):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), TIMEOUT_S))
            client.sendall(b"GET /metrics HTTP/1.1\r\n")
        assert "answer 42.0" in ask(server.port, "/metrics")[1], "a scraper is served beside them"
        wait_until(lambda: threading.active_count() - before <= 16)
    assert "answer 42.0" in ask(server.port, "/metrics")[1]


def test_metrics_add_up_over_workers() -> None:
    metrics = Metrics("m")
    for rows in (3, 64):
        worker = metrics.add_worker()
        worker.record_batch(rows, 0.003)
        worker.record_queue_time(0.0001)

    def value(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(name, {"model": "m", **labels})

    assert value("edl_teacher_rows_total") == 67
    assert value("edl_teacher_batch_rows_bucket", le="4.0") == 1
    assert value("edl_teacher_batch_rows_bucket", le="64.0") == value("edl_teacher_batch_rows_count") == 2
    assert value("edl_teacher_compute_seconds_sum") == pytest.approx(0.006)
    assert value("edl_teacher_queue_seconds_bucket", le="0.0005") == 2


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
