"""Limits at the wire: who waits is served in the end, readiness is always told, and nothing that ended counts."""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
import threading
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from edl.protocol import bundles, codec, names
from edl.protocol.transport import grpc
from edl_serving import ServerSettings
from edl_serving.lifecycle import Lifecycle, ServerState
from edl_serving.rpc.clients import ConnectionLimiter, StreamSlot
from edl_serving.rpc.stream import InferStreamHandler
from tests.fast.serving.conftest import TIMEOUT_S, Client, Connect, Inside, StartInside, request_bytes
from tests.fast.serving.models import Base
from tests.fast.serving.rpc.test_fuzz import bad_requests
from tests.fast.serving.rpc.test_stream import Open
from tests.waiting import wait_until

GAUGES = ("in_flight", "queue_rows", "queue_bytes", "connections", "streams", "client_bytes")


def ask(stream: Open, request_id: str) -> str:
    """Ask for one row; the error, empty if there is none."""
    stream.send(request_id, np.zeros((1, 4), np.float32))
    answer = stream.read()
    assert answer.infer_response.id == request_id
    return answer.error_message


def left(server: Inside) -> list[str]:
    return [gauge for gauge in GAUGES if server.metric(f"edl_teacher_{gauge}")]


def test_a_waiting_stream_is_served_later(inside: StartInside, connect: Connect) -> None:
    server = inside(Base(), max_streams=1)
    first = Open(connect(server.target).channel)
    assert ask(first, "a") == ""
    second = Open(connect(server.target).channel)
    assert "1 streams are open" in ask(second, "b")
    third = Open(connect(server.target).channel)
    wait_until(lambda: third.call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED)
    assert "1 streams wait for a place" in third.call.details()
    assert names.RETRY_AFTER_MS in dict(third.call.trailing_metadata())
    assert "1 streams are open" in ask(second, "c")
    first.end()
    assert list(first.call) == []
    wait_until(lambda: ask(second, "d") == "")
    fourth = Open(connect(server.target).channel)
    assert "1 streams are open" in ask(fourth, "e"), "the place of one that waits is free again"
    fourth.end()
    second.end()
    third.end()
    assert list(second.call) == []
    wait_until(lambda: not left(server))


def test_readiness_is_told_beyond_the_limit(inside: StartInside, connect: Connect) -> None:
    server = inside(Base(), max_connections=1)
    first = Open(connect(server.target).channel)
    assert ask(first, "a") == ""
    other = connect(server.target)
    assert other.ask("ServerReady").ready
    assert other.ask("ModelReady", name="m").ready
    call = other.start(np.zeros((1, 4), np.float32))
    assert call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "1 clients are connected" in call.details()
    first.end()


def test_what_vanishes_counts_no_more(inside: StartInside, connect: Connect, caplog: pytest.LogCaptureFixture) -> None:
    server = inside(Base(), max_streams=8, max_client_bytes=1 << 20, max_message_bytes=1 << 20)

    def student(number: int) -> None:
        rng = random.Random(number)
        bad = bad_requests(rng)
        client = Client(server.target)
        stream = Open(client.channel)
        for _ in range(rng.randrange(1, 40)):
            x = np.full((rng.choice([1, 8, 4000]), 4), 0.001, np.float32)
            fine = request_bytes({"x": x}) + codec.id_field(str(rng.random()))
            stream.send_bytes(fine if rng.random() < 0.7 else next(bad))
        if rng.random() < 0.5:
            with contextlib.suppress(grpc.RpcError):
                next(stream.call, None)
        if rng.random() < 0.3:
            stream.end()
        else:
            stream.call.cancel()
        client.close()

    for first in (0, 8):
        threads = [threading.Thread(target=student, args=(first + number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT_S)
    wait_until(lambda: not left(server))
    stream = Open(connect(server.target).channel)
    wait_until(lambda: ask(stream, "z") == "")
    stream.end()
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("state", [ServerState.READY, ServerState.STARTING])
def test_stream_forgets_its_last_request(state: ServerState) -> None:
    """Where the requests are answered, and where a server that starts refuses them."""
    written = 0

    class Context:
        async def write(self, message: bytes) -> None:
            nonlocal written
            written += 1

    async def compute(*_: Any) -> bytes:
        return b"answer"

    async def requests() -> AsyncIterator[bytes]:
        for number in (1, 2):
            parts = [codec.join_request(codec.id_field(str(number)), [bytes(1000)])]
            data = parts.pop() if number == 1 else bundles.join_requests(parts)
            yield data
            while written < number or sys.getrefcount(data) > 2:  # noqa: ASYNC110 - this frame, and the call's argument
                await asyncio.sleep(0)

    async def run() -> None:
        slot = StreamSlot(ConnectionLimiter(ServerSettings(model="m")), "client")
        metadata = {names.UNORDERED: "1", names.BUNDLES: "1"}
        lifecycle, context = Lifecycle(), Context()
        lifecycle.state = state
        handler = InferStreamHandler(compute, lambda: None, lifecycle, slot, metadata, context, 1 << 20)  # type: ignore[arg-type]
        await asyncio.wait_for(handler.run(requests()), TIMEOUT_S)
        slot.close()

    asyncio.run(run())
