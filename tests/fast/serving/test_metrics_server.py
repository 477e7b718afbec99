"""The metrics' HTTP server: scraped whatever else is connected, and never more threads than a few."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry, Gauge

from edl_serving.monitoring.metrics_server import MetricsServer


@pytest.fixture
def server() -> Iterator[MetricsServer]:
    registry = CollectorRegistry()
    Gauge("answer", "Of everything.", registry=registry).set(42)
    server = MetricsServer(registry, "127.0.0.1", 0)
    yield server
    server.close()


def scrape(server: MetricsServer) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=30) as page:
        text: str = page.read().decode()
    return text


def test_half_requests_hold_few_threads(server: MetricsServer) -> None:
    before = threading.active_count()
    with contextlib.ExitStack() as stack:
        for _ in range(120):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), 30))
            client.sendall(b"GET /metrics HTTP/1.1\r\n")
        assert "answer 42.0" in scrape(server), "a scraper is served beside them"
        deadline = time.monotonic() + 60
        while (held := threading.active_count() - before) > 16:
            assert time.monotonic() < deadline, f"{held} threads"
            time.sleep(0.02)
    assert "answer 42.0" in scrape(server)


def test_nonsense_ends_nothing(server: MetricsServer, capfd: pytest.CaptureFixture[str]) -> None:
    for nonsense in (b"\0" * 70_000, b"GET\r\n\r\n", b"POST /metrics HTTP/9.9\r\n\r\n", b""):
        with socket.create_connection(("127.0.0.1", server.port), 30) as client, contextlib.suppress(OSError):
            client.sendall(nonsense)
            client.shutdown(socket.SHUT_WR)
            client.recv(100)
    assert "answer 42.0" in scrape(server)
    assert capfd.readouterr().err == ""


def test_a_taken_port_is_an_error(server: MetricsServer) -> None:
    with pytest.raises(OSError):
        MetricsServer(CollectorRegistry(), "127.0.0.1", server.port)


def test_closing_frees_the_port() -> None:
    server = MetricsServer(CollectorRegistry(), "127.0.0.1", 0)
    port = server.port
    server.close()
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", port), 30)


def test_dns_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A teacher starts at once where DNS does not answer."""

    def unanswered(*_: object) -> str:
        raise AssertionError("asked DNS for a name")

    monkeypatch.setattr(socket, "getfqdn", unanswered)
    server = MetricsServer(CollectorRegistry(), "127.0.0.1", 0)
    try:
        assert scrape(server) == ""
    finally:
        server.close()
