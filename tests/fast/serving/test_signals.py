"""Life and death of a server process: ready when warm, drained on SIGTERM, gone on the second."""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path

import numpy as np
import pytest
from grpc_health.v1 import health_pb2

from edl.protocol.transport import grpc
from edl_serving import Array
from tests.fast.serving.conftest import Client, Connect, StartProcess, outputs_of, until
from tests.fast.serving.models import logits


def row(value: float) -> Array:
    return np.full((1, 4), value, np.float32)


sleep_for = row
"""The seconds that a `Sleeper` takes."""


def health(client: Client, service: str = "") -> int:
    check = client.channel.unary_unary(
        "/grpc.health.v1.Health/Check",
        request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
        response_deserializer=health_pb2.HealthCheckResponse.FromString,
    )
    status: int = check(health_pb2.HealthCheckRequest(service=service), timeout=10).status
    return status


SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def test_sigterm_finishes_and_exits_0(process: StartProcess, connect: Connect, tmp_path: Path) -> None:
    """Sigterm finishes what is in flight and exits 0."""
    left, gate = tmp_path / "left", tmp_path / "gate"
    env = {**os.environ, "EDL_TEST_GATE": str(gate)}
    server = process("FileGated", env=env, max_batch_rows=1, leave_file=str(left), metrics_port=0)
    client = connect(server.target)
    assert health(client) == health(client, "m") == health(client, "inference.GRPCInferenceService") == SERVING
    calls = [client.start(row(value)) for value in range(3)]
    until(lambda: 'edl_teacher_in_flight{model="m"} 3.0' in server.metrics())
    server.popen.send_signal(signal.SIGTERM)
    assert server.line() == "leaving"
    assert health(client) == health(client, "m") == NOT_SERVING
    assert not client.ask("ServerReady").ready
    assert not client.ask("ModelReady", name="m").ready
    assert client.ask("ServerLive").live
    calls.append(client.start(row(3)))  # this student has not heard of it yet, and is served
    until(lambda: 'edl_teacher_in_flight{model="m"} 4.0' in server.metrics())
    left.touch()
    gate.touch()
    for value, call in enumerate(calls):
        np.testing.assert_array_equal(outputs_of(call.result())["logits"], logits(row(value)))
    assert server.wait() == 0
    assert server.line() == "closed"


def test_refused_after_leaving_discovery(process: StartProcess, connect: Connect, tmp_path: Path) -> None:
    """New requests are refused once discovery has been left."""
    gate = tmp_path / "gate"
    server = process("FileGated", env={**os.environ, "EDL_TEST_GATE": str(gate)}, max_batch_rows=1, metrics_port=0)
    client = connect(server.target)
    accepted = client.start(row(3))
    until(lambda: 'edl_teacher_in_flight{model="m"} 1.0' in server.metrics())
    server.popen.send_signal(signal.SIGTERM)
    errors = []

    def refused() -> bool:
        errors.append(client.start(row(0), timeout_s=0.1).exception())
        return errors[-1].code() is not grpc.StatusCode.DEADLINE_EXCEEDED  # accepted before, and waiting in vain

    until(refused)
    assert errors[-1].code() is grpc.StatusCode.UNAVAILABLE
    assert "draining" in errors[-1].details()
    gate.touch()
    assert outputs_of(accepted.result())["logits"].tolist() == logits(row(3)).tolist()
    assert server.wait() == 0


def test_drain_deadline_exits_1(process: StartProcess, connect: Connect) -> None:
    """The drain ends at its deadline with exit code 1."""
    server = process("Sleeper", drain_timeout_s=0.5, metrics_port=0)
    call = connect(server.target).start(sleep_for(60))
    until(lambda: 'edl_teacher_in_flight{model="m"} 1.0' in server.metrics())
    started = time.monotonic()
    server.popen.send_signal(signal.SIGTERM)
    assert server.wait() == 1
    assert time.monotonic() - started < 10
    assert call.exception().code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
    until(lambda: any("left unanswered" in line for line in server.log))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_at_once(process: StartProcess, connect: Connect, number: signal.Signals) -> None:
    server = process("Sleeper", drain_timeout_s=60.0, metrics_port=0)
    call = connect(server.target).start(sleep_for(60))
    until(lambda: 'edl_teacher_in_flight{model="m"} 1.0' in server.metrics())
    server.popen.send_signal(number)
    assert server.line() == "leaving"
    server.popen.send_signal(number)
    assert server.wait(10) == -number
    assert call.exception().code() is grpc.StatusCode.UNAVAILABLE


