"""Requests: each way to get one wrong is named, whatever its size, and what its output options make of an answer."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from edl.protocol import codec, kserve
from edl.protocol.tensors import split_top_k
from edl_serving import Array, TensorSpec
from edl_serving.request import DecodedRequest, RequestDecoder
from edl_serving.request_error import RequestError
from edl_serving.request_plan import OutputOptions, plan_request
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
    data, views = codec.REQUEST.split(codec.REQUEST.join(header.SerializeToString(), raw))
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
        data, views = codec.REQUEST.split(
            codec.REQUEST.join(header_for().SerializeToString(), [np.full(8, value, "<f4").tobytes()])
        )
        found.append(asyncio.run(decoder.decode(data, views, None)).arrays[0][0, 0])
    assert found == [1, 2]


def tell(of: Any, name: str, value: int | str) -> None:
    """Set a parameter."""
    setattr(of.parameters[name], "int64_param" if isinstance(value, int) else "string_param", value)


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
        (lambda h: h.inputs[1].shape.__setitem__(1, 0), ["'x'", "[2, 0]"]),
        (lambda h: h.inputs[1].shape.extend([1] * 100_000), ["'x'", "[2, 3, 1"]),
        (lambda h: h.inputs[0].shape.__setitem__(0, 101), ["'words'", "101", "100"]),
        (lambda h: h.inputs[0].shape.__setitem__(0, 3), ["'x' has 2 rows", "'words' has 3"]),
        (lambda h: h.outputs.add(name="nope"), ["unknown output", "'nope'"]),
        (lambda h: [h.outputs.add(name="count") for _ in range(2)], ["'count'", "twice"]),
        (lambda h: tell(h.outputs.add(name="logits"), "classification", 3), ["'logits'", "classification"]),
        (lambda h: tell(h.inputs[1], "shared_memory_region", "r"), ["'x'", "shared_memory_byte_size"]),
        (lambda h: tell(h.inputs[1], "shared_memory_offset", 1), ["'x' has a shared_memory_offset", "_region"]),
        (lambda h: tell(h, "edl_top_k", 2), ["'count' is INT64"]),
    ],
)
def test_wrong_headers_are_named(change: Callable[[kserve.ModelInferRequest], object], said: list[str]) -> None:
    header = two()
    change(header)
    message = refusal_of(lambda: plan_request(header, TWO, 100))
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
    tell(header.inputs[0], "shared_memory_region", "r")
    tell(header.inputs[0], "shared_memory_byte_size", 32)
    assert "shared memory" in refusal_of(lambda: read(header, [], ONE))
    tell(header.inputs[0], "shared_memory_byte_size", 31)
    assert "32 bytes, not shared_memory_byte_size=31" in refusal_of(lambda: read(header, [], ONE))


def test_parts_of_top_k_alone() -> None:
    header = header_for()
    tell(header, "edl_top_k", 2)
    header.outputs.add(name="logits__topk_ids")
    assert [output.name for output in plan_request(header, ONE, 100).outputs] == ["logits__topk_ids"]
    header.outputs.add(name="logits")
    assert "'logits__topk_ids' was asked for twice" in refusal_of(lambda: plan_request(header, ONE, 100))


WIDE = model_of(FakeBackend(inputs=(TensorSpec("x", "FP32", (-1,)),)))
STRINGS = model_of(FakeBackend(inputs=(TensorSpec("words", "BYTES", (-1,)),)))
WHOLE = model_of(FakeBackend(inputs=(TensorSpec("n", "INT64", (-1,)),)))


def read_header(header: bytes, model: object = WIDE) -> DecodedRequest:
    return asyncio.run(RequestDecoder(model, 100).decode(header, [], None))  # type: ignore[arg-type]


def test_huge_headers_are_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two bytes, protobuf makes a number or a string of 4 to 60 bytes."""
    monkeypatch.setattr(codec.REQUEST, "parse", lambda data: pytest.fail("it was parsed"))
    header = kserve.ModelInferRequest(model_name="m")
    header.inputs.add(name="x", datatype="FP32", shape=[1, 1 << 21]).contents.bytes_contents.extend([b""] * (1 << 21))
    with pytest.raises(RequestError, match=r"of names, .*over 4,194,304: tensors belong in raw_input_contents"):
        read_header(header.SerializeToString())


def test_large_typed_contents_are_read() -> None:
    numbers = np.arange(200_000)
    for model, name, datatype, field_, values in (
        (WIDE, "x", "FP32", "fp32_contents", numbers),
        (WHOLE, "n", "INT64", "int64_contents", (numbers - 100_000) ** 3),
        (STRINGS, "words", "BYTES", "bytes_contents", np.array([b"a" * 100_000, b"", b"b\0"], object)),
    ):
        header = kserve.ModelInferRequest(model_name="m", id="7")
        tensor = header.inputs.add(name=name, datatype=datatype, shape=[1, len(values)])
        getattr(tensor.contents, field_).extend(values.tolist())
        assert np.array_equal(read_header(header.SerializeToString(), model).arrays[0], values[None])


