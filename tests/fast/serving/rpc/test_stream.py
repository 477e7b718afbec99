"""`ModelStreamInfer` as EDL's own reader uses it: any order, cancelling, deadlines, errors with a status, draining."""

from __future__ import annotations

import gc
import queue
from typing import Any

import numpy as np
import pytest

from edl.protocol import bundles, codec, fragments, kserve, names, tensors
from edl.protocol.transport import grpc
from edl_serving import Array
from edl_serving.request_error import RequestError
from tests.fast.serving.conftest import (
    TIMEOUT_S,
    Connect,
    StartInside,
    request_bytes,
)
from tests.fast.serving.models import Gated, logits
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


def test_errors_end_their_request_only(inside: StartInside, connect: Connect) -> None:
    model = Gated()
    server = inside(model, max_batch_rows=1, max_queue_rows=2)
    stream = Open(connect(server.target).channel)
    stream.send("computed", row(0))
    assert model.started.wait(TIMEOUT_S)
    for number in range(2):
        stream.send(f"queued {number}", row(0))
    stream.send("too many", row(0))
    answer = stream.read()
    assert status_of(answer) == ("too many", "UNAVAILABLE")
    assert answer.infer_response.parameters[names.RETRY_AFTER].int64_param > 0
    stream.send("wrong", np.zeros((1, 5), np.float32))
    assert status_of(stream.read()) == ("wrong", "INVALID_ARGUMENT")
    model.gate.set()
    assert {stream.read().infer_response.id for _ in range(3)} == {"computed", "queued 0", "queued 1"}
    stream.end()


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


def test_idle_streams_do_not_delay_a_drain(inside: StartInside, connect: Connect) -> None:
    server = inside(Pair())
    streams = [Open(connect(server.target).channel, unordered=unordered) for unordered in (True, False)]
    for stream in streams:
        stream.send("1", row(2))
        assert is_answer_to(stream.read(), row(2))
    assert server.call(server.server.drain(TIMEOUT_S / 2)), "streams without requests are waited for"
    server.call(server.server.stop())
    for stream in streams:
        with pytest.raises(StopIteration):  # ended, not cancelled
            next(stream.call)
        stream.end()


def test_draining_server_answers_and_refuses(inside: StartInside, connect: Connect) -> None:
    model = Gated()
    server = inside(model, max_batch_rows=1)
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
    assert draining.result(TIMEOUT_S)
    stream.end()


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


def fragments_of(request_id: str, value: float, nbytes: int = 20) -> list[bytes]:
    raw = row(value)
    header, (data,) = codec.split_request(request_bytes({"x": raw}))
    return list(fragments.fragment_request(header + codec.id_field(request_id), [data], request_id, nbytes))


MALFORMED_BUNDLES = {
    "empty": bundles.join_requests([]),
    "with an id": bundles.join_requests([message("1", row(1))]) + codec.id_field("7"),
    "nested": bundles.join_requests([bundles.join_requests([message("1", row(1))])]),
    "beside a request": with_bundle_parameter(message("7", row(1))),
    "too large": bundles.join_requests([message("1", row(1))] * 2000),
}


MISUSED_FRAGMENTS = {
    "without an id": fragments_of("", 3)[0],
    "nested": next(fragments.fragment_request(fragments_of("7", 3)[0], [], "7", 1 << 20)),
    "in a bundle": bundles.join_requests(fragments_of("7", 3)[:1]),
    "too large": codec.join_request(
        codec.split_streamed_request(fragments_of("7", 3)[0])[0] + codec.id_field("7"), [b"\xff" * 8, b"x"]
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
        (names.FRAGMENT, fragments_of("7", 3)[0]),
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


def claim_of(request_id: str, nbytes: int) -> list[bytes]:
    return list(fragments.fragment_request(codec.id_field(request_id), [bytes(nbytes)], request_id, nbytes // 4))


def test_refused_requests_leave_no_memory(inside: StartInside, connect: Connect) -> None:
    """A server refuses requests because memory is short: a circle would keep them until the collector comes."""
    mib = 1 << 20
    model = Gated()
    server = inside(model, max_message_bytes=mib, max_client_bytes=mib, max_batch_rows=1, max_queue_rows=1)
    client = connect(server.target)
    parked, stream = (Open(client.channel) for _ in range(2))
    parked.send_bytes(claim_of("parked", mib * 3 // 4)[0])
    wait_until(lambda: server.metric("edl_teacher_client_bytes") >= mib * 3 // 4)
    requests = {
        "whole": ("RESOURCE_EXHAUSTED", message("whole", np.zeros((1, mib // 8), np.float32))),
        "in fragments": ("RESOURCE_EXHAUSTED", claim_of("in fragments", mib // 2)[0]),
        "wrong": ("INVALID_ARGUMENT", message("wrong", np.zeros((1, 99), np.float32))),
        "too many": ("UNAVAILABLE", message("too many", row(0))),
    }
    stream.send("computed", row(0))
    assert model.started.wait(TIMEOUT_S)
    stream.send("queued", row(0))  # and read before what follows
    gc.freeze()  # what other tests have left is not looked at
    gc.disable()
    try:
        for request_id, (status, data) in requests.items():
            stream.send_bytes(data)
            assert status_of(stream.read()) == (request_id, status)
            wait_until(lambda: not any(type(found) is RequestError for found in gc.get_objects()))
    finally:
        gc.enable()
        gc.unfreeze()
        model.gate.set()
