"""One connection to one teacher: its channel, and what goes wrong on it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeAlias

import numpy as np
import pytest

from edl.discovery import Instance
from edl.distill.dispatch.actions import FailureKind, RequestFailure
from edl.distill.engine.connection import _complete_spec
from edl.distill.engine.event_loop import EventLoopThread
from edl.distill.teachers import Teachers
from edl.distill.transport.calls import RequestFailed
from edl.distill.transport.client import TeacherClient
from edl.distill.transport.request import Payload
from edl.distill.transport.schema import OutputSpec, Priority, RequestPriority, choose_priority, parse_priority
from edl.errors import SettingsError
from tests.fast.distill.conftest import Serve
from tests.fast.distill.reading import WIDTH, Held
from tests.waiting import DEADLINE_S, wait_until

CHANNEL = {"tensor_channel": True}
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


async def ask(client: TeacherClient, payload: Payload, timeout_s: float = DEADLINE_S) -> Any:
    """Send a request, and wait for its `y`. Cancelling cancels the request."""
    answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    cancel = client.start(payload, timeout_s, lambda result: answer.done() or answer.set_result(result))
    try:
        result = await answer
    finally:
        cancel()
    if isinstance(result, RequestFailure):
        raise RequestFailed(result.kind, result.message)
    return result.outputs["y"]


def infer(client: TeacherClient, value: float, timeout_s: float = DEADLINE_S) -> asyncio.Task[Any]:
    payload = Payload.of({"x": np.full((1, WIDTH), value, np.float32)}, None)
    return asyncio.create_task(ask(client, payload, timeout_s))


async def kind_of(answer: Awaitable[Any]) -> FailureKind:
    with pytest.raises(RequestFailed) as caught:
        await answer
    return caught.value.failure.kind


def test_another_teacher_at_the_address(serve: Serve, with_client: WithClient) -> None:
    """gRPC connects again by itself; what is known of the model's version and of shared memory holds no more."""
    first = serve("echo", CHANNEL)

    async def test(client: TeacherClient) -> None:
        await asyncio.to_thread(first.close)
        await asyncio.to_thread(serve, "echo", {"port": first.port}, version="2")
        await asyncio.to_thread(wait_until, lambda: client._channel is not None and client._channel.broken)
        assert await kind_of(infer(client, 0)) is FailureKind.LOST

    with_client(first, test)


def test_timeout_or_cancel_is_alone(serve: Serve, with_client: WithClient) -> None:
    held = Held()
    held.go.set()

    async def test(client: TeacherClient) -> None:
        channel = client._channel
        await infer(client, 0)
        held.go.clear()
        cancelled, patient = infer(client, 1), infer(client, 2)
        assert await kind_of(infer(client, 3, timeout_s=0.1)) is FailureKind.TIMEOUT
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        held.go.set()
        assert (await patient == 2).all()
        assert (await infer(client, 4) == 4).all()
        assert client._channel is channel is not None
        assert not channel.broken
        assert not channel._waiting

    with_client(serve(held, CHANNEL), test)


def test_close_while_a_request_is_sent(serve: Serve, with_client: WithClient, caplog: pytest.LogCaptureFixture) -> None:
    async def test(client: TeacherClient) -> None:
        tasks = [asyncio.create_task(kind_of(infer(client, 1))) for _ in range(3)]
        await asyncio.sleep(0)  # nothing is on its way
        await client.close()
        tasks.append(asyncio.create_task(kind_of(infer(client, 1))))  # gRPC's words about a closed channel are no news
        assert await asyncio.gather(*tasks) == [FailureKind.LOST] * 4

    with_client(serve("echo"), test)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.parametrize(
    ("wanted", "levels", "level", "rows", "in_flight", "warned"),
    [
        ("auto", 1, 0, 0, 0, False),
        ("auto", 3, 3, 0, 0, False),
        ("default", 3, 0, 0, 0, False),
        ("lowest", 3, 3, 4, 1, False),
        ("lowest", 0, 0, 4, 1, True),
        (2, 3, 2, 0, 0, False),
        (7, 3, 3, 0, 0, True),
        (7, 0, 0, 0, 0, True),
        ("auto", 2, 2, 0, 0, False),
        ("auto", 2**64 - 1, 2**32 - 1, 0, 0, False),
    ],
)
def test_how_a_model_is_asked(
    wanted: Priority, levels: int, level: int, rows: int, in_flight: int, warned: bool
) -> None:
    assert choose_priority(wanted, supported=False, levels=levels, max_batch=64, instances=2).level == 0
    assert choose_priority(wanted, supported=True, levels=levels, max_batch=8, instances=1).max_rows in (0, 1)
    found = choose_priority(wanted, supported=True, levels=levels, max_batch=64, instances=2)
    assert (found.level, found.max_rows, found.max_in_flight, bool(found.warning)) == (level, rows, in_flight, warned)


@pytest.mark.parametrize("value", [0, True, 1.5, None, "", "low", "0", "-1", "²", "9" * 30, 2**32])
def test_what_is_no_priority(value: Any) -> None:
    with pytest.raises(SettingsError, match="priority="):
        Teachers(service="bert", priority=value)
    if isinstance(value, str):
        with pytest.raises(SettingsError, match="priority="):
            parse_priority(value)


def test_registration_fills_what_is_open(caplog: pytest.LogCaptureFixture) -> None:
    def complete(priority: Priority, registered: str) -> Priority:
        instance = Instance("bert", "a", "10.0.0.1", 8001, meta={"priority": registered} if registered else {})
        return _complete_spec(OutputSpec(("y",), priority=priority), instance).priority

    assert complete("auto", "") == "auto"
    assert complete("auto", "lowest") == "lowest"
    assert complete("auto", "3") == 3
    assert complete("default", "lowest") == "default", "the student's own word"
    assert complete("auto", "urgent!") == "auto"
    assert "the registration of a: priority='urgent!'" in caplog.text
    assert RequestPriority().level == 0