def test_leaving_discovery_may_hang(process: StartProcess, connect: Connect) -> None:
    """Leaving discovery may hang and the server still ends."""
    server = process("Sleeper", leave_s=3600, drain_timeout_s=1.0)
    assert len(connect(server.target).infer(sleep_for(0))["logits"]) == 1
    server.popen.send_signal(signal.SIGTERM)
    assert server.wait(20) == 0


def test_failed_leave_does_not_fail_drain(process: StartProcess) -> None:
    """Failing to leave discovery does not fail the drain."""
    server = process("Base", leave_fails=True)
    server.popen.send_signal(signal.SIGTERM)
    assert server.wait(20) == 0
    until(lambda: any("leaving discovery raised OSError: discovery is down" in line for line in server.log))


def test_failed_join_ends_the_server(process: StartProcess) -> None:
    """Failing to join discovery ends the server."""
    server = process("Base", ready=False, join_fails=True)
    assert server.wait(20) == 1
    until(lambda: any("OSError: discovery is down" in line for line in server.log))


def test_ready_after_warm_up_only(process: StartProcess, connect: Connect, tmp_path: Path, unused_port: int) -> None:
    """A server is not ready until its model is warm."""
    go = tmp_path / "warm"
    server = process("SlowStart", env={**os.environ, "EDL_TEST_WARM": str(go)}, ready=False, port=unused_port)
    client = connect(f"127.0.0.1:{unused_port}")
    grpc.channel_ready_future(client.channel).result(20)
    assert client.ask("ServerLive").live
    assert not client.ask("ServerReady").ready
    assert health(client) == NOT_SERVING
    assert [(model.state, model.reason) for model in client.ask("RepositoryIndex").models] == [
        ("UNAVAILABLE", "starting")
    ]
    error = client.start(sleep_for(0)).exception()
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert "warming up" in error.details()
    go.touch()
    assert server.wait_ready().port == unused_port
    assert client.ask("ServerReady").ready
    assert health(client) == SERVING
    assert [model.state for model in client.ask("RepositoryIndex").models] == ["READY"]


def test_signal_while_warming_up(process: StartProcess, connect: Connect, tmp_path: Path, unused_port: int) -> None:
    """A signal while warming up ends the server."""
    env = {**os.environ, "EDL_TEST_WARM": str(tmp_path / "never")}
    server = process("SlowStart", env=env, ready=False, port=unused_port)
    grpc.channel_ready_future(connect(f"127.0.0.1:{unused_port}").channel).result(20)
    server.popen.send_signal(signal.SIGTERM)
    assert server.wait(20) == 0


def test_failed_warm_up_is_an_error(process: StartProcess) -> None:
    """A model that cannot warm up is an error at the start."""
    server = process("NoStart", ready=False)
    assert server.wait() == 1
    until(lambda: any("the weights are missing" in line for line in server.log))


def test_port_in_use_is_an_error(process: StartProcess) -> None:
    """A port in use is an error at the start."""
    first = process("Base")
    second = process("Base", ready=False, port=first.port)
    assert second.wait() == 1
    until(lambda: any("SettingsError" in line and str(first.port) in line for line in second.log))


def test_health_watch_does_not_delay_the_end(process: StartProcess, connect: Connect) -> None:
    """A health watch is told and does not delay the end."""
    server = process("Base")
    watch = connect(server.target).channel.unary_stream(
        "/grpc.health.v1.Health/Watch",
        request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
        response_deserializer=health_pb2.HealthCheckResponse.FromString,
    )
    statuses = watch(health_pb2.HealthCheckRequest(service="m"), timeout=30)
    assert next(statuses).status == SERVING
    server.popen.send_signal(signal.SIGTERM)
    assert next(statuses).status == NOT_SERVING
    assert server.wait(10) == 0


def test_a_unix_socket_is_served_and_removed(process: StartProcess, connect: Connect, tmp_path: Path) -> None:
    path = tmp_path / "edl.sock"
    server = process("Base", uds=str(path))
    assert len(connect(f"unix:{path}").infer(sleep_for(0))["logits"]) == 1
    server.popen.send_signal(signal.SIGINT)
    assert server.wait() == 0
    assert not path.exists()
    assert not [*tmp_path.glob("edl.sock*")]


def test_foreign_unix_socket_is_kept(process: StartProcess, tmp_path: Path) -> None:
    """A unix socket that another server has put there is not removed."""
    path = tmp_path / "edl.sock"
    server = process("Base", uds=str(path))
    path.unlink()
    with socket.socket(socket.AF_UNIX) as another:
        another.bind(str(path))
        server.popen.send_signal(signal.SIGINT)
        assert server.wait() == 0
        assert path.is_socket()
