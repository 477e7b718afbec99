"""`ModelStreamInfer` as EDL's reader uses it: order, cancelling, deadlines, bundles, draining, and the limits."""

from __future__ import annotations

import contextlib
import gc
import queue
import random
import threading
from typing import Any

import numpy as np
import pytest

from edl.protocol import bundles, codec, fragments, kserve, names, tensors
from edl.protocol.transport import grpc
from edl_serving import Array
from edl_serving.request_error import RequestError
from tests.fast.serving.conftest import TIMEOUT_S, Client, Connect, Inside, StartInside, request_bytes
from tests.fast.serving.models import Base, Gated, logits
from tests.fast.serving.rpc.test_fuzz import bad_requests
from tests.waiting import wait_until


class Open:
    """A stream that a test writes to and reads from."""

    def __init__(self, channel: Any, *, unordered: bool = True, bundles: bool = False) -> None:
        self._sent: queue.Queue[bytes | None] = queue.Queue()
        metadata = [(name, "1") for name, wanted in ((names.UNORDERED, unordered), (names.BUNDLES, bundles)) if wanted]
        self.call = channel.stream_stream(names.method("ModelStreamInfer"))(
            iter(self._sent.get, None), metadata=metadata, timeout=TIMEOUT_S
        )

    def send(self, request_id: str, x: Array, **parameters: int | float | str) -> None:
        self.send_bytes(message(request_id, x, **parameters))

    def cancel(self, request_id: str) -> None:
        self.send_bytes(cancellation(request_id))

    def send_bytes(self, data: bytes) -> None:
        self._sent.put(data)

    def read(self) -> kserve.ModelStreamInferResponse:
        return kserve.ModelStreamInferResponse.FromString(next(self.call))

    def end(self) -> None:
        self._sent.put(None)


def message(request_id: str, x: Array, **parameters: int | float | str) -> bytes:
    return request_bytes({"x": x}, **parameters) + codec.id_field(request_id)


def cancellation(request_id: str) -> bytes:
    header = kserve.ModelInferRequest(id=request_id)
    header.parameters[names.CANCEL].bool_param = True
    return header.SerializeToString()


def row(value: float) -> Array:
    return np.full((1, 4), value, np.float32)


def is_answer_to(answer: kserve.ModelStreamInferResponse, x: Array) -> bool:
    assert not answer.error_message
    output = answer.infer_response.outputs[0]
    found = tensors.from_raw(output.datatype, tuple(output.shape), answer.infer_response.raw_output_contents[0])
    return bool((found == logits(x)).all())


def status_of(answer: kserve.ModelStreamInferResponse) -> tuple[str, str]:
    assert answer.error_message
    return answer.infer_response.id, answer.infer_response.parameters[names.STATUS].string_param


class Pair(Gated):
    """Shuts the gate for rows of 1 only."""

    def predict(self, inputs: Any) -> Any:
        return super().predict(inputs) if inputs["x"][0, 0] == 1 else {"logits": logits(inputs["x"])}


@pytest.mark.parametrize("unordered", [True, False])
def test_slow_request_holds_up_ordered_ones(inside: StartInside, connect: Connect, unordered: bool) -> None:
    slow, other = Pair(), Pair()
    other.gate = slow.gate
    server = inside([slow, other], max_batch_rows=1)
    stream = Open(connect(server.target).channel, unordered=unordered)
    stream.send("slow", row(1))
    wait_until(lambda: slow.started.is_set() or other.started.is_set())
    for number in range(5):
        stream.send(f"fast {number}", row(2))
    stream.end()
    if not unordered:
        wait_until(lambda: server.metric("edl_teacher_requests_total", outcome="ok") == 5)
        slow.gate.set()
    answers = [stream.read() for _ in range(5)]
    slow.gate.set()
    answers += [stream.read()]
    fast = {f"fast {number}" for number in range(5)}
    found = [answer.infer_response.id for answer in answers]
    assert (set(found[:5]) == fast and found[5] == "slow") if unordered else found == ["slow", *sorted(fast)]
    assert all(is_answer_to(one, row(1 if one.infer_response.id == "slow" else 2)) for one in answers)
    with pytest.raises(StopIteration):
        next(stream.call)


def test_cancelled_or_late_is_not_computed(inside: StartInside, connect: Connect) -> None:
    model = Gated()
    server = inside(model, max_batch_rows=1)
    stream = Open(connect(server.target).channel)
    stream.send("first", row(0))
    assert model.started.wait(TIMEOUT_S)
    stream.send("late", row(1), **{names.TIMEOUT_MS: 0})
    stream.send("cancelled", row(2))
    stream.send("last", row(3))
    stream.cancel("cancelled")
    stream.cancel("never heard of")
    wait_until(lambda: server.metric("edl_teacher_requests_total", outcome="cancelled") == 1)
    model.gate.set()
    answers = {answer.infer_response.id: answer for answer in (stream.read() for _ in range(3))}
    assert status_of(answers["late"]) == ("late", "DEADLINE_EXCEEDED")
    assert is_answer_to(answers["last"], row(3))
    assert [batch[0, 0] for batch in model.batches] == [0, 3]
    stream.end()
    with pytest.raises(StopIteration):
        next(stream.call)
    wait_until(lambda: server.metric("edl_teacher_in_flight") == 0)


