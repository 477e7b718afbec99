"""`ModelStreamInfer` as EDL's reader uses it: order, cancelling, bundles, draining, limits; and bad requests."""

from __future__ import annotations

import contextlib
import gc
import os
import queue
import random
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edl.protocol import bundles, codec, fragments, kserve, names, tensors
from edl.protocol.transport import grpc
from edl_serving import Array
from edl_serving.request_error import RequestError
from tests.fast.serving.conftest import TIMEOUT_S, Client, Connect, Inside, StartInside, outputs_of, request_bytes
from tests.fast.serving.fakes import Base, Gated, Mixed, logits
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
    assert list(stream.call) == []


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
    assert list(stream.call) == []
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
        assert list(each.call) == []  # ended, not cancelled
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
    assert list(stream.call) == []
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


SEED = 20240607
REQUESTS = int(os.environ.get("EDL_TEST_BAD_REQUESTS", "2000"))
"""100,000 take some minutes: `EDL_TEST_BAD_REQUESTS=100000`."""

IN_FLIGHT = 64
ALLOWED = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,  # another version of the model
    grpc.StatusCode.UNAVAILABLE,  # the queue may be full
}

Header = kserve.ModelInferRequest
Edit = Callable[[random.Random, Header, list[bytes]], object]
STRANGE = ["", "x", "nope", "a" * 5000, "\n\r\0", "é☃𐍈", "../../etc/passwd", "%s%n", "grpc-status: 0", "fuzz"]
NUMBERS = [0, 1, -1, 2, 3, 7, 101, 2**31 - 1, 2**31, 2**53, 2**62, 2**63 - 1, -(2**63)]
DATATYPES = ["", "FP16", "FP64", "INT8", "BOOL", "BYTES", "BF16", "fp32", "FP32 ", "TYPE_FP32", "∞"]


def set_parameter(rng: random.Random, parameter: kserve.InferParameter) -> None:
    kind, values = rng.choice(
        [("int64_param", NUMBERS), ("string_param", STRANGE), ("double_param", [0.0, -1.0, 1e300, float("nan")])]
    )
    setattr(parameter, kind, rng.choice(values))


def set_contents(rng: random.Random, header: Header, raw: list[bytes]) -> None:
    field, value = rng.choice([("fp32_contents", 1.0), ("bytes_contents", b"a"), ("int_contents", 1)])
    getattr(rng.choice(header.inputs).contents, field).extend([value] * rng.choice([0, 1, 4, 6, 1000]))
    del raw[rng.randrange(3) :]


def place_in_memory(rng: random.Random, header: Header, raw: list[bytes]) -> None:
    parameters = rng.choice([*header.inputs, header.outputs.add(name="logits")]).parameters
    parameters[names.SHM_REGION].string_param = rng.choice(STRANGE)
    for name in (names.SHM_NBYTES, names.SHM_OFFSET)[: rng.randrange(3)]:
        set_parameter(rng, parameters[name])


EDITS: list[Edit] = [
    lambda rng, header, raw: setattr(header, "model_name", rng.choice(STRANGE)),
    lambda rng, header, raw: setattr(rng.choice(header.inputs), "name", rng.choice(STRANGE)),
    lambda rng, header, raw: setattr(rng.choice(header.inputs), "datatype", rng.choice(DATATYPES)),
    lambda rng, header, raw: header.inputs[0].shape.__setitem__(rng.randrange(2), rng.choice(NUMBERS)),
    lambda rng, header, raw: rng.choice(header.inputs).shape.extend([rng.choice(NUMBERS)] * rng.choice([1, 40, 3000])),
    lambda rng, header, raw: header.outputs.add(name=rng.choice([*STRANGE, "logits", "logits__topk_ids"])),
    lambda rng, header, raw: raw.extend([b""] * rng.choice([1, 2, 500, 20_000])),
    lambda rng, header, raw: raw.insert(rng.randrange(2), raw.pop()[: rng.randrange(20)]),
    lambda rng, header, raw: raw.append(raw.pop() + b"\xff" * rng.choice([1, 4, 5000])),
    lambda rng, header, raw: set_parameter(rng, header.parameters[rng.choice([names.TOP_K, names.DTYPE, *STRANGE])]),
    set_contents,
    place_in_memory,
]


