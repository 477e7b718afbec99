"""Bad requests in any number: each is answered with a status and words that fit, and the server serves on."""

from __future__ import annotations

import os
import random
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edl.protocol import bundles, codec, kserve, names, tensors
from edl.protocol.transport import grpc
from tests.fast.serving.conftest import TIMEOUT_S, Client, Connect, StartInside, outputs_of, request_bytes
from tests.fast.serving.models import Base, Mixed, logits
from tests.waiting import wait_until

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
REFUSALS = {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND}

Header = kserve.ModelInferRequest
Mutation = Callable[[random.Random, Header, list[bytes]], str | None]
"""Changes a good request; returns a word that the refusal must contain, None if it may still be good."""

STRANGE = ["", "x", "nope", "a" * 5000, "\n\r\0", "é☃𐍈", "../../etc/passwd", "%s%n", "grpc-status: 0"]
NUMBERS = [0, 1, -1, 2, 3, 7, 101, 2**31 - 1, 2**31, 2**53, 2**62, 2**63 - 1, -(2**63)]
DATATYPES = ["", "FP16", "FP64", "INT8", "BOOL", "BYTES", "BF16", "fp32", "FP32 ", "TYPE_FP32", "∞"]


def quoted(text: str) -> str:
    """As much of it as every refusal quotes."""
    return repr(text)[:60].rstrip("'")


def wrong_model(rng: random.Random, header: Header, raw: list[bytes]) -> str | None:
    header.model_name = rng.choice(STRANGE)
    return quoted(header.model_name)


def wrong_datatype(rng: random.Random, header: Header, raw: list[bytes]) -> str | None:
    tensor = rng.choice(header.inputs)
    old, tensor.datatype = tensor.datatype, rng.choice(DATATYPES)
    return None if old == tensor.datatype else quoted(tensor.datatype)


def wrong_size(rng: random.Random, header: Header, raw: list[bytes]) -> str | None:
    tensor = rng.choice(header.inputs)
    index = rng.randrange(len(tensor.shape))
    old, tensor.shape[index] = tensor.shape[index], rng.choice(NUMBERS)
    return None if old == tensor.shape[index] else tensor.name


def wrong_rank(rng: random.Random, header: Header, raw: list[bytes]) -> str | None:
    tensor = rng.choice(header.inputs)
    if rng.random() < 0.5:
        tensor.shape.pop()
    else:
        tensor.shape.extend([rng.choice(NUMBERS)] * rng.choice([1, 2, 40, 3000]))
    return tensor.name


def wrong_bytes(rng: random.Random, header: Header, raw: list[bytes]) -> str | None:
    index = rng.randrange(len(raw))
    cut = rng.randrange(len(raw[index]))
    raw[index] = rng.choice([b"", raw[index][:cut], raw[index] + b"\0" * rng.choice([1, 4, 5000])])
    return header.inputs[index].name


def wrong_raw_count(rng: random.Random, header: Header, raw: list[bytes]) -> str | None:
    if rng.random() < 0.5:
        raw.pop()
    else:
        raw.extend([b""] * rng.choice([1, 2, 500, 20_000]))
    return ""


def mixed_contents(rng: random.Random, header: Header, raw: list[bytes]) -> str | None:
    contents = rng.choice(header.inputs).contents
    contents.fp32_contents.extend([1.0] * rng.choice([0, 1, 6]))
    if rng.random() < 0.5:
        contents.bytes_contents.extend([b"a"] * rng.choice([1, 4]))
    if rng.random() < 0.5:
        raw.pop()
    return "contents"


def typed_contents(rng: random.Random, header: Header, raw: list[bytes]) -> str | None:
    raw.clear()
    for tensor, field in zip(header.inputs, ("fp32_contents", "bytes_contents"), strict=True):
        field = rng.choice([field, "int_contents", "bytes_contents", "fp64_contents"])
        value: Any = {"bytes_contents": b"a", "int_contents": 1}.get(field, 1.0)
        getattr(tensor.contents, field).extend([value] * rng.choice([0, 3, 4, 6, 6, 1000]))
    return None


def absurd_parameter(rng: random.Random, header: Header, raw: list[bytes]) -> str | None:
    name = rng.choice([names.TOP_K, names.TEMPERATURE, names.DTYPE])
    parameter = header.parameters[name]
    kind = rng.randrange(5)
    if kind == 0:
        parameter.int64_param = rng.choice([number for number in NUMBERS if number not in (1, 2, 3)])
    elif kind == 1:
        parameter.string_param = rng.choice(STRANGE)
    elif kind == 2:
        parameter.double_param = rng.choice([0.0, -1.0, 1e-300, 1e300, float("nan"), float("inf")])
    elif kind == 3:
        parameter.bool_param = True
    if name == names.TEMPERATURE and kind == 0:
        return None  # 7 and 101 are fine
    return name