def test_draining_server_answers_and_refuses(inside: StartInside, connect: Connect) -> None:
    """And streams that are idle hold nothing up."""
    model = Gated()
    server = inside(model, max_batch_rows=1)
    idle = [Open(connect(server.target).channel, unordered=unordered) for unordered in (True, False)]
    for each in idle:
        each.send("wrong", np.zeros((1, 5), np.float32))
        assert status_of(each.read())[1] == "INVALID_ARGUMENT"
    stream = Open(connect(server.target).channel)
    for number in range(2):
        stream.send(str(number), row(number))
    wait_until(lambda: server.metric("edl_teacher_in_flight") == 2)
    draining = server.begin_drain()
    stream.send("late", row(2))
    refused = stream.read()
    assert status_of(refused) == ("late", "UNAVAILABLE")
    assert names.RETRY_AFTER not in refused.infer_response.parameters
    model.gate.set()
    answers = {answer.infer_response.id: answer for answer in (stream.read() for _ in range(2))}
    assert all(is_answer_to(answers[str(number)], row(number)) for number in range(2))
    assert draining.result(TIMEOUT_S), "streams without requests are waited for"
    stream.end()
    server.call(server.server.stop())
    for each in idle:
        with pytest.raises(StopIteration):  # ended, not cancelled
            next(each.call)
        each.end()


def parts_of(answer: kserve.ModelStreamInferResponse) -> list[kserve.ModelStreamInferResponse]:
    """The answers in a message."""
    if names.BUNDLE not in answer.infer_response.parameters:
        return [answer]
    return [kserve.ModelStreamInferResponse.FromString(one) for one in answer.infer_response.raw_output_contents]


@pytest.mark.parametrize("takes_bundles", [True, False])
def test_bundled_requests_are_answered(inside: StartInside, connect: Connect, takes_bundles: bool) -> None:
    model = Gated()
    server = inside(model, max_batch_rows=64, max_queue_rows=64)
    stream = Open(connect(server.target).channel, bundles=takes_bundles)
    stream.send("first", row(0))
    assert model.started.wait(TIMEOUT_S)
    together = [message(str(number), row(number)) for number in range(1, 6)]
    together += [message("late", row(6), **{names.TIMEOUT_MS: 0}), message("wrong", np.zeros((1, 5), np.float32))]
    together += [message("cancelled", row(7)), cancellation("cancelled"), b"\xff"]
    stream.send_bytes(bundles.join_requests(together))
    wait_until(lambda: server.metric("edl_teacher_requests_total", outcome="cancelled") == 1)
    model.gate.set()
    messages: list[list[kserve.ModelStreamInferResponse]] = []
    while sum(map(len, messages)) < 9:
        messages.append(parts_of(stream.read()))
    answers = {answer.infer_response.id: answer for one in messages for answer in one}
    assert set(answers) == {"first", "1", "2", "3", "4", "5", "late", "wrong", ""}
    assert status_of(answers["late"])[1] == "DEADLINE_EXCEEDED"
    assert status_of(answers["wrong"])[1] == status_of(answers[""])[1] == "INVALID_ARGUMENT"
    assert all(is_answer_to(answers[str(number)], row(number)) for number in range(1, 6))
    sizes = [len(one) for one in messages]
    assert max(sizes) >= 5 if takes_bundles else max(sizes) == 1, "one batch's answers are there together"
    stream.end()
    with pytest.raises(StopIteration):
        next(stream.call)
    wait_until(lambda: server.metric("edl_teacher_in_flight") == 0)


def with_bundle_parameter(request: bytes) -> bytes:
    header = kserve.ModelInferRequest()
    header.parameters[names.BUNDLE].bool_param = True
    return request + header.SerializeToString()


def fragment_of(request_id: str) -> bytes:
    header, (data,) = codec.split_request(request_bytes({"x": row(3)}))
    return next(fragments.fragment_request(header + codec.id_field(request_id), [data], request_id, 20))


MALFORMED_BUNDLES = {
    "empty": bundles.join_requests([]),
    "with an id": bundles.join_requests([message("1", row(1))]) + codec.id_field("7"),
    "nested": bundles.join_requests([bundles.join_requests([message("1", row(1))])]),
    "beside a request": with_bundle_parameter(message("7", row(1))),
    "too large": bundles.join_requests([message("1", row(1))] * 2000),
}

MISUSED_FRAGMENTS = {
    "without an id": fragment_of(""),
    "nested": next(fragments.fragment_request(fragment_of("7"), [], "7", 1 << 20)),
    "in a bundle": bundles.join_requests([fragment_of("7")]),
    "too large": codec.join_request(
        codec.split_streamed_request(fragment_of("7"))[0] + codec.id_field("7"), [b"\xff" * 8, b"x"]
    ),
}


