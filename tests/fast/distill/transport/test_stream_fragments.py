"""A reader's large requests: in which messages they go, and what becomes of those that end in the middle."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from edl.distill import DistillReader, Options
from edl.distill.dispatch.actions import FailureKind, RequestFailure
from edl.distill.transport import stream as stream_module
from edl.distill.transport.client import TeacherClient
from edl.distill.transport.request import Payload
from edl.distill.transport.schema import OutputSpec
from edl.distill.transport.stream import InferStream, RawResponse
from edl.protocol import codec, fragments, kserve, names
from tests.fast.distill.conftest import Start
from tests.fast.distill.transport.recording import TIMEOUT_S, with_stream

LEAST_NBYTES, FRAGMENT_NBYTES = 10_000, 4_000


@pytest.fixture(autouse=True)
def _small_fragments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_module, "_LEAST_FRAGMENTED_NBYTES", LEAST_NBYTES)
    monkeypatch.setattr(stream_module, "_FRAGMENT_NBYTES", FRAGMENT_NBYTES)


class Recorder:
    """A server that keeps what it gets, and answers each request with its own tensors while `gate` is open."""

    def __init__(self) -> None:
        self.messages: list[bytes] = []
        self.gate = asyncio.Event()
        self.arrived = asyncio.Condition()

    async def stream(self, requests: AsyncIterator[bytes], context: Any) -> None:
        defragmenter = fragments.Defragmenter(16 << 20)
        async for data in requests:
            async with self.arrived:
                self.messages.append(data)
                self.arrived.notify_all()
            await self.gate.wait()
            header, raw, number = codec.split_streamed_request(data)
            if fragments.is_fragment(header):
                whole = defragmenter.add(raw, number)
                if whole is None:
                    continue
                header, raw, number = codec.split_streamed_request(whole)
            if raw:
                await context.write(codec.join_streamed_response(b"", raw, codec.id_field(number)))

    def kinds(self) -> list[tuple[str, str]]:
        """Of each message its request's id, and what it is."""
        return [(number, kind_of(header)) for header, _, number in map(codec.split_streamed_request, self.messages)]


def kind_of(header: bytes) -> str:
    if fragments.is_fragment(header):
        return "fragment"
    return "cancellation" if names.CANCEL in codec.parse_request(header).parameters else "whole"


def start(stream: InferStream, tensor: bytes) -> tuple[str, asyncio.Future[RawResponse | RequestFailure | None]]:
    future: asyncio.Future[RawResponse | RequestFailure | None] = asyncio.get_running_loop().create_future()
    return stream.start(b"", [tensor], TIMEOUT_S, future.set_result), future


async def expect_echo(future: asyncio.Future[RawResponse | RequestFailure | None], tensor: bytes) -> None:
    answer = await future
    assert isinstance(answer, tuple)
    assert [bytes(view) for view in answer[1]] == [tensor]


@pytest.mark.parametrize("in_fragments", [True, False])
def test_large_requests_go_in_fragments(in_fragments: bool) -> None:
    async def test(stream: InferStream, recorder: Recorder) -> None:
        recorder.gate.set()
        tensors = [b"a" * 10, np.random.default_rng(0).bytes(11_000), b"b" * 9_000, b"c" * 10]
        asked = [start(stream, tensor) for tensor in tensors]
        for (_, future), tensor in zip(asked, tensors, strict=True):
            await expect_echo(future, tensor)
        numbers = [number for number, _ in asked]
        large = [(numbers[1], "fragment")] * 3 if in_fragments else [(numbers[1], "whole")]
        assert recorder.kinds() == [
            (numbers[0], "whole"),
            *large,
            (numbers[2], "whole"),
            (numbers[3], "whole"),
        ]
        assert max(map(len, recorder.messages)) < (9_100 if in_fragments else 11_100)

    with_stream(Recorder(), test, in_fragments=in_fragments)


def test_cancelled_request_is_read_no_more() -> None:
    async def test(stream: InferStream, recorder: Recorder) -> None:
        large = memoryview(bytearray(8 << 20))  # more than the connection takes while the server does not read
        number, future = start(stream, large)  # type: ignore[arg-type]
        async with recorder.arrived:
            await recorder.arrived.wait_for(lambda: recorder.messages)
        stream.cancel(number)
        assert await future is None
        recorder.gate.set()
        _, other = start(stream, b"other")
        await expect_echo(other, b"other")
        kinds = [kind for its_number, kind in recorder.kinds() if its_number == number]
        assert kinds[-1] == "cancellation"
        assert 1 <= kinds.count("fragment") < len(large) // FRAGMENT_NBYTES, "the rest is not sent"
        assert kinds.count("fragment") == len(kinds) - 1

    with_stream(Recorder(), test, in_fragments=True)


