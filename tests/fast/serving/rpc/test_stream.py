"""Streams and tensor channels: order, cancelling, draining, limits, tokens; and bad requests."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import queue
import random
import socket
from collections import Counter, deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from edl.errors import ProtocolError
from edl.protocol import codec, frames, kserve, names
from edl.protocol.frames import FrameKind
from edl.protocol.transport import grpc
from edl_serving import Array
from tests.fast.serving.conftest import TIMEOUT_S, Client, Connect, Inside, StartInside, outputs_of, request_bytes
from tests.fast.serving.fakes import Base, Gated, Mixed, logits
from tests.waiting import wait_until


class Open:
    """An ordered stream, as foreign clients open it."""

    def __init__(self, client: Client) -> None:
        self._sent: queue.Queue[bytes | None] = queue.Queue()
        self.call = client.channel.stream_stream(names.method("ModelStreamInfer"))(
            iter(self._sent.get, None), timeout=TIMEOUT_S
        )

    def send(self, number: int, x: Array) -> None:
        self._sent.put(request_bytes({"x": x}) + codec.id_field(str(number)))

    def read(self) -> tuple[int, Array | str]:
        answer = kserve.ModelStreamInferResponse.FromString(next(self.call))
        found = answer.infer_response
        if answer.error_message:
            return int(found.id or 0), answer.error_message
        return int(found.id), outputs_of(found.SerializeToString())["logits"]

    def end(self) -> None:
        self._sent.put(None)

    @property
    def has_ended(self) -> bool:
        return list(self.call) == []


def offer_of(client: Client) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(client.channel.unary_unary(names.OPEN_CHANNEL)(b"", timeout=TIMEOUT_S))
    return found


def connected(client: Client, port: int) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", port), TIMEOUT_S)
    client.opened.append(sock)
    return sock


class Channel:
    """A tensor channel, with blocking calls. Without a token it asks for one."""

    def __init__(self, client: Client, token: str = "", port: int = 0) -> None:
        offer = {"token": token, "port": port} if token else offer_of(client)
        self.sock = connected(client, offer["port"])
        self.sock.sendall(frames.MAGIC + bytes.fromhex(offer["token"]))
        self.said = self._receive(frames.TOKEN_NBYTES)

    def send(self, number: int, x: Array, **parameters: int | float | str) -> None:
        header, raw = codec.REQUEST.split(request_bytes({"x": x}, **parameters))
        self.send_frame(FrameKind.REQUEST, number, b"".join(frames.body_parts(header, raw)))

    def cancel(self, number: int) -> None:
        self.send_frame(FrameKind.CANCEL, number)

    def send_frame(self, kind: int, number: int, body: bytes = b"", claimed: int | None = None) -> None:
        self.sock.sendall(frames._PREFIX.pack(kind, number, len(body) if claimed is None else claimed) + body)

    def read_frame(self) -> tuple[int, int, bytes]:
        prefix = self._receive(frames._PREFIX.size)
        if len(prefix) < frames._PREFIX.size:
            raise ConnectionResetError("the server closed the channel")
        kind, number, nbytes = frames._PREFIX.unpack(prefix)
        return kind, number, self._receive(nbytes)

    def read(self) -> tuple[int, Array | str]:
        """A request's number, and its answer; an error as its status and words."""
        kind, number, body = self.read_frame()
        if kind == FrameKind.ERROR:
            error = json.loads(body)
            return number, f"{error['status']}: {error['message']} ({error['retry_after_ms']})"
        header, raw = frames.split_body(memoryview(body))
        return number, outputs_of(codec.RESPONSE.join(header, raw))["logits"]

    def end(self) -> None:
        self.sock.close()

    @property
    def has_ended(self) -> bool:
        return not self.sock.recv(1)

    def _receive(self, nbytes: int) -> bytes:
        found = b""
        while len(found) < nbytes and (piece := self.sock.recv(nbytes - len(found))):
            found += piece
        return found


def row(value: float) -> Array:
    return np.full((1, 4), value, np.float32)


def is_answer_to(answer: Array | str, x: Array) -> bool:
    assert not isinstance(answer, str), answer
    return bool((answer == logits(x)).all())


