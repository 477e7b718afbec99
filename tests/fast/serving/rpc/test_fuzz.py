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

from edl.protocol import bundles, codec, kserve, names
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
            assert code in (grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT), f"{method}: {details}"