def bad_requests(rng: random.Random) -> Iterator[bytes]:
    """Endless requests, most of them bad."""
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    words = np.array([[b"a", b"b"], [b"c", b"d"]], object)
    whole = request_bytes({"x": x, "words": words})
    while True:
        kind = rng.random()
        if kind < 0.7:
            header, views = codec.decode_request(whole)
            raw = [bytes(view) for view in views]
            for edit in rng.sample(EDITS, rng.choice([1, 1, 1, 2, 3])):
                if raw:
                    edit(rng, header, raw)
            yield codec.encode_request(header, raw)
        elif kind < 0.9:
            damaged = bytearray(whole)
            for _ in range(rng.choice([1, 1, 2, 5, 20])):
                damaged[rng.randrange(len(damaged))] = rng.randrange(256)
            if rng.random() < 0.3:
                del damaged[rng.randrange(len(damaged)) :]
            yield bytes(damaged)
        else:
            yield rng.randbytes(rng.choice([0, 1, 2, 10, 100, 5000]))


def answer_of(call: Any) -> tuple[grpc.StatusCode, str]:
    error = call.exception()
    return (grpc.StatusCode.OK, "") if error is None else (error.code(), error.details() or "")


def assault(client: Client, count: int, rng: random.Random) -> Counter[str]:
    """Send bad requests, many at a time, and check every answer."""
    codes: Counter[str] = Counter()
    wrong: list[str] = []
    room = threading.Semaphore(IN_FLIGHT)
    lock = threading.Lock()

    def check(call: Any) -> None:
        code, details = answer_of(call)
        room.release()
        with lock:
            codes[code.name] += 1
            if code is grpc.StatusCode.INTERNAL and "has NaN" in details:
                pass  # damaged bytes may be NaN, and so is the answer then
            elif code not in ALLOWED or (code is not grpc.StatusCode.OK and not details):
                wrong.append(f"{code}: {details}")

    requests = bad_requests(rng)
    for _ in range(count):
        assert room.acquire(timeout=TIMEOUT_S)
        call = client.infer_bytes.future(next(requests), timeout=TIMEOUT_S)
        call.add_done_callback(check)
    for _ in range(IN_FLIGHT):
        assert room.acquire(timeout=TIMEOUT_S)
    assert not wrong, f"{len(wrong)} wrong answers, such as {wrong[:5]}"
    return codes


@pytest.fixture
def region() -> Iterator[str]:
    path = Path("/dev/shm") / f"edl-test-{uuid.uuid4().hex}"
    path.write_bytes(bytes(64))
    yield f"/{path.name}"
    path.unlink()


@pytest.mark.timeout(110 + REQUESTS // 50)  # each wait has a deadline of its own: this bounds the work
def test_bad_requests_are_refused_in_words(
    inside: StartInside, connect: Connect, region: str, caplog: pytest.LogCaptureFixture
) -> None:
    server = inside(Mixed(), max_batch_rows=8)
    client = connect(server.target)
    client.ask("SystemSharedMemoryRegister", name="fuzz", key=region, byte_size=64)
    codes = assault(client, REQUESTS, random.Random(SEED))
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
    """Alone in a message of a stream, and in bundles that are damaged as well."""
    server = inside(Base())
    call = connect(server.target).channel.stream_stream(names.method("ModelStreamInfer"))
    rng = random.Random(SEED)
    requests = bad_requests(rng)
    fine = request_bytes({"x": np.ones((1, 4), np.float32)})
    sent = [next(requests) if index % 2 else fine for index in range(100)]
    answers = [kserve.ModelStreamInferResponse.FromString(data) for data in call(iter(sent), timeout=TIMEOUT_S)]
    assert [bool(answer.error_message) for answer in answers] == [bool(index % 2) for index in range(100)]
    sent = []
    for index in range(100):
        bundle = bytearray(bundles.join_requests([fine, *(next(requests) for _ in range(rng.randrange(8)))]))
        for _ in range(rng.choice([0, 0, 1, 5])):
            bundle[rng.randrange(len(bundle))] = rng.randrange(256)
        sent += [fine + codec.id_field(f"fine {index}"), bytes(bundle)]
    metadata = ((names.UNORDERED, "1"), (names.BUNDLES, "1"))
    found = set()
    for data in call(iter(sent), timeout=TIMEOUT_S, metadata=metadata):
        found |= {number for _, _, number, error in bundles.split_responses(data) if not error}
    assert found >= {f"fine {index}" for index in range(100)}
    wait_until(lambda: server.metric("edl_teacher_in_flight") == 0)
    assert "Traceback" not in caplog.text


def test_other_methods_refuse_nonsense_too(inside: StartInside, connect: Connect) -> None:
    rng = random.Random(SEED)
    channel = connect(inside(Base()).target).channel
    methods = ("ModelReady", "ModelMetadata", "ModelConfig", "SystemSharedMemoryRegister", "SystemSharedMemoryStatus")
    for method in methods:
        call = channel.unary_unary(names.method(method))
        for _ in range(50):
            code, details = answer_of(call.future(rng.randbytes(rng.randrange(40)), timeout=TIMEOUT_S))
            allowed = (grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND)
            assert code in allowed, f"{method}: {details}"