class Pair(Gated):
    """Shuts the gate for rows of 1 only."""

    def predict(self, inputs: Any) -> Any:
        return super().predict(inputs) if inputs["x"][0, 0] == 1 else {"logits": logits(inputs["x"])}


@pytest.mark.parametrize("kind", [Open, Channel])
def test_slow_request_holds_up_ordered_ones(inside: StartInside, connect: Connect, kind: Any) -> None:
    slow, other = Pair(), Pair()
    other.gate = slow.gate
    server = inside([slow, other], max_batch_rows=1)
    stream = kind(connect(server.target))
    stream.send(1, row(1))
    wait_until(lambda: slow.started.is_set() or other.started.is_set())
    for number in range(2, 7):
        stream.send(number, row(2))
    wait_until(lambda: server.metric("edl_teacher_requests_total", outcome="ok") == 5)
    if kind is Open:
        slow.gate.set()
    answers = [stream.read() for _ in range(5)]
    slow.gate.set()
    answers += [stream.read()]
    found = [number for number, _ in answers]
    assert found == [1, 2, 3, 4, 5, 6] if kind is Open else (found[5] == 1 and sorted(found[:5]) == [2, 3, 4, 5, 6])
    assert all(is_answer_to(answer, row(1 if number == 1 else 2)) for number, answer in answers)


def test_cancelled_or_late_is_not_computed(inside: StartInside, connect: Connect) -> None:
    model = Gated()
    server = inside(model, max_batch_rows=1)
    channel = Channel(connect(server.target))
    channel.send(1, row(0))
    assert model.started.wait(TIMEOUT_S)
    channel.send(2, row(1), **{names.TIMEOUT_MS: 0})
    channel.send(3, row(2))
    channel.send(4, row(3))
    channel.cancel(3)
    channel.cancel(99)
    wait_until(lambda: server.metric("edl_teacher_requests_total", outcome="cancelled") == 1)
    model.gate.set()
    answers = dict(channel.read() for _ in range(3))
    assert str(answers[2]).startswith("DEADLINE_EXCEEDED")
    assert is_answer_to(answers[4], row(3))
    assert [batch[0, 0] for batch in model.batches] == [0, 3]
    channel.end()
    wait_until(lambda: not left(server))


def test_draining_server_answers_and_refuses(inside: StartInside, connect: Connect) -> None:
    """And streams that are idle hold nothing up."""
    model = Gated()
    server = inside(model, max_batch_rows=1)
    idle = [Open(connect(server.target)), Channel(connect(server.target))]
    for each in idle:
        each.send(1, np.zeros((1, 5), np.float32))
        assert "[1, 5]" in str(each.read()[1])
    channel = Channel(connect(server.target))
    for number in range(2):
        channel.send(number, row(number))
    wait_until(lambda: server.metric("edl_teacher_in_flight") == 2)
    draining = server.begin_drain()
    channel.send(2, row(2))
    assert channel.read() == (2, "UNAVAILABLE: the server is draining (None)")
    model.gate.set()
    answers = dict(channel.read() for _ in range(2))
    assert all(is_answer_to(answers[number], row(number)) for number in range(2))
    assert draining.result(TIMEOUT_S), "streams without requests are waited for"
    server.call(server.server.stop())
    assert all(each.has_ended for each in [*idle, channel])