def test_stream_that_ends_midway() -> None:
    async def test(stream: InferStream, recorder: Recorder) -> None:
        _, future = start(stream, bytes(8 << 20))
        async with recorder.arrived:
            await recorder.arrived.wait_for(lambda: recorder.messages)
        await stream.close()
        found = await future
        assert isinstance(found, RequestFailure)
        assert found.kind is FailureKind.LOST
        recorder.gate.set()

    with_stream(Recorder(), test, in_fragments=True)


def use_unknown_fragments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have fragments carry a parameter that the server does not know, as a server of an older release sees them."""
    parameters = {"edl_not_known": kserve.InferParameter(bool_param=True)}
    monkeypatch.setattr(fragments, "_HEADER", kserve.ModelInferRequest(parameters=parameters).SerializeToString())


def test_refused_fragments_are_sent_whole(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A load balancer may lead to an older server than the one that announced fragments."""
    use_unknown_fragments(monkeypatch)
    caplog.set_level(logging.INFO, "edl.distill")
    reader = DistillReader(["x"], ["y"], options=Options(teacher_timeout_s=TIMEOUT_S, shared_memory=False))
    reader.set_fixed_teacher([start("echo").endpoint])
    reader.set_teacher_batch_size(1000)
    reader.set_batch_generator(lambda: ((np.full((1000, 4), number, np.float32),) for number in range(20)))
    with reader:
        answers = [(float(x[0, 0]), float(y[-1, -1])) for x, y in reader()]
    assert answers == [(number, number) for number in range(20)]
    given_up = [record for record in caplog.records if "refused a request in fragments" in record.message]
    assert len(given_up) == 1, "fragments are given up once"


def test_refused_whole_as_well_is_an_error(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask() -> RequestFailure:
        client = TeacherClient(teacher.endpoint, OutputSpec(("y",)), shared_memory=False)
        good = Payload.of({"x": np.ones((1000, 4), np.float32)}, None)
        bad = Payload.of({"x": np.ones((1000, 3), np.float32)}, None)
        await client.open(TIMEOUT_S)
        try:
            await client.infer(good, TIMEOUT_S)  # the size is known to be taken
            future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            assert client.start(bad, TIMEOUT_S, future.set_result) is not None
            failure = await future
            reply = await client.infer(good, TIMEOUT_S)
            assert float(reply.outputs["y"].sum()) == 4000, "other requests are not harmed"
            return failure
        finally:
            await client.close()

    teacher = start("echo")
    for known in (True, False):
        if not known:
            use_unknown_fragments(monkeypatch)
        failure = asyncio.run(asyncio.wait_for(ask(), 2 * TIMEOUT_S))
        assert failure.kind is FailureKind.REJECTED, failure
        assert "[1000, 3]" in failure.message, "the server's words about the request itself"


@pytest.mark.parametrize("announced", [True, False])
def test_reader_delivers_labels_of_fragments(start: Start, monkeypatch: pytest.MonkeyPatch, announced: bool) -> None:
    sent: list[int] = []
    cut = fragments.fragment_request

    def counted(*given: Any) -> Any:
        sent.append(1)
        return cut(*given)

    monkeypatch.setattr(fragments, "fragment_request", counted)
    if not announced:
        monkeypatch.setattr(names, "EXTENSION_FRAGMENT", "not announced")
    teachers = [start("echo") for _ in range(2)]
    batches = 100
    reader = DistillReader(["x"], ["y"], options=Options(teacher_timeout_s=TIMEOUT_S, shared_memory=False))
    reader.set_fixed_teacher([teacher.endpoint for teacher in teachers])
    reader.set_teacher_batch_size(1000)
    reader.set_batch_generator(lambda: ((np.full((1000, 4), number, np.float32),) for number in range(batches)))
    with reader:
        delivered = 0
        for x, y in reader():
            assert (x == delivered).all()
            assert (y == delivered).all()
            delivered += 1
            if delivered == batches // 2:
                teachers[0].kill()
        assert delivered == batches
    assert bool(sent) == announced
