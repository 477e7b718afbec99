"""`/livez` and `/readyz`: what they answer, beside `/metrics`."""

from __future__ import annotations

import time
import urllib.error
import urllib.request

import pytest
from prometheus_client import CollectorRegistry

from edl_serving.monitoring.metrics import Metrics
from edl_serving.monitoring.metrics_server import MetricsServer
from edl_serving.monitoring.probes import HealthProbes


def ask(port: int, path: str, method: str = "GET") -> tuple[int, str]:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", method=method)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_each_check_has_a_line() -> None:
    probes, trouble = HealthProbes(), ["", "too hot"]
    probes.add_check("/readyz", "model", lambda: trouble[0])
    probes.add_check("/readyz", "gpu", lambda: trouble[1])
    server = MetricsServer(CollectorRegistry(), "127.0.0.1", 0, probes)
    try:
        assert ask(server.port, "/livez") == (200, "livez check passed\n")
        assert ask(server.port, "/readyz") == (
            503,
            "[+]model ok\n[-]gpu failed: too hot\nreadyz check failed\n",
        )
        assert ask(server.port, "/readyz?verbose", "HEAD") == (503, "")
        trouble[1] = ""
        assert ask(server.port, "/readyz")[0] == 200
        assert ask(server.port, "/metrics")[0] == 200
    finally:
        server.close()


def test_check_of_a_name_is_replaced() -> None:
    probes = HealthProbes()
    probes.add_check("/livez", "loop", lambda: "stuck")
    probes.add_check("/livez", "loop", lambda: "")
    assert probes.answer("/livez") == (True, "[+]loop ok\nlivez check passed\n")
    assert probes.answer("/healthz") is None


def test_call_of_the_model_that_hangs() -> None:
    metrics = Metrics("m")
    workers = [metrics.add_worker(), metrics.add_worker()]
    workers[1].computing_since_s = time.monotonic() - 90
    assert metrics.find_stall(100) == ""
    assert metrics.find_stall(60) == "a call of the model takes 90 s already, and 60 s are the limit"
    workers[1].computing_since_s = None
    assert metrics.find_stall(1) == ""


@pytest.mark.parametrize("path", ["/livez", "/readyz"])
def test_check_that_raises_is_no_pass(path: str) -> None:
    """An error in a check is 500, which every prober takes for a failure."""
    probes = HealthProbes()
    probes.add_check("/livez", "loop", lambda: str(1 / 0))
    probes.add_check("/readyz", "loop", lambda: str(1 / 0))
    server = MetricsServer(CollectorRegistry(), "127.0.0.1", 0, probes)
    try:
        assert ask(server.port, path)[0] == 500
    finally:
        server.close()
