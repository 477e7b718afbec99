"""In which messages a reader's stream sends requests: small ones in bundles, large ones in fragments, others whole."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, TypeAlias

import numpy as np
import pytest

from edl.distill import DistillReader, Options
from edl.distill.dispatch.actions import FailureKind, RequestFailure
from edl.distill.transport import stream as stream_module
from edl.distill.transport.client import TeacherClient
from edl.distill.transport.request import Payload
from edl.distill.transport.schema import OutputSpec
from edl.distill.transport.stream import InferStream, RawResponse
from edl.protocol import bundles, codec, fragments, kserve, names
from edl.protocol.transport import grpc
from edl.testing import LocalTeacher
from tests.fast.distill.conftest import Serve, announce_less
from tests.fast.distill.transport.test_client import ask as ask_client
from tests.waiting import DEADLINE_S

LEAST_NBYTES, FRAGMENT_NBYTES = 10_000, 4_000
Answer: TypeAlias = "asyncio.Future[RawResponse | RequestFailure | None]"


@pytest.fixture(autouse=True)
def _small_fragments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_module, "_LEAST_FRAGMENTED_NBYTES", LEAST_NBYTES)
    monkeypatch.setattr(stream_module, "_FRAGMENT_NBYTES", FRAGMENT_NBYTES)


class Recorder:
    """A server that keeps what it gets, and answers each request with its own tensors, a bundle's backwards."""

    def __init__(self) -> None:
        self.messages: list[bytes] = []
        self.metadata: dict[str, Any] = {}
        self.gate = asyncio.Event()
        self.gate.set()
        self.arrived = asyncio.Event()

    async def stream(self, requests: AsyncIterator[bytes], context: Any) -> None:
        self.metadata = dict(context.invocation_metadata())
        defragmenter = fragments.Defragmenter(16 << 20)
        async for data in requests:
            self.messages.append(data)
            self.arrived.set()
            await self.gate.wait()
            answers = []
            for message in parts_of(data):
                header, raw, number = codec.split_streamed_request(message)
                if fragments.is_fragment(header):
                    whole = defragmenter.add(raw, number)
                    if whole is None:
                        continue
                    header, raw, number = codec.split_streamed_request(whole)
                if raw:
                    answers.append(codec.join_streamed_response(b"", raw, codec.id_field(number)))
            if len(answers) > 1:
                await context.write(bundles.join_responses(answers[::-1]))
            elif answers:
                await context.write(answers[0])

    def kinds(self) -> list[tuple[str, str]]:
        """Of each message, or part of a bundle, its request's id, and what it is."""
        parts = [part for message in self.messages for part in parts_of(message)]
        return [(number, kind_of(header)) for header, _, number in map(codec.split_streamed_request, parts)]


def parts_of(data: bytes) -> list[Any]:
    header, raw, _ = codec.split_streamed_request(data)
    return list(raw) if bundles.is_bundle(header) else [data]


def kind_of(header: bytes) -> str:
    if fragments.is_fragment(header):
        return "fragment"
    return "cancellation" if names.CANCEL in codec.parse_request(header).parameters else "whole"