COUNT = TensorSpec("count", "INT64", ())

logits = hnp.arrays(
    st.sampled_from([np.float16, np.float32, np.float64]),
    hnp.array_shapes(min_dims=1, max_dims=3, min_side=1, max_side=12),
    elements=st.floats(-300, 300, width=16) | st.sampled_from([math.inf, -math.inf, 65504.0, 0.0]),
)


def parameters(**values: Any) -> dict[str, kserve.InferParameter]:
    fields = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}
    return {name: kserve.InferParameter(**{fields[type(value)]: value}) for name, value in values.items()}


@settings(max_examples=50)
@given(logits, st.data(), st.floats(0.5, 20))
def test_top_k_and_the_sum_of_the_rest(array: Array, data: st.DataObject, temperature: float) -> None:
    k = data.draw(st.integers(1, array.shape[-1]))
    ids, values, tail = split_top_k(array, k, temperature)
    assert ids.dtype == np.int32
    assert values.dtype == array.dtype
    assert tail.dtype == np.float32
    for index in np.ndindex(array.shape[:-1]):
        row = array[index].astype(np.float64)
        assert len(set(ids[index].tolist())) == k
        assert values[index].tolist() == array[index][ids[index]].tolist()
        assert values[index].tolist() == sorted(array[index].tolist(), reverse=True)[:k]
        rest = np.delete(row, ids[index]) / temperature
        expected = -math.inf if len(rest) == 0 else float(np.logaddexp.reduce(rest))
        assert tail[index] == pytest.approx(expected, rel=1e-4, abs=1e-4)
    assert split_top_k(np.array([[1, 7, 7, 0, 7]], np.float32), 3, 1.0)[0].tolist() == [[1, 2, 4]], "ties by id"


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"edl_top_k": 0}, ["edl_top_k", "0"]),
        ({"edl_temperature": math.nan}, ["edl_temperature", "nan"]),
        ({"edl_temperature": 1e-300}, ["edl_temperature", "1e-300"]),
        ({"edl_temperature": "hot"}, ["edl_temperature", "string_param"]),
        ({"edl_dtype": "x" * 100_000}, ["edl_dtype", "xxx"]),
    ],
)
def test_absurd_parameters_are_named(values: dict[str, Any], words: list[str]) -> None:
    message = refusal_of(lambda: OutputOptions.parse(parameters(**values)))
    assert len(message) < 500
    for word in words:
        assert word in message
    assert OutputOptions.parse(parameters(priority=3, sequence_id="7", edl_unheard_of=1)) == OutputOptions()


def test_top_k_needs_float_classes() -> None:
    options = OutputOptions.parse(parameters(edl_top_k=6))
    assert "'logits' has 5 classes" in refusal_of(lambda: options.wire_names(LOGITS))
    assert "'count' is INT64" in refusal_of(lambda: options.wire_names(COUNT))
    assert "'loss'" in refusal_of(lambda: options.wire_names(TensorSpec("loss", "FP32")))
    late = TensorSpec("logits", "FP32", (-1,))
    assert options.wire_names(late) == ("logits__topk_ids", "logits__topk_values", "logits__tail_lse")
    assert "'logits' has 3 classes" in refusal_of(lambda: options.apply_to(late, np.zeros((1, 3), np.float32)))


def test_dtype_changes_floats_only() -> None:
    options = OutputOptions.parse(parameters(edl_dtype="FP16"))
    options.check_outputs([COUNT, LOGITS])
    found = options.apply_to(LOGITS, np.array([[1, math.inf, -math.inf, 0.1, 0]], np.float32))["logits"]
    assert found.dtype == np.float16
    assert found[0, :3].tolist() == [1, math.inf, -math.inf]
    assert options.apply_to(COUNT, np.array([3]))["count"].dtype == np.int64
    assert "'count' is INT64" in refusal_of(lambda: options.check_outputs([COUNT]))


@pytest.mark.parametrize(("asked", "given", "most"), [("FP16", "f4", 65504.0), ("FP32", "f8", 3.4028234663852886e38)])
def test_clamped_values_stay_finite(asked: str, given: str, most: float) -> None:
    options = OutputOptions.parse(parameters(edl_dtype=asked))
    rows = np.array([[1, most * 2, -most * 2, math.inf, -math.inf], [math.nan, most * 4, 0, 1, 2]], given)
    found = options.apply_to(LOGITS, rows)["logits"]
    assert found.dtype == np.dtype(given[0] + str(np.dtype(given).itemsize // 2))
    assert found[0].tolist() == [1, most, -most, math.inf, -math.inf]
    assert np.isnan(found[1, 0])
    assert found[1, 1] == most
    assert options.apply_to(LOGITS, rows[:0])["logits"].shape == (0, 5)
    some = OutputOptions.parse(parameters(edl_dtype=asked, edl_top_k=2)).apply_to(
        LOGITS, rows[:1, :3].repeat(2, 1)[:, :5]
    )
    assert some["logits__topk_values"].tolist() == [[most, most]]