def wrong_shared_memory(rng: random.Random, header: Header, raw: list[bytes]) -> str | None:
    tensor = rng.choice([*header.inputs, header.outputs.add(name="logits")])
    parameters = tensor.parameters
    parameters[names.SHM_REGION].string_param = rng.choice([*STRANGE, "fuzz"])
    if rng.random() < 0.8:
        parameters[names.SHM_NBYTES].int64_param = rng.choice(NUMBERS)
    if rng.random() < 0.5:
        parameters[names.SHM_OFFSET].int64_param = rng.choice(NUMBERS)
    if rng.random() < 0.3:
        parameters[names.SHM_NBYTES].uint64_param = 2**64 - 1
    if rng.random() < 0.2:
        parameters[names.SHM_OFFSET].string_param = "1"
    return "" if parameters[names.SHM_REGION].string_param != "fuzz" else None


MUTATIONS: list[Mutation] = [
    wrong_model,
    wrong_datatype,
    wrong_size,
    wrong_rank,
    wrong_bytes,
    wrong_raw_count,
    mixed_contents,
    typed_contents,
    absurd_parameter,
    wrong_shared_memory,
]


def good() -> tuple[Header, list[bytes]]:
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    words = np.array([[b"a", b"b"], [b"c", b"d"]], object)
    header = Header(model_name="m")
    header.inputs.add(name="x", datatype="FP32", shape=x.shape)
    header.inputs.add(name="words", datatype="BYTES", shape=words.shape)
    return header, [bytes(tensors.to_raw(x)), bytes(tensors.to_raw(words))]


def bad_requests(rng: random.Random) -> Iterator[tuple[bytes, str | None]]:
    """Endless requests, each with what its refusal must say (None: it may as well be fine)."""
    header, raw = good()
    whole = codec.encode_request(header, raw)
    while True:
        kind = rng.random()
        if kind < 0.7:
            header, raw = good()
            yield_word = rng.choice(MUTATIONS)(rng, header, raw)
            if rng.random() < 0.2:  # two faults: only one of them will be named
                rng.choice(MUTATIONS[1:4])(rng, header, raw)
                yield_word = None
            yield codec.encode_request(header, raw), yield_word
        elif kind < 0.9:
            damaged = bytearray(whole)
            for _ in range(rng.choice([1, 1, 2, 5, 20])):
                damaged[rng.randrange(len(damaged))] = rng.randrange(256)
            if rng.random() < 0.3:
                del damaged[rng.randrange(len(damaged)) :]
            yield bytes(damaged), None
        else:
            yield rng.randbytes(rng.choice([0, 1, 2, 10, 100, 5000])), None


def answer_of(call: Any) -> tuple[grpc.StatusCode, str]:
    error = call.exception()
    return (grpc.StatusCode.OK, "") if error is None else (error.code(), error.details() or "")


def assault(client: Client, count: int, rng: random.Random) -> Counter[str]:
    """Send bad requests, many at a time, and check every answer."""
    codes: Counter[str] = Counter()
    wrong: list[str] = []
    room = threading.Semaphore(IN_FLIGHT)
    lock = threading.Lock()

    def check(call: Any, word: str | None) -> None:
        code, details = answer_of(call)
        room.release()
        with lock:
            codes[code.name] += 1
            if code is grpc.StatusCode.INTERNAL and word is None and "has NaN" in details:
                pass  # damaged bytes may be NaN, and so is the answer then
            elif code not in ALLOWED:
                wrong.append(f"{code}: {details}")
            elif code is grpc.StatusCode.OK and word is not None:
                wrong.append(f"accepted, though {word!r} is wrong")
            elif code in REFUSALS and not (details and (word or "") in details):
                wrong.append(f"{details!r} does not say {word!r}")

    requests = bad_requests(rng)
    for _ in range(count):
        data, word = next(requests)
        assert room.acquire(timeout=TIMEOUT_S)
        call = client.infer_bytes.future(data, timeout=TIMEOUT_S)
        call.add_done_callback(lambda call, word=word: check(call, word))
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
    sent = [next(requests)[0] if index % 2 else fine for index in range(100)]
    answers = [kserve.ModelStreamInferResponse.FromString(data) for data in call(iter(sent), timeout=TIMEOUT_S)]
    assert [bool(answer.error_message) for answer in answers] == [bool(index % 2) for index in range(100)]
    sent = []
    for index in range(100):
        bundle = bytearray(bundles.join_requests([fine, *(next(requests)[0] for _ in range(rng.randrange(8)))]))
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
            assert code in (grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT), f"{method}: {details}"


def test_millions_of_fields_do_not_block(inside: StartInside, connect: Connect) -> None:
    client = connect(inside(Base()).target)
    call = client.infer_bytes.future(b"\x3a\x00" * 2_000_000, timeout=TIMEOUT_S)
    assert client.ask("ServerLive").live
    code, details = answer_of(call)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "fields" in details