def test_a_channel_takes_its_own_token(inside: StartInside, connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, and for ten seconds. Another connection gets nothing, and costs nothing."""
    server = inside(Base())
    client = connect(server.target)
    offer = offer_of(client)
    for token in ("00" * 32, offer["token"][:-2] + "aa"):
        assert not Channel(client, token, offer["port"]).said
    assert Channel(client, offer["token"], offer["port"]).said.hex() == offer["proof"]
    assert not Channel(client, offer["token"], offer["port"]).said, "used"
    monkeypatch.setattr("edl_serving.channel._TOKEN_S", -1.0)
    assert not Channel(client).said, "too old"
    monkeypatch.setattr("edl_serving.channel._HANDSHAKE_S", 0.1)
    assert not connected(client, offer["port"]).recv(1), "who says nothing is not waited for"
    client.close()
    wait_until(lambda: not left(server))


def test_claims_cost_nothing(inside: StartInside, connect: Connect) -> None:
    """Sizes that are too large are refused before there is memory for them; the channel goes on behind the bytes."""
    server = inside(Base(), max_message_bytes=1 << 20)
    channel = Channel(connect(server.target))
    channel.send_frame(FrameKind.REQUEST, 7, b"x" * 512, claimed=2 << 30)
    number, refused = channel.read()
    assert number == 7
    assert str(refused).startswith("INVALID_ARGUMENT: a request of 2,147,483,648 bytes exceeds 1,048,576")
    channel.end()
    channel = Channel(connect(server.target))
    channel.send_frame(FrameKind.REQUEST, 8, b"x" * (2 << 20))
    assert channel.read()[0] == 8
    channel.send_frame(FrameKind.REQUEST, 9, b"x" * 999)
    assert "malformed message" in str(channel.read()[1])
    channel.send(10, row(1))
    assert is_answer_to(channel.read()[1], row(1))
    channel.send_frame(99, 11)
    assert channel.has_ended, "what is no frame ends the channel"
    wait_until(lambda: not left(server))


def test_a_client_that_does_not_read(inside: StartInside, connect: Connect) -> None:
    """Is not read either, before the answers to it fill the memory; and it takes nobody else's place."""
    server = inside(Base())
    hostile, client = Channel(connect(server.target)), connect(server.target)
    hostile.sock.settimeout(0.5)
    pings = frames._PREFIX.pack(FrameKind.PING, 0, 0) * 10_000_000
    with pytest.raises(TimeoutError):
        hostile.sock.sendall(pings)
    for _ in range(50):
        offer_of(client)
    assert ask_for(Channel(client), 1) == ""


GAUGES = ("in_flight", "queue_rows", "queue_bytes", "connections", "streams", "client_bytes")


def ask_for(stream: Any, number: int) -> str:
    """Ask for one row; the error, empty if there is none."""
    stream.send(number, np.zeros((1, 4), np.float32))
    found, answer = stream.read()
    assert found == number
    return answer if isinstance(answer, str) else ""


def left(server: Inside) -> list[str]:
    return [gauge for gauge in GAUGES if server.metric(f"edl_teacher_{gauge}")]


def test_streams_are_counted(inside: StartInside, connect: Connect) -> None:
    server = inside(Base(), max_streams=1)
    first = Channel(connect(server.target))
    assert ask_for(first, 1) == ""
    second = Open(connect(server.target))
    wait_until(lambda: second.call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED)
    assert "1 streams are open" in second.call.details()
    assert names.RETRY_AFTER_MS in dict(second.call.trailing_metadata())
    with pytest.raises(grpc.RpcError, match="1 streams are open"):
        Channel(connect(server.target))
    first.end()
    wait_until(lambda: not left(server))
    assert ask_for(Channel(connect(server.target)), 2) == ""


def test_readiness_is_told_beyond_the_limit(inside: StartInside, connect: Connect) -> None:
    server = inside(Base(), max_connections=1)
    first = Channel(connect(server.target))
    assert ask_for(first, 1) == ""
    other = connect(server.target)
    assert other.ask("ServerReady").ready
    assert other.ask("ModelReady", name="m").ready
    call = other.start(np.zeros((1, 4), np.float32))
    assert call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "1 clients are connected" in call.details()


SEED = 20240607
REQUESTS = int(os.environ.get("EDL_TEST_BAD_REQUESTS", "2000"))
"""100,000 take some minutes: `EDL_TEST_BAD_REQUESTS=100000`."""

IN_FLIGHT = 64
ALLOWED = {"OK", "INVALID_ARGUMENT", "NOT_FOUND", "UNAVAILABLE"}
"""NOT_FOUND: of another version of the model. UNAVAILABLE: the queue may be full."""


def bad_requests(rng: random.Random) -> Iterator[bytes]:
    """Endless requests, most of them bad: damaged, cut off or noise. `test_request_plan` has the wrong headers."""
    whole = request_bytes({"x": np.ones((2, 3), np.float32), "words": np.array([[b"a", b"b"], [b"c", b"d"]], object)})
    while True:
        if rng.random() < 0.1:
            yield rng.randbytes(rng.choice([0, 1, 2, 10, 100, 5000]))
            continue
        damaged = bytearray(whole)
        for _ in range(rng.choice([1, 1, 2, 5, 20])):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        if rng.random() < 0.3:
            del damaged[rng.randrange(len(damaged)) :]
        yield bytes(damaged)


def answer_of(call: Any) -> tuple[str, str]:
    error = call.exception()
    return ("OK", "") if error is None else (error.code().name, error.details() or "")


def ask_over_grpc(client: Client, requests: Iterator[bytes]) -> Iterator[tuple[str, str]]:
    waiting: deque[Any] = deque()
    for request in requests:
        waiting.append(client.infer_bytes.future(request, timeout=TIMEOUT_S))
        if len(waiting) == IN_FLIGHT:
            yield answer_of(waiting.popleft())
    yield from map(answer_of, waiting)


def ask_over_channel(client: Client, requests: Iterator[bytes]) -> Iterator[tuple[str, str]]:
    """The same requests as bodies, or as the bytes of a body; the answers in any order."""
    channel, waiting = Channel(client), 0
    for number, request in enumerate(requests):
        body = request
        with contextlib.suppress(ProtocolError):
            body = b"".join(frames.body_parts(*codec.REQUEST.split(request)))
        channel.send_frame(FrameKind.REQUEST, number, body)
        waiting += 1
        while waiting == IN_FLIGHT or (waiting and number == REQUESTS - 1):
            kind, _, answer = channel.read_frame()
            waiting -= 1
            error = json.loads(answer) if kind == FrameKind.ERROR else {"status": "OK", "message": ""}
            yield error["status"], error["message"]


def assault(answers: Iterator[tuple[str, str]]) -> Counter[str]:
    """Check the answer to every bad request."""
    codes: Counter[str] = Counter()
    wrong: list[str] = []
    for code, details in answers:
        codes[code] += 1
        if code == "INTERNAL" and "has NaN" in details:
            pass  # damaged bytes may be NaN, and so is the answer then
        elif code not in ALLOWED or (code != "OK" and not details):
            wrong.append(f"{code}: {details}")
    assert not wrong, f"{len(wrong)} wrong answers, such as {wrong[:5]}"
    return codes


@pytest.mark.timeout(110 + REQUESTS // 50)  # each wait has a deadline of its own: this bounds the work
@pytest.mark.parametrize("ask", [ask_over_grpc, ask_over_channel])
def test_bad_requests_are_refused_in_words(
    inside: StartInside, connect: Connect, caplog: pytest.LogCaptureFixture, ask: Any
) -> None:
    server = inside(Mixed(), max_batch_rows=8)
    client = connect(server.target)
    codes = assault(ask(client, itertools.islice(bad_requests(random.Random(SEED)), REQUESTS)))
    assert sum(codes.values()) == REQUESTS
    assert codes["INVALID_ARGUMENT"] > REQUESTS / 2
    x, words = np.ones((2, 3), np.float32), np.array([[b"a", b"b"]] * 2, object)
    found = outputs_of(client.infer_bytes(request_bytes({"x": x, "words": words}), timeout=TIMEOUT_S))
    np.testing.assert_array_equal(found["logits"], logits(x))
    assert client.ask("ServerReady").ready
    for held in ("in_flight", "queue_rows", "queue_bytes", "client_bytes"):
        wait_until(lambda held=held: server.metric(f"edl_teacher_{held}") == 0)
    assert "Traceback" not in caplog.text


def test_nonsense_ends_its_request_only(
    inside: StartInside, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    server = inside(Base())
    call = connect(server.target).channel.stream_stream(names.method("ModelStreamInfer"))
    requests = bad_requests(random.Random(SEED))
    fine = request_bytes({"x": np.ones((1, 4), np.float32)})
    sent = [next(requests) if index % 2 else fine for index in range(100)]
    answers = [kserve.ModelStreamInferResponse.FromString(data) for data in call(iter(sent), timeout=TIMEOUT_S)]
    assert [bool(answer.error_message) for answer in answers] == [bool(index % 2) for index in range(100)]
    wait_until(lambda: server.metric("edl_teacher_in_flight") == 0)
    assert "Traceback" not in caplog.text