def test_malformed_messages_are_refused(inside: StartInside, connect: Connect) -> None:
    """And the stream goes on."""
    stream = Open(connect(inside(Pair()).target).channel, bundles=True)
    for parameter, messages in ((names.BUNDLE, MALFORMED_BUNDLES), (names.FRAGMENT, MISUSED_FRAGMENTS)):
        for what, data in messages.items():
            stream.send_bytes(data)
            answer = stream.read()
            assert status_of(answer)[1] == "INVALID_ARGUMENT", what
            assert parameter in answer.error_message, what
            stream.send("fine", row(2))
            assert is_answer_to(stream.read(), row(2)), what
    stream.end()


def test_ordered_streams_and_calls_take_neither(inside: StartInside, connect: Connect) -> None:
    client = connect(inside(Pair()).target)
    stream = Open(client.channel, unordered=False, bundles=True)
    for parameter, data in (
        (names.BUNDLE, bundles.join_requests([message("1", row(2))])),
        (names.FRAGMENT, fragment_of("7")),
    ):
        stream.send_bytes(data)
        answer = stream.read()
        assert status_of(answer)[1] == "INVALID_ARGUMENT"
        assert parameter in answer.error_message
        assert names.UNORDERED in answer.error_message
        stream.send("fine", row(2))
        assert is_answer_to(stream.read(), row(2))
        with pytest.raises(grpc.RpcError) as caught:
            client.infer_bytes(data, timeout=TIMEOUT_S)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert parameter in str(caught.value.details())
    stream.end()


def claim_of(request_id: str, nbytes: int) -> bytes:
    return next(fragments.fragment_request(codec.id_field(request_id), [bytes(nbytes)], request_id, nbytes // 4))


def test_refused_requests_leave_no_memory(inside: StartInside, connect: Connect) -> None:
    """A server refuses requests because memory is short: a circle would keep them until the collector comes."""
    mib = 1 << 20
    model = Gated()
    server = inside(model, max_message_bytes=mib, max_client_bytes=mib, max_batch_rows=1, max_queue_rows=1)
    client = connect(server.target)
    parked, stream = (Open(client.channel) for _ in range(2))
    parked.send_bytes(claim_of("parked", mib * 3 // 4))
    wait_until(lambda: server.metric("edl_teacher_client_bytes") >= mib * 3 // 4)
    requests = {
        "whole": ("RESOURCE_EXHAUSTED", message("whole", np.zeros((1, mib // 8), np.float32))),
        "in fragments": ("RESOURCE_EXHAUSTED", claim_of("in fragments", mib // 2)),
        "wrong": ("INVALID_ARGUMENT", message("wrong", np.zeros((1, 99), np.float32))),
        "too many": ("UNAVAILABLE", message("too many", row(0))),  # the last one
    }
    stream.send("computed", row(0))
    assert model.started.wait(TIMEOUT_S)
    stream.send("queued", row(0))  # and read before what follows
    gc.freeze()  # what other tests have left is not looked at
    gc.disable()
    try:
        for request_id, (status, data) in requests.items():
            stream.send_bytes(data)
            answer = stream.read()
            assert status_of(answer) == (request_id, status)
            wait_until(lambda: not any(type(found) is RequestError for found in gc.get_objects()))
    finally:
        gc.enable()
        gc.unfreeze()
        model.gate.set()
    assert answer.infer_response.parameters[names.RETRY_AFTER].int64_param > 0
    assert {stream.read().infer_response.id for _ in range(2)} == {"computed", "queued"}


GAUGES = ("in_flight", "queue_rows", "queue_bytes", "connections", "streams", "client_bytes")


def ask_for(stream: Open, request_id: str) -> str:
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
    assert ask_for(first, "a") == ""
    second = Open(connect(server.target).channel)
    assert "1 streams are open" in ask_for(second, "b")
    third = Open(connect(server.target).channel)
    wait_until(lambda: third.call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED)
    assert "1 streams wait for a place" in third.call.details()
    assert names.RETRY_AFTER_MS in dict(third.call.trailing_metadata())
    assert "1 streams are open" in ask_for(second, "c")
    first.end()
    assert list(first.call) == []
    wait_until(lambda: ask_for(second, "d") == "")
    fourth = Open(connect(server.target).channel)
    assert "1 streams are open" in ask_for(fourth, "e"), "the place of one that waits is free again"
    fourth.end()
    second.end()
    third.end()
    assert list(second.call) == []
    wait_until(lambda: not left(server))


def test_readiness_is_told_beyond_the_limit(inside: StartInside, connect: Connect) -> None:
    server = inside(Base(), max_connections=1)
    first = Open(connect(server.target).channel)
    assert ask_for(first, "a") == ""
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
    wait_until(lambda: ask_for(stream, "z") == "")
    stream.end()
    assert "Traceback" not in caplog.text
