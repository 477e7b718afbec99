"""One connection to one teacher: its stream, and what goes wrong on it."""

from __future__ import annotations

import asyncio
import time
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeAlias

import numpy as np
import pytest

from edl.distill.dispatch.actions import FailureKind
from edl.distill.engine.event_loop import EventLoopThread
from edl.distill.transport.client import RequestFailed, TeacherClient
from edl.distill.transport.request import Payload
from edl.distill.transport.schema import OutputSpec
from edl.testing import LocalTeacher
from tests.fast.distill.conftest import Start, until
from tests.plugins_consul import free_ports

WIDTH = 4


def payload(value: float, rows: int = 1) -> Payload:
    return Payload.of({"x": np.full((rows, WIDTH), value, np.float32)}, None)


WithClient: TypeAlias = Callable[[LocalTeacher, Callable[[TeacherClient], Awaitable[None]]], None]


@pytest.fixture
def with_client() -> Iterator[WithClient]:
    """Runs a coroutine with a connection to a teacher, and sees that closing it leaves no task behind."""
    thread = EventLoopThread.acquire()

    async def run(teacher: LocalTeacher, test: Callable[[TeacherClient], Awaitable[None]]) -> None:
        before = asyncio.all_tasks()
        client = TeacherClient(teacher.endpoint, OutputSpec(("y",)))
        try:
            await client.open(20)
            await test(client)
        finally:
            await client.close()
        deadline = time.monotonic() + 30
        while asyncio.all_tasks() - before:
            assert time.monotonic() < deadline, asyncio.all_tasks() - before
            await asyncio.sleep(0.01)

    yield lambda teacher, test: thread.run(run(teacher, test), 60)
    thread.release()


async def infer(client: TeacherClient, value: float, rows: int = 1, timeout_s: float = 20) -> Any:
    return (await client.infer(payload(value, rows), timeout_s)).outputs["y"]


async def kind_of(answer: Awaitable[Any]) -> FailureKind:
    with pytest.raises(RequestFailed) as caught:
        await answer
    return caught.value.failure.kind


async def streams(client: TeacherClient) -> Any:
    """Ask once, so that the stream is there."""
    await infer(client, 0)
    assert client._stream is not None
    assert not client._stream.broken
    return client._stream


def waiting_on(stream: Any) -> int:
    return len(stream._waiting)


def test_concurrent_requests_get_own_answers(start: Start, with_client: WithClient) -> None:
    """Many at a time each get their own answer."""

    async def test(client: TeacherClient) -> None:
        stream = await streams(client)
        answers = await asyncio.gather(*(infer(client, number, 1 + number % 5) for number in range(200)))
        for number, answer in enumerate(answers):
            assert answer.shape == (1 + number % 5, WIDTH)
            assert (answer == number).all()
        assert client._stream is stream
        assert not waiting_on(stream)

    with_client(start("echo", max_batch=8), test)


def test_killed_teacher_fails_all_requests(start: Start, with_client: WithClient) -> None:
    """A killed teacher fails all requests at once."""
    teacher = start("echo", delay_s=30)

    async def test(client: TeacherClient) -> None:
        tasks = [asyncio.create_task(kind_of(infer(client, 0))) for _ in range(5)]
        await asyncio.sleep(0.2)
        killed = time.monotonic()
        teacher.kill()
        assert await asyncio.gather(*tasks) == [FailureKind.LOST] * 5
        assert time.monotonic() - killed < 15, "milliseconds on an idle machine; a request's time is 20 s"
        assert await kind_of(infer(client, 0)) is FailureKind.LOST

    with_client(teacher, test)


@pytest.mark.parametrize("asked_before", [True, False])
def test_another_teacher_at_the_address(start: Start, with_client: WithClient, asked_before: bool) -> None:
    """gRPC connects again by itself; what is known of the model's version and of shared memory holds no more."""
    first = start("echo", version="1", port=free_ports(1)[0])

    async def test(client: TeacherClient) -> None:
        if asked_before:
            await infer(client, 0)
        first.kill()
        await asyncio.to_thread(start, "echo", version="2", port=first.port)
        await asyncio.to_thread(until, lambda: client._stream is None or client._stream.broken, 20)
        assert await kind_of(infer(client, 0)) is FailureKind.LOST

    with_client(first, test)


def test_timeout_or_cancel_is_alone(start: Start, with_client: WithClient) -> None:
    """A request that times out or is cancelled leaves the others alone."""
    teacher = start("echo")

    async def test(client: TeacherClient) -> None:
        stream = await streams(client)
        teacher.pause()
        cancelled = asyncio.create_task(infer(client, 1))
        patient = asyncio.create_task(infer(client, 2))
        assert await kind_of(infer(client, 3, timeout_s=0.2)) is FailureKind.TIMEOUT
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        teacher.resume()
        assert (await patient == 2).all()
        assert (await infer(client, 4) == 4).all()
        assert client._stream is stream
        assert not waiting_on(stream)

    with_client(teacher, test)