def with_stream(test: Callable[[InferStream, Recorder], Awaitable[None]], **options: Any) -> None:
    """Run `test` with a stream to a `Recorder`, which is opened with `options`."""

    async def run() -> None:
        recorder, server = Recorder(), grpc.aio.server()
        handlers: dict[str, Any] = {"ModelStreamInfer": grpc.stream_stream_rpc_method_handler(recorder.stream)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(names.SERVICE, handlers),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stream = InferStream(channel, "here", **options)
            await test(stream, recorder)
            await stream.close()
        await server.stop(0)

    asyncio.run(asyncio.wait_for(run(), DEADLINE_S))


def ask(stream: InferStream, tensor: Any) -> tuple[str, Answer]:
    future: Answer = asyncio.get_running_loop().create_future()
    return stream.start(b"", [tensor], DEADLINE_S, future.set_result), future


async def ask_all(stream: InferStream, tensors: list[bytes]) -> list[str]:
    """Start them in one turn of the loop, and see that each gets its own answer; their ids."""
    asked = [ask(stream, tensor) for tensor in tensors]
    for tensor, (_, future) in zip(tensors, asked, strict=True):
        answer = await future
        assert isinstance(answer, tuple)
        assert [bytes(view) for view in answer[1]] == [tensor]
    return [number for number, _ in asked]


def test_bundle_answers_each_request() -> None:
    """What is there together goes in few messages."""

    async def test(stream: InferStream, recorder: Recorder) -> None:
        await ask_all(stream, [bytes([number]) * 500 for number in range(20)])
        assert names.BUNDLES in recorder.metadata
        sizes = [len(parts_of(message)) for message in recorder.messages]
        assert sum(sizes) == 20
        assert len(sizes) == 3, "seven fit into a message that no server refuses"
        assert max(map(len, recorder.messages)) <= 4096

    with_stream(test, in_bundles=True)


@pytest.mark.parametrize("in_fragments", [True, False])
def test_large_requests_go_in_fragments(in_fragments: bool) -> None:
    async def test(stream: InferStream, recorder: Recorder) -> None:
        tensors = [b"a" * 10, np.random.default_rng(0).bytes(11_000), b"b" * 9_000, b"c" * 10]
        first, second, third, fourth = await ask_all(stream, tensors)
        large = [(second, "fragment")] * 3 if in_fragments else [(second, "whole")]
        assert recorder.kinds() == [(first, "whole"), *large, (third, "whole"), (fourth, "whole")]
        assert max(map(len, recorder.messages)) < (9_100 if in_fragments else 11_100)

    with_stream(test, in_fragments=in_fragments)


def test_cancelled_request_is_read_no_more() -> None:
    async def test(stream: InferStream, recorder: Recorder) -> None:
        recorder.gate.clear()
        large = memoryview(bytearray(8 << 20))  # more than the connection takes while the server does not read
        number, future = ask(stream, large)
        await recorder.arrived.wait()
        stream.cancel(number)
        assert await future is None
        recorder.gate.set()
        await ask_all(stream, [b"other"])
        kinds = [kind for its_number, kind in recorder.kinds() if its_number == number]
        assert kinds[-1] == "cancellation"
        assert 1 <= kinds.count("fragment") < len(large) // FRAGMENT_NBYTES, "the rest is not sent"
        assert kinds.count("fragment") == len(kinds) - 1

    with_stream(test, in_fragments=True)


# Readers and our own server.


def read(teacher: Any, rows: int, batches: int, **options: Any) -> None:
    """Read batches of rows, and see that each has its own labels."""
    reader = DistillReader(["x"], ["y"], teachers=teacher.endpoint, teacher_batch_size=rows, options=Options(**options))
    reader.set_batch_generator(lambda: ((np.full((rows, 4), number, np.float32),) for number in range(batches)))
    with reader:
        for number, (x, y) in enumerate(reader()):
            assert (x == number).all()
            assert (y == number).all()
        assert number == batches - 1
        stats = reader.stats()
    assert stats.rows_asked == stats.rows_received == rows * batches


@pytest.mark.parametrize("announced", [True, False])
@pytest.mark.parametrize(
    ("module", "function", "extension", "rows"),
    [
        (bundles, "join_requests", names.EXTENSION_BUNDLE, 2),
        (fragments, "fragment_request", names.EXTENSION_FRAGMENT, 1000),
    ],
)
def test_parts_go_to_servers_that_know(
    serve: Serve,
    monkeypatch: pytest.MonkeyPatch,
    module: Any,
    function: str,
    extension: str,
    rows: int,
    announced: bool,
) -> None:
    sent: list[int] = []
    original = getattr(module, function)
    monkeypatch.setattr(module, function, lambda *given: (sent.append(1), original(*given))[1])  # type: ignore[func-returns-value]
    if not announced:
        announce_less(monkeypatch, extension)
    read(serve("echo"), rows, 1000 // rows + 30, shared_memory=False)
    assert bool(sent) == announced


@pytest.fixture(scope="module")
def teacher() -> Iterator[LocalTeacher]:
    """A process of its own, in which fragments are as they are."""
    with LocalTeacher("echo") as started:
        yield started


def use_unknown_fragments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have fragments carry a parameter that the server does not know, as a server of an older release sees them."""
    parameters = {"edl_not_known": kserve.InferParameter(bool_param=True)}
    monkeypatch.setattr(fragments, "_HEADER", kserve.ModelInferRequest(parameters=parameters).SerializeToString())


def test_refused_fragments_are_sent_whole(
    teacher: LocalTeacher, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A load balancer may lead to an older server than the one that announced fragments."""
    use_unknown_fragments(monkeypatch)
    caplog.set_level(logging.INFO, "edl.distill")
    read(teacher, 1000, 20, shared_memory=False)
    given_up = [record for record in caplog.records if "refused a request in fragments" in record.message]
    assert len(given_up) == 1, "fragments are given up once"


def test_refused_whole_as_well_is_an_error(teacher: LocalTeacher, monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask_badly() -> RequestFailure:
        client = TeacherClient(teacher.endpoint, OutputSpec(("y",)), shared_memory=False)
        good = Payload.of({"x": np.ones((1000, 4), np.float32)}, None)
        bad = Payload.of({"x": np.ones((1000, 3), np.float32)}, None)
        await client.open(DEADLINE_S)
        try:
            await ask_client(client, good)  # the size is known to be taken
            future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            assert client.start(bad, DEADLINE_S, future.set_result) is not None
            failure: RequestFailure = await future
            assert float((await ask_client(client, good)).sum()) == 4000, "other requests are not harmed"
            return failure
        finally:
            await client.close()

    for known in (True, False):
        if not known:
            use_unknown_fragments(monkeypatch)
        failure = asyncio.run(asyncio.wait_for(ask_badly(), DEADLINE_S))
        assert failure.kind is FailureKind.REJECTED, failure
        assert "[1000, 3]" in failure.message, "the server's words about the request itself"
