"""The life of a teacher server: ready when warm, left and drained on a signal, and its Unix socket."""

from __future__ import annotations

import os
import signal
import socket
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from grpc_health.v1 import health_pb2

from edl.errors import SettingsError
from edl.protocol.transport import grpc
from edl_serving import Array, ServerSettings, TeacherServer, serve
from tests.fast.serving.conftest import TIMEOUT_S, Client, Connect, StartInside
from tests.fast.serving.models import Base

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


def test_a_unix_socket_is_served_and_removed(inside: StartInside, connect: Connect, tmp_path: Path) -> None:
    path = tmp_path / "edl.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))  # as a teacher that was killed leaves it
    server = inside(Base(), uds=str(path))
    assert len(connect(f"unix:{path}").infer(X)["logits"]) == 1
    with pytest.raises(SettingsError, match="in use by another server"):
        inside(Base(), uds=str(path))
    assert len(connect(f"unix:{path}").infer(X)["logits"]) == 1
    server.call(server.server.stop())
    assert not [*tmp_path.iterdir()]
    server = inside(Base(), uds=str(path))
    path.unlink()
    with socket.socket(socket.AF_UNIX) as another:
        another.bind(str(path))
        server.call(server.server.stop())
        assert path.is_socket(), "that of another server, in its place"
