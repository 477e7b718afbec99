"""Thousands of bad requests: each is answered with a status and words that fit, and the server serves on."""

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
import psutil
import pytest

from edl.protocol import bundles, codec, kserve, names, tensors
from edl.protocol.transport import grpc
from tests.fast.serving.conftest import Client, Connect, StartProcess, request_bytes, until
from tests.fast.serving.models import logits

SEED = 20240607
REQUESTS = int(os.environ.get("EDL_TEST_BAD_REQUESTS", "20000"))
"""100,000 take a minute or two: `EDL_TEST_BAD_REQUESTS=100000`."""
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


def wrong_version(rng: random.Random, header: Header, raw: list[bytes]) -> str | None:
    header.model_version = rng.choice([text for text in STRANGE if text])
    return quoted(header.model_version)


def wrong_input_name(rng: random.Random, header: Header, raw: list[bytes]) -> str | None:
    tensor = rng.choice(header.inputs)
    old, tensor.name = tensor.name, rng.choice(STRANGE)
    return None if old == tensor.name else "input"


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


def missing_or_double_input(rng: random.Random, header: Header, raw: list[bytes]) -> str | None:
    if rng.random() < 0.5:
        del header.inputs[rng.randrange(len(header.inputs))]
    else:
        header.inputs.append(rng.choice(header.inputs))
    return "input"


def wrong_bytes(rng: random.Random, header: Header, raw: list[bytes]) -> str | None:
    index = rng.randrange(len(raw))
    cut = rng.randrange(len(raw[index]))
    raw[index] = rng.choice([b"", raw[index][:cut], raw[index] + b"\0" * rng.choice([1, 4, 5000])])
    return header.inputs[index].name


def wrong_byte_strings(rng: random.Random, header: Header, raw: list[bytes]) -> str | None:
    raw[1] = rng.choice([b"\xff", b"\x7f"]) * len(raw[1])
    return "words"


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


def wrong_output(rng: random.Random, header: Header, raw: list[bytes]) -> str | None:
    name = rng.choice([*STRANGE, "logits__topk_ids"])
    header.outputs.add(name=name)
    return quoted(name)


def double_output(rng: random.Random, header: Header, raw: list[bytes]) -> str | None:
    name = rng.choice(["logits", "width", "joined"])
    for _ in range(rng.choice([2, 500])):
        header.outputs.add(name=name)
    return name


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


def foreign_parameters(rng: random.Random, header: Header, raw: list[bytes]) -> str | None:
    for name in STRANGE:
        header.parameters[name].string_param = rng.choice(STRANGE)
    return None


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
    wrong_version,
    wrong_input_name,
    wrong_datatype,
    wrong_size,
    wrong_rank,
    missing_or_double_input,
    wrong_bytes,
    wrong_byte_strings,
    wrong_raw_count,
    mixed_contents,
    typed_contents,
    wrong_output,
    double_output,
    absurd_parameter,
    foreign_parameters,
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
                rng.choice(MUTATIONS[2:7])(rng, header, raw) if header.inputs else None
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
        assert room.acquire(timeout=30)
        call = client.infer_bytes.future(data, timeout=30)
        call.add_done_callback(lambda call, word=word: check(call, word))
    for _ in range(IN_FLIGHT):
        assert room.acquire(timeout=30)
    assert not wrong, f"{len(wrong)} wrong answers, such as {wrong[:5]}"
    return codes


@pytest.fixture
def region() -> Iterator[str]:
    path = Path("/dev/shm") / f"edl-test-{uuid.uuid4().hex}"
    path.write_bytes(bytes(64))
    yield f"/{path.name}"
    path.unlink()


