"""Which messages a reader's stream sends to a server that takes bundles, and to one that does not know them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from edl.distill import DistillReader, Options
from edl.distill.dispatch.actions import RequestFailure
from edl.distill.transport.client import TeacherClient
from edl.distill.transport.request import Payload
from edl.distill.transport.schema import OutputSpec
from edl.distill.transport.stream import InferStream, RawResponse
from edl.protocol import bundles, codec, names
from edl.testing import LocalTeacher
from tests.fast.distill.conftest import Start
from tests.fast.distill.transport.recording import TIMEOUT_S, with_stream


class Recorder:
    """A server that keeps what it gets, and answers each request with its own first tensor, backwards."""

    def __init__(self) -> None:
        self.messages: list[bytes] = []
        self.metadata: dict[str, Any] = {}

    async def stream(self, requests: AsyncIterator[bytes], context: Any) -> None:
        self.metadata = dict(context.invocation_metadata())
        async for data in requests:
            self.messages.append(data)
            answers = []
            for message in parts_of(data):
                _, raw, number = codec.split_streamed_request(message)
                if raw:
                    answers.append(codec.join_streamed_response(b"", raw, codec.id_field(number)))
            if len(answers) > 1:
                await context.write(bundles.join_responses(answers[::-1]))
            elif answers:
                await context.write(answers[0])


def parts_of(data: bytes) -> list[Any]:
    header, raw, _ = codec.split_streamed_request(data)
    return list(raw) if bundles.is_bundle(header) else [data]


async def ask_all(stream: InferStream, tensors: list[bytes]) -> None:
    """Start them in one turn of the loop, and see that each gets its own answer."""
    loop = asyncio.get_running_loop()
    found: list[asyncio.Future[RawResponse | RequestFailure | None]] = [loop.create_future() for _ in tensors]
    for tensor, future in zip(tensors, found, strict=True):
        stream.start(b"", [tensor], TIMEOUT_S, future.set_result)
    for tensor, future in zip(tensors, found, strict=True):
        answer = await future
        assert isinstance(answer, tuple)
        assert [bytes(view) for view in answer[1]] == [tensor]


def test_bundle_answers_each_request() -> None:
    """What is there together goes in few messages and each gets its own answer."""

    async def test(stream: InferStream, recorder: Recorder) -> None:
        await ask_all(stream, [bytes([number]) * 500 for number in range(20)])
        assert names.BUNDLES in recorder.metadata
        sizes = [len(parts_of(message)) for message in recorder.messages]
        assert sum(sizes) == 20
        assert len(sizes) == 3, "seven fit into a message that no server refuses"
        assert max(map(len, recorder.messages)) <= 4096

    with_stream(Recorder(), test, in_bundles=True)


def test_large_request_keeps_its_place() -> None:
    """A large request goes alone and keeps its place."""

    async def test(stream: InferStream, recorder: Recorder) -> None:
        await ask_all(stream, [b"a", b"b", b"c" * 10_000, b"d", b"e"])
        assert [len(parts_of(message)) for message in recorder.messages] == [2, 1, 2]

    with_stream(Recorder(), test, in_bundles=True)


def test_cancellation_follows_its_request() -> None:
    """A cancellation comes behind its request."""

    async def test(stream: InferStream, recorder: Recorder) -> None:
        ended: list[Any] = []
        number = stream.start(b"", [], TIMEOUT_S, ended.append)  # the recorder answers no request without a tensor
        await ask_all(stream, [b"a"])
        stream.cancel(number)
        await ask_all(stream, [b"b"])
        assert ended == [None]
        heads = [codec.split_streamed_request(part) for message in recorder.messages for part in parts_of(message)]
        mine = [codec.parse_request(header) for header, _, its_number in heads if its_number == number]
        assert [names.CANCEL in header.parameters for header in mine] == [False, True]

    with_stream(Recorder(), test, in_bundles=True)


def test_old_server_gets_single_messages() -> None:
    """A server that does not know bundles gets a message a request."""

    async def test(stream: InferStream, recorder: Recorder) -> None:
        await ask_all(stream, [bytes([number]) for number in range(20)])
        assert names.BUNDLES not in recorder.metadata
        assert len(recorder.messages) == 20
        assert not any(bundles.is_bundle(codec.split_streamed_request(one)[0]) for one in recorder.messages)

    with_stream(Recorder(), test, in_bundles=False)


@pytest.mark.parametrize("announced", [True, False])
def test_bundles_go_to_servers_that_know(start: Start, monkeypatch: pytest.MonkeyPatch, announced: bool) -> None:
    """Bundles are sent to servers that announce them."""
    teacher: LocalTeacher = start("echo", max_batch=8)
    sent: list[int] = []
    join = bundles.join_requests
    monkeypatch.setattr(bundles, "join_requests", lambda messages: sent.append(len(messages)) or join(messages))
    if not announced:
        monkeypatch.setattr(names, "EXTENSION_BUNDLE", "not announced")

    async def run() -> None:
        client = TeacherClient(teacher.endpoint, OutputSpec(("y",)))
        try:
            await client.open(TIMEOUT_S)
            payloads = [
                Payload.of({"x": np.full((1 + number % 3, 4), number, np.float32)}, None) for number in range(100)
            ]
            answers = await asyncio.gather(*(client.infer(payload, TIMEOUT_S) for payload in payloads))
        finally:
            await client.close()
        for number, answer in enumerate(answers):
            assert answer.outputs["y"].shape == (1 + number % 3, 4)
            assert (answer.outputs["y"] == number).all()

    asyncio.run(asyncio.wait_for(run(), 2 * TIMEOUT_S))
    assert bool(sent) == announced


def test_gathered_requests_survive_a_kill(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests in shared memory gather and a killed teacher costs no sample."""
    teachers = [start("echo") for _ in range(2)]
    batches = 4000
    sent: list[int] = []
    join = bundles.join_requests
    monkeypatch.setattr(bundles, "join_requests", lambda messages: sent.append(len(messages)) or join(messages))
    reader = DistillReader(["x"], ["y"], options=Options(teacher_timeout_s=TIMEOUT_S))
    reader.set_fixed_teacher([teacher.endpoint for teacher in teachers])
    reader.set_batch_generator(lambda: ((np.full((2, 4), number, np.float32),) for number in range(batches)))
    with reader:
        delivered = 0
        for x, y in reader():
            assert (x == delivered).all()
            assert (y == delivered).all()
            delivered += 1
            if delivered == 2000:
                teachers[0].kill()
        stats = reader.stats()
    assert delivered == batches
    assert stats.rows_asked == stats.rows_received == 2 * batches
    assert sum(sent) > batches / 20, "as a rule most go in bundles; a busy machine may keep them apart"
