"""Limits at the wire: who waits is served in the end, readiness is always told, and nothing that ended counts."""

from __future__ import annotations

import os
import queue
import random
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edl.protocol import bundles, codec, names
from edl.protocol.transport import grpc
from edl_serving import Array, TensorSpec
from tests.fast.serving.conftest import (
    Client,
    Connect,
    StartInside,
    StartProcess,
    outputs_of,
    request_bytes,
    until,
)
from tests.fast.serving.fakes import FakeBackend
from tests.fast.serving.test_fuzz import bad_requests

GAUGES = ("in_flight", "queue_rows", "queue_bytes", "connections", "streams", "client_bytes")


class Stream:
    """An unordered stream of a client's."""

    def __init__(self, client: Client) -> None:
        self._requests: queue.Queue[bytes | None] = queue.Queue()
        method = client.channel.stream_stream(names.method("ModelStreamInfer"))
        self.call: Any = method(iter(self._requests.get, None), metadata=((names.UNORDERED, "1"),), timeout=60)

    def send(self, data: bytes) -> None:
        self._requests.put(data)

    def ask(self, request_id: str) -> str:
        """Ask for one row; the error, empty if there is none."""
        self.send(request_bytes({"x": np.zeros((1, 4), np.float32)}) + codec.id_field(request_id))
        found = [(number, error) for _, _, number, error in bundles.split_responses(next(self.call))]
        assert [number for number, _ in found] == [request_id]
        return found[0][1]

    def end(self) -> None:
        self._requests.put(None)


def left(metrics: str) -> list[str]:
    return [gauge for gauge in GAUGES if f'edl_teacher_{gauge}{{model="m"}} 0.0' not in metrics]


def test_a_waiting_stream_is_served_later(process: StartProcess, connect: Connect) -> None:
    server = process("Base", max_streams=1, metrics_port=0)
    first = Stream(connect(server.target))
    assert first.ask("a") == ""
    second = Stream(connect(server.target))
    assert "1 streams are open" in second.ask("b")
    assert "1 streams are open" in second.ask("c")
    first.end()
    assert list(first.call) == []
    until(lambda: second.ask("d") == "")
    second.end()
    assert list(second.call) == []
    until(lambda: not left(server.metrics()))


def test_streams_that_wait_are_bounded(process: StartProcess, connect: Connect) -> None:
    server = process("Base", max_streams=1, metrics_port=0)
    first = Stream(connect(server.target))
    assert first.ask("a") == ""
    second = Stream(connect(server.target))
    assert "streams are open" in second.ask("b")
    third = Stream(connect(server.target))
    until(lambda: third.call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED)
    assert "1 streams wait for a place" in third.call.details()
    assert names.RETRY_AFTER_MS in dict(third.call.trailing_metadata())
    first.end()
    second.end()
    until(lambda: not left(server.metrics()))


def test_readiness_is_told_beyond_the_limit(process: StartProcess, connect: Connect) -> None:
    server = process("Base", max_connections=1)
    first = Stream(connect(server.target))
    assert first.ask("a") == ""
    other = connect(server.target)
    assert other.ask("ServerReady").ready
    assert other.ask("ModelReady", name="m").ready
    call = other.start(np.zeros((1, 4), np.float32))
    assert call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "1 clients are connected" in call.details()
    first.end()


def test_what_vanishes_counts_no_more(process: StartProcess, connect: Connect) -> None:
    server = process("Sleeper", max_streams=8, max_client_bytes=1 << 20, max_message_bytes=1 << 20, metrics_port=0)

    def student(number: int) -> None:
        rng = random.Random(number)
        bad = bad_requests(rng)
        client = Client(server.target)
        stream = Stream(client)
        for _ in range(rng.randrange(1, 40)):
            x = np.full((rng.choice([1, 8, 4000]), 4), 0.001, np.float32)
            stream.send(
                request_bytes({"x": x}) + codec.id_field(str(rng.random())) if rng.random() < 0.7 else next(bad)[0]
            )
        if rng.random() < 0.5:
            next(answers(stream.call), None)
        if rng.random() < 0.3:
            stream.end()
        else:
            stream.call.cancel()
        client.close()

    def answers(call: Any) -> Iterator[bytes]:
        try:
            yield from call
        except grpc.RpcError:
            return

    for first in range(0, 40, 10):
        threads = [threading.Thread(target=student, args=(first + number,)) for number in range(10)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    until(lambda: not left(server.metrics()))
    stream = Stream(connect(server.target))
    until(lambda: stream.ask("z") == "")
    stream.end()
    assert not [line for line in server.log if "Traceback" in line]


def test_answers_count_until_they_are_sent(process: StartProcess, connect: Connect, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    server = process("FileGated", env={**os.environ, "EDL_TEST_GATE": str(gate)}, metrics_port=0)
    client = connect(server.target)
    slow = client.start(np.full((1, 4), 1.0, np.float32))
    until(lambda: 'edl_teacher_client_bytes{model="m"} 0.0' not in server.metrics())
    gate.touch()
    assert slow.exception() is None
    for _ in range(20):
        client.infer(np.zeros((64, 4), np.float32))
    until(lambda: not left(server.metrics()))


def test_answers_count_in_the_queue(inside: StartInside, connect: Connect) -> None:
    """A row of 16 bytes that is answered with 40,000 waits with what it will take, and alone if that is too much."""
    large = TensorSpec("y", "FP32", (10_000,))
    gate = threading.Event()
    gate.set()

    def answer(inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        gate.wait(30)
        return {"y": np.ones((len(inputs["x"]), 10_000), np.float32)}

    server = inside(FakeBackend(answer, outputs=(large,)), max_message_bytes=8192, max_queue_bytes=100_000)
    client = connect(server.target)
    gate.clear()
    busy = client.start(np.zeros((3, 4), np.float32))
    until(lambda: server.metric("edl_teacher_in_flight") == 1 and server.metric("edl_teacher_queue_bytes") == 0)
    waiting = client.start(np.zeros((3, 4), np.float32))
    until(lambda: server.metric("edl_teacher_queue_bytes") == 100_000)
    with pytest.raises(grpc.RpcError) as refused:
        client.infer(np.zeros((1, 4), np.float32))
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "100,000 of 100,000 bytes wait" in refused.value.details()
    gate.set()
    for call in (busy, waiting):
        assert outputs_of(call.result())["y"].shape == (3, 10_000)
    assert len(client.infer(np.zeros((9, 4), np.float32), edl_top_k=8)) == 3, "of fewer bytes, though computed whole"