@pytest.mark.timeout(600 + REQUESTS // 200)  # each wait has a deadline of its own: this bounds the work
def test_thousands_of_bad_requests(process: StartProcess, connect: Connect, region: str) -> None:
    """The server is as it was: memory, descriptors, threads, and what a good request costs it."""
    server = process("Mixed", max_batch_rows=8, metrics_port=0)
    client = connect(server.target)
    client.ask("SystemSharedMemoryRegister", name="fuzz", key=region, byte_size=64)
    x, words = np.ones((2, 3), np.float32), np.array([[b"a", b"b"]] * 2, object)
    fine = request_bytes({"x": x, "words": words})
    found = psutil.Process(server.popen.pid)

    def state() -> dict[str, float]:
        cpu_s = sum(
            found.cpu_times()[:2]
        )  # not how long it takes: a machine may be busy at one time, and idle at another
        for _ in range(300):
            client.infer_bytes(fine, timeout=30)
        cpu_s = sum(found.cpu_times()[:2]) - cpu_s
        until(lambda: 'edl_teacher_connections{model="m"} 0.0' in server.metrics())
        memory = found.memory_info().rss / 2**20
        return {
            "cpu_us": cpu_s / 300 * 1e6,
            "MiB": memory,
            "descriptors": found.num_fds(),
            "threads": found.num_threads(),
        }

    rng = random.Random(SEED)
    codes = assault(client, REQUESTS // 4, rng)  # what is kept on purpose, such as plans of requests, is full by then
    before = state()
    codes += assault(client, REQUESTS - REQUESTS // 4, rng)
    after = state()
    print(f"{codes}, {before} -> {after}")
    assert sum(codes.values()) == REQUESTS
    assert codes["INVALID_ARGUMENT"] > REQUESTS / 2
    assert after["MiB"] - before["MiB"] < 24, f"memory: {before} -> {after}"
    # gRPC's own threads, and what they listen with, come and go with the load.
    assert after["descriptors"] <= before["descriptors"] + 4, f"{before} -> {after}"
    assert after["threads"] <= before["threads"] + 4, f"{before} -> {after}"
    assert after["cpu_us"] < 4 * before["cpu_us"] + 500, f"a good request costs more: {before} -> {after}"
    header, raw = codec.decode_response(client.infer_bytes(fine, timeout=30))
    assert header.outputs[0].name == "logits"
    np.testing.assert_array_equal(tensors.from_raw("FP32", (2, 5), raw[0]), logits(x))
    assert client.ask("ServerReady").ready
    until(lambda: 'edl_teacher_in_flight{model="m"} 0.0' in server.metrics())
    for held in ("queue_rows", "queue_bytes", "client_bytes"):
        assert f'edl_teacher_{held}{{model="m"}} 0.0' in server.metrics()
    assert not [line for line in server.log if "Traceback" in line]


def test_nonsense_ends_its_request_only(process: StartProcess, connect: Connect) -> None:
    """Nonsense in a stream ends its request and not the stream."""
    server = process("Base", metrics_port=0)
    call = connect(server.target).channel.stream_stream(names.method("ModelStreamInfer"))
    requests = bad_requests(random.Random(SEED))
    fine = request_bytes({"x": np.ones((1, 4), np.float32)})
    sent = [next(requests)[0] if index % 2 else fine for index in range(400)]
    answers = [kserve.ModelStreamInferResponse.FromString(data) for data in call(iter(sent), timeout=30)]
    assert len(answers) == len(sent)
    for index, answer in enumerate(answers):
        assert bool(answer.error_message) == bool(index % 2)
    until(lambda: 'edl_teacher_in_flight{model="m"} 0.0' in server.metrics())


def test_nonsense_bundle_ends_its_request(process: StartProcess, connect: Connect) -> None:
    """Nonsense in bundles ends its request and not the stream."""
    server = process("Base", metrics_port=0)
    call = connect(server.target).channel.stream_stream(names.method("ModelStreamInfer"))
    rng = random.Random(SEED)
    requests = bad_requests(rng)
    fine = request_bytes({"x": np.ones((1, 4), np.float32)})
    sent = []
    for index in range(300):
        bundle = bytearray(bundles.join_requests([fine, *(next(requests)[0] for _ in range(rng.randrange(8)))]))
        for _ in range(rng.choice([0, 0, 1, 5])):
            bundle[rng.randrange(len(bundle))] = rng.randrange(256)
        sent.append(fine + codec.id_field(f"fine {index}"))
        sent.append(bytes(bundle))
    metadata = ((names.UNORDERED, "1"), (names.BUNDLES, "1"))
    found = set()
    for data in call(iter(sent), timeout=60, metadata=metadata):
        for _, _, number, error in bundles.split_responses(data):
            if not error:
                found.add(number)
    assert found >= {f"fine {index}" for index in range(300)}
    until(lambda: 'edl_teacher_in_flight{model="m"} 0.0' in server.metrics())
    assert not [line for line in server.log if "Traceback" in line]


@pytest.mark.parametrize(
    "method", ["ModelReady", "ModelMetadata", "ModelConfig", "SystemSharedMemoryRegister", "SystemSharedMemoryStatus"]
)
def test_other_methods_refuse_nonsense_too(process: StartProcess, connect: Connect, method: str) -> None:
    rng = random.Random(SEED)
    server = process("Base")
    call = connect(server.target).channel.unary_unary(names.method(method))
    for _ in range(200):
        _, details = code_and_details = answer_of(call.future(rng.randbytes(rng.randrange(40)), timeout=30))
        assert code_and_details[0] in (grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT), details


def test_millions_of_fields_do_not_block(process: StartProcess, connect: Connect) -> None:
    """A message of millions of fields does not block the server."""
    server = process("Base")
    client = connect(server.target)
    call = client.infer_bytes.future(b"\x3a\x00" * 4_000_000, timeout=30)
    assert client.ask("ServerLive").live
    code, details = answer_of(call)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "fields" in details


def test_a_claim_to_be_huge_costs_no_memory(process: StartProcess, connect: Connect) -> None:
    server = process("Mixed", max_queue_rows=2**20)
    client = connect(server.target)
    memory = psutil.Process(server.popen.pid)
    before = memory.memory_info().rss
    header, raw = good()
    for tensor in header.inputs:
        tensor.shape[0] = 2**20
    header.inputs[0].shape[1] = 2**30
    code, details = answer_of(client.infer_bytes.future(codec.encode_request(header, raw), timeout=30))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert f"takes {2**52} bytes, not 24" in details
    assert memory.memory_info().rss - before < 16 << 20


def test_truncated_region_is_refused(process: StartProcess, connect: Connect, region: str) -> None:
    """A client that truncates its region is refused."""
    server = process("Base")
    client = connect(server.target)
    client.ask("SystemSharedMemoryRegister", name="r", key=region, byte_size=64)
    os.truncate(f"/dev/shm{region}", 0)
    header = Header(model_name="m")
    tensor = header.inputs.add(name="x", datatype="FP32", shape=(4, 4))
    tensor.parameters[names.SHM_REGION].string_param = "r"
    tensor.parameters[names.SHM_NBYTES].int64_param = 64
    code, details = answer_of(client.infer_bytes.future(header.SerializeToString(), timeout=30))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "has shrunk" in details
    assert len(client.infer(np.ones((1, 4), np.float32))["logits"]) == 1
