"""One connection to one teacher: its stream, and what goes wrong on it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeAlias

import numpy as np
import pytest

from edl.distill.dispatch.actions import FailureKind
from edl.distill.engine.event_loop import EventLoopThread
from edl.distill.transport.client import RequestFailed, TeacherClient
from edl.distill.transport.request import Payload
from edl.distill.transport.schema import OutputSpec
from tests.fast.distill.conftest import Serve
from tests.fast.distill.reading import WIDTH, Held
from tests.waiting import DEADLINE_S, wait_until

WithClient: TypeAlias = Callable[[Any, Callable[[TeacherClient], Awaitable[None]]], None]


@pytest.fixture
def with_client() -> Iterator[WithClient]:
    """Runs a coroutine with a connection to a teacher, and sees that closing it leaves no task behind."""
    thread = EventLoopThread.acquire()
    before: set[Any] = set()

    async def run(teacher: Any, test: Callable[[TeacherClient], Awaitable[None]]) -> None:
        before.update(asyncio.all_tasks())
        client = TeacherClient(teacher.endpoint, OutputSpec(("y",)))
        try:
            await client.open(DEADLINE_S)
            await test(client)
        finally:
            await client.close()

    async def others() -> set[Any]:
        return asyncio.all_tasks() - before - {asyncio.current_task()}

    def run_and_end(teacher: Any, test: Callable[[TeacherClient], Awaitable[None]]) -> None:
        thread.run(run(teacher, test), 2 * DEADLINE_S)
        wait_until(lambda: not thread.run(others(), DEADLINE_S), "the end of the connection's tasks")

    yield run_and_end
    thread.release()


def infer(client: TeacherClient, value: float, rows: int = 1, timeout_s: float = DEADLINE_S) -> asyncio.Task[Any]:
    async def ask() -> Any:
        payload = Payload.of({"x": np.full((rows, WIDTH), value, np.float32)}, None)
        return (await client.infer(payload, timeout_s)).outputs["y"]

    return asyncio.create_task(ask())


async def kind_of(answer: Awaitable[Any]) -> FailureKind:
    with pytest.raises(RequestFailed) as caught:
        await answer
    return caught.value.failure.kind


async def stream_of(client: TeacherClient) -> Any:
    """Ask once, so that the stream is there."""
    await infer(client, 0)
    assert client._stream is not None
    assert not client._stream.broken
    return client._stream


@pytest.mark.parametrize("asked_before", [True, False])
def test_another_teacher_at_the_address(serve: Serve, with_client: WithClient, asked_before: bool) -> None:
    """gRPC connects again by itself; what is known of the model's version and of shared memory holds no more."""
    first = serve("echo")

    async def test(client: TeacherClient) -> None:
        if asked_before:
            await infer(client, 0)
        await asyncio.to_thread(first.close)
        await asyncio.to_thread(serve, "echo", {"port": first.port}, version="2")
        await asyncio.to_thread(wait_until, lambda: client._stream is None or client._stream.broken)
        assert await kind_of(infer(client, 0)) is FailureKind.LOST

    with_client(first, test)


def test_timeout_or_cancel_is_alone(serve: Serve, with_client: WithClient) -> None:
    """A request that times out or is cancelled leaves the others alone."""
    held = Held()
    held.go.set()

    async def test(client: TeacherClient) -> None:
        stream = await stream_of(client)
        held.go.clear()
        cancelled, patient = infer(client, 1), infer(client, 2)
        assert await kind_of(infer(client, 3, timeout_s=0.1)) is FailureKind.TIMEOUT
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        held.go.set()
        assert (await patient == 2).all()
        assert (await infer(client, 4) == 4).all()
        assert client._stream is stream
        assert not stream._waiting

    with_client(serve(held), test)


def test_close_while_a_request_is_sent(serve: Serve, with_client: WithClient) -> None:
    async def test(client: TeacherClient) -> None:
        tasks = [asyncio.create_task(kind_of(infer(client, 1))) for _ in range(3)]
        await asyncio.sleep(0)  # the stream is open, nothing is on its way
        await client.close()
        assert await asyncio.gather(*tasks) == [FailureKind.LOST] * 3

    with_client(serve("echo"), test)
