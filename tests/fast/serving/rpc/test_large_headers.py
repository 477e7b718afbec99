"""Headers of megabytes: refused before they become objects, unless they hold what the model takes."""

from __future__ import annotations

import asyncio
import tracemalloc

import numpy as np
import pytest

from edl.errors import ProtocolError
from edl.protocol import codec, kserve
from edl_serving import TensorSpec
from edl_serving.messages.request import DecodedRequest, RequestDecoder
from edl_serving.request_error import RequestError
from tests.fast.serving.fakes import FakeBackend, model_of

N = 2 << 20
"""Bytes of each attack: far more than a header has, and parsed they would be tens of megabytes."""

WIDE = model_of(FakeBackend(inputs=(TensorSpec("x", "FP32", (-1,)),)))
WORDS = model_of(FakeBackend(inputs=(TensorSpec("words", "BYTES", (-1,)),)), max_message_bytes=1 << 20)
WHOLE = model_of(FakeBackend(inputs=(TensorSpec("n", "INT64", (-1,)),)))


def field(number: int, value: bytes) -> bytes:
    return codec.varint(number << 3 | 2) + codec.varint(len(value)) + value


def tensor(*extra: bytes, name: bytes = b"x", datatype: bytes = b"FP32", shape: tuple[int, ...] = (1, 4)) -> bytes:
    sizes = b"".join(codec.varint(size) for size in shape)
    return field(1, b"m") + field(5, field(1, name) + field(2, datatype) + field(3, sizes) + b"".join(extra))


def read(header: bytes, model: object = WIDE) -> DecodedRequest:
    return asyncio.run(RequestDecoder(model, 100).decode(header, [], None))  # type: ignore[arg-type]


ATTACKS = {
    "shape": tensor(field(3, b"\x01" * N)),
    "parameters": tensor(field(4, b"") * (N // 2)),
    "an id": tensor() + field(3, b"i" * N),
    "strings for numbers": tensor(field(5, b"\x42\x00" * (N // 2))),
    "too many numbers": tensor(field(5, field(6, b"\0" * N))),
    "numbers one by one": tensor(field(5, b"\x35\0\0\0\0" * (N // 5)), shape=(1, N // 5)),
    "unknown input": tensor(field(5, field(6, b"\0" * N)), name=b"y"),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_large_headers_make_no_objects(attack: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[int] = []
    parse = codec.parse_request
    monkeypatch.setattr(codec, "parse_request", lambda data: (parsed.append(len(data)), parse(data))[1])
    tracemalloc.start()
    try:
        with pytest.raises(RequestError) as refused:
            read(ATTACKS[attack])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert refused.value.code.name == "INVALID_ARGUMENT"
    assert max(parsed, default=0) < 1 << 20, "only what is small may be parsed"
    assert peak < 4 * N, "more than a few copies of the message"
    assert len(refused.value.message) < 1000


def test_typed_contents_count_in_memory() -> None:
    count = 40_000
    header = tensor(field(5, b"\x42\x00" * count), name=b"words", datatype=b"BYTES", shape=(1, count))
    with pytest.raises(RequestError, match=r"40,000 elements as typed contents would take .* --max-message"):
        read(header, WORDS)


def test_large_strings_are_counted() -> None:
    for claimed, said in ((1, "more than 1 fields"), (5, "takes 5 elements, bytes_contents has 3")):
        contents = field(5, field(8, b"a" * 100_000) * 3)
        header = tensor(contents, name=b"words", datatype=b"BYTES", shape=(1, claimed))
        with pytest.raises(RequestError, match=said):
            read(header, WORDS)


def test_large_typed_contents_are_read() -> None:
    values = np.arange(200_000, dtype=np.float32)
    header = kserve.ModelInferRequest(model_name="m", id="7")
    tensor = header.inputs.add(name="x", datatype="FP32", shape=[2, 100_000])
    tensor.contents.fp32_contents.extend(values)
    assert np.array_equal(read(header.SerializeToString()).arrays[0].reshape(-1), values)

    numbers = np.arange(-100_000, 100_000) ** 3
    header = kserve.ModelInferRequest(model_name="m")
    tensor = header.inputs.add(name="n", datatype="INT64", shape=[1, 200_000])
    tensor.contents.int64_contents.extend(numbers.tolist())
    assert np.array_equal(read(header.SerializeToString(), WHOLE).arrays[0].reshape(-1), numbers)

    header = kserve.ModelInferRequest(model_name="m")
    tensor = header.inputs.add(name="words", datatype="BYTES", shape=[1, 3])
    tensor.contents.bytes_contents.extend([b"a" * 100_000, b"", b"b\0"])
    assert read(header.SerializeToString(), WORDS).arrays[0].tolist() == [[b"a" * 100_000, b"", b"b\0"]]


def test_a_streams_ids_are_short() -> None:
    with pytest.raises(ProtocolError, match="an id of 2,097,152 bytes"):
        codec.split_streamed_request(field(1, b"m") + field(3, b"i" * N))