def test_too_large_request_is_rejected_alone(start: Start, with_client: WithClient) -> None:
    """A request that is too large is rejected alone."""
    rows = 100_000 // (4 * WIDTH)
    teacher = start("echo", serve={"max-message": "64KiB"}, max_queue=2 * rows)

    async def test(client: TeacherClient) -> None:
        stream = await streams(client)
        tasks = [asyncio.create_task(infer(client, number)) for number in range(20)]
        large = [asyncio.create_task(kind_of(infer(client, 0, rows))) for _ in range(3)]
        assert await asyncio.gather(*large) == [FailureKind.REJECTED] * 3
        for number, answer in enumerate(await asyncio.gather(*tasks)):
            assert (answer == number).all()
        assert client._stream is stream

    with_client(teacher, test)


def test_large_messages_go_by_stream_later(start: Start, with_client: WithClient) -> None:
    """Large messages pass and go by stream once one has."""
    rows = 8_000_000 // (4 * WIDTH)

    async def test(client: TeacherClient) -> None:
        for value in range(3):
            answers = await asyncio.gather(*(infer(client, value, rows) for _ in range(3)))
            assert all((answer == value).all() for answer in answers)
            assert (client._stream is not None) == (value > 0)

    with_client(start("echo", max_batch=rows, max_queue=4 * rows), test)


@pytest.mark.parametrize(("fault", "kind"), [("nan", FailureKind.ERROR), ("raises", FailureKind.ERROR)])
def test_failures_are_told_apart(start: Start, with_client: WithClient, fault: str, kind: FailureKind) -> None:
    """Failures are told apart as those of single calls."""

    async def test(client: TeacherClient) -> None:
        kinds = [await kind_of(infer(client, 1))]
        client._server_streams = False
        kinds.append(await kind_of(infer(client, 1)))
        assert kinds == [kind, kind]

    with_client(start(fault), test)


def test_full_queue_gives_a_hint(start: Start, with_client: WithClient) -> None:
    """A full queue says when to come again."""

    async def test(client: TeacherClient) -> None:
        answers = await asyncio.gather(*(infer(client, 1) for _ in range(30)), return_exceptions=True)
        failures = [answer.failure for answer in answers if isinstance(answer, RequestFailed)]
        assert len(failures) < 30
        assert {failure.kind for failure in failures} == {FailureKind.OVERLOADED}
        assert all(failure.retry_after_s > 0 for failure in failures)

    with_client(start("echo", delay_s=0.05, max_batch=1, max_queue=4), test)


def test_draining_server_answers_first(start: Start, with_client: WithClient) -> None:
    """A server that drains is lost only after it has answered."""
    teacher = start("echo", delay_s=4, serve={"metrics-port": 0})  # in which a busy machine sees that it computes
    page = f"http://127.0.0.1:{teacher.metrics_port}/metrics"

    def is_busy() -> bool:
        return 'edl_teacher_in_flight{model="m"} 1.0' in urllib.request.urlopen(page, timeout=10).read().decode()

    async def test(client: TeacherClient) -> None:
        taken = asyncio.create_task(infer(client, 7))
        await asyncio.to_thread(until, is_busy, 20)
        teacher.terminate()
        assert (await taken == 7).all()
        while not client._stream.broken:  # type: ignore[union-attr]  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert await kind_of(infer(client, 8)) is FailureKind.LOST

    with_client(teacher, test)
    assert teacher.wait() == 0


def test_close_while_a_request_is_sent(start: Start, with_client: WithClient) -> None:
    """A connection may be closed while a request is sent."""

    async def test(client: TeacherClient) -> None:
        tasks = [asyncio.create_task(kind_of(infer(client, 1))) for _ in range(3)]
        await asyncio.sleep(0)  # the stream is open, nothing is on its way
        await client.close()
        assert await asyncio.gather(*tasks) == [FailureKind.LOST] * 3

    with_client(start("echo"), test)


def test_old_server_gives_no_infinities() -> None:
    """A server that knows no dtypes gives no infinities either."""
    thread = EventLoopThread.acquire()

    async def cast() -> Any:
        client = TeacherClient("127.0.0.1:1", OutputSpec(("y",), dtype="float16"))
        try:
            return client._checked("y", {"y": np.array([[-1e9, 1e9, np.inf, 2]], np.float32)}, 1)
        finally:
            await client.close()

    try:
        found = thread.run(cast(), 20)
    finally:
        thread.release()
    assert found.dtype == np.float16
    assert found.tolist() == [[-65504, 65504, np.inf, 2]]
