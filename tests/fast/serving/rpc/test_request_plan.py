"""Headers: each way to get one wrong is refused, with the offender's name and value."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from edl.protocol import codec, kserve
from edl_serving import TensorSpec
from edl_serving.messages.request import DecodedRequest, RequestDecoder
from edl_serving.messages.request_plan import plan_request
from tests.fast.serving.fakes import LOGITS, FakeBackend, header_for, model_of, refusal_of

TWO = model_of(
    FakeBackend(
        inputs=(TensorSpec("x", "FP32", (-1,)), TensorSpec("words", "BYTES", ())),
        outputs=(LOGITS, TensorSpec("count", "INT64", ())),
    )
)
ONE = model_of(FakeBackend())


def two(rows: int = 2, words_rows: int | None = None) -> kserve.ModelInferRequest:
    header = kserve.ModelInferRequest(model_name="m", id="7")
    header.inputs.add(name="words", datatype="BYTES", shape=[rows if words_rows is None else words_rows])
    header.inputs.add(name="x", datatype="FP32", shape=[rows, 3])
    return header


def read(header: kserve.ModelInferRequest, raw: list[bytes], model: Any = TWO) -> DecodedRequest:
    data, views = codec.split_request(codec.encode_request(header, raw))
    return asyncio.run(RequestDecoder(model, 100).decode(data, views, None))


def words(*items: bytes) -> bytes:
    return b"".join(len(item).to_bytes(4, "little") + item for item in items)


X = np.arange(6, dtype="<f4").tobytes()


def test_inputs_come_in_the_models_order() -> None:
    request = read(two(), [words(b"a", b"bc"), X])
    assert request.arrays[0].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert request.arrays[1].tolist() == [b"a", b"bc"]
    assert (request.plan.id, request.plan.rows, request.plan.shapes) == ("7", 2, ((3,), ()))


def test_a_cached_plan_keeps_no_contents() -> None:
    decoder = RequestDecoder(ONE, 100)
    found = []
    for value in (1, 2):
        data, views = codec.split_request(codec.encode_request(header_for(), [np.full(8, value, "<f4").tobytes()]))
        found.append(asyncio.run(decoder.decode(data, views, None)).arrays[0][0, 0])
    assert found == [1, 2]


def edit(change: Callable[[kserve.ModelInferRequest], object]) -> kserve.ModelInferRequest:
    header = two()
    change(header)
    return header


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda h: setattr(h, "model_name", "other"), ["model", "'other'"]),
        (lambda h: setattr(h, "model_version", "9"), ["version", "'9'"]),
        (lambda h: setattr(h.inputs[1], "name", "z"), ["unknown input", "'z'"]),
        (lambda h: h.inputs.pop(), ["'x'", "missing"]),
        (lambda h: h.inputs.add(name="x"), ["'x'", "twice"]),
        (lambda h: setattr(h.inputs[1], "datatype", "FP64"), ["'x'", "FP32", "'FP64'"]),
        (lambda h: h.inputs[1].shape.append(1), ["'x'", "[2, 3, 1]", "[-1, -1]"]),
        (lambda h: h.inputs[1].ClearField("shape"), ["'x'", "[]"]),
        (lambda h: h.inputs[1].shape.__setitem__(1, 0), ["'x'", "[2, 0]"]),
        (lambda h: h.inputs[1].shape.extend([1] * 100_000), ["'x'", "[2, 3, 1"]),
        (lambda h: h.inputs[0].shape.__setitem__(0, 0), ["'words'", "[0]"]),
        (lambda h: h.inputs[0].shape.__setitem__(0, 101), ["'words'", "101", "100"]),
        (lambda h: h.inputs[0].shape.__setitem__(0, 3), ["'x' has 2 rows", "'words' has 3"]),
        (lambda h: h.outputs.add(name="nope"), ["unknown output", "'nope'"]),
        (lambda h: [h.outputs.add(name="count") for _ in range(2)], ["'count'", "twice"]),
        (
            lambda h: (
                h.outputs.add(name="logits").parameters["classification"].CopyFrom(kserve.InferParameter(int64_param=3))
            ),
            ["'logits'", "classification"],
        ),
        (
            lambda h: h.inputs[1].parameters["shared_memory_region"].CopyFrom(kserve.InferParameter(string_param="r")),
            ["'x'", "shared_memory_byte_size"],
        ),
        (
            lambda h: h.inputs[1].parameters["shared_memory_offset"].CopyFrom(kserve.InferParameter(int64_param=1)),
            ["'x'", "shared_memory_offset", "shared_memory_region"],
        ),
        (lambda h: h.parameters["edl_top_k"].CopyFrom(kserve.InferParameter(int64_param=2)), ["'count' is INT64"]),
    ],
)
def test_wrong_headers_are_named(change: Callable[[kserve.ModelInferRequest], object], said: list[str]) -> None:
    message = refusal_of(lambda: plan_request(edit(change), TWO, 100))
    assert len(message) <= 1000
    for words_ in said:
        assert words_ in message


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ([words(b"a", b"bc")], ["'x'", "1 raw_input_contents"]),
        ([], ["no contents", "0 raw_input_contents"]),
        ([words(b"a", b"bc"), X, X], ["3 raw_input_contents", "2"]),
        ([words(b"a", b"bc"), X[:-1]], ["'x'", "24 bytes", "23"]),
        ([words(b"a"), X], ["'words'", "BYTES"]),
        ([b"\xff\xff\xff\xff" * 2, X], ["'words'", "claims 4294967295 bytes"]),
    ],
)
def test_wrong_byte_counts_are_refused(raw: list[bytes], said: list[str]) -> None:
    message = refusal_of(lambda: read(two(), raw))
    for words_ in said:
        assert words_ in message


def test_raw_and_typed_contents_do_not_mix() -> None:
    header = two()
    header.inputs[0].contents.bytes_contents.extend([b"a", b"bc"])
    for raw in ([X], [words(b"a", b"bc"), X]):
        assert "'words' has contents" in refusal_of(lambda raw=raw: read(header, raw))
    assert "'x' has no contents" in refusal_of(lambda: read(header, []))
    header.inputs[1].contents.fp32_contents.extend(range(6))
    assert "'x' has contents" in refusal_of(lambda: read(header, [X]))


def test_remote_shared_memory_is_refused() -> None:
    header = header_for()
    header.inputs[0].parameters["shared_memory_region"].string_param = "r"
    header.inputs[0].parameters["shared_memory_byte_size"].int64_param = 32
    assert "shared memory" in refusal_of(lambda: read(header, [], ONE))
    header.inputs[0].parameters["shared_memory_byte_size"].int64_param = 31
    assert "32 bytes, not shared_memory_byte_size=31" in refusal_of(lambda: read(header, [], ONE))


def test_parts_of_top_k_alone() -> None:
    header = header_for()
    header.parameters["edl_top_k"].int64_param = 2
    header.outputs.add(name="logits__topk_ids")
    assert [output.name for output in plan_request(header, ONE, 100).outputs] == ["logits__topk_ids"]
    header.outputs.add(name="logits")
    assert "'logits__topk_ids' was asked for twice" in refusal_of(lambda: plan_request(header, ONE, 100))
