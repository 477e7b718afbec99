"""Output options: the numbers of top-k, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from edl.protocol import kserve
from edl_serving import Array, TensorSpec
from edl_serving.messages.output_options import OutputOptions, top_k
from tests.fast.serving.fakes import LOGITS, refusal_of

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
    ids, values, tail = top_k(array, k, temperature)
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


def test_equal_logits_come_by_rising_id() -> None:
    assert top_k(np.array([[1, 7, 7, 0, 7]], np.float32), 3, 1.0)[0].tolist() == [[1, 2, 4]]
    tail = top_k(np.array([[90.0, 89.0, 88.9]], np.float32), 1, 0.01)[2]
    assert tail[0] == pytest.approx(8900, rel=1e-3), "huge tails do not overflow"


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"edl_top_k": 0}, ["edl_top_k", "0"]),
        ({"edl_top_k": "five"}, ["edl_top_k", "string_param"]),
        ({"edl_temperature": math.nan}, ["edl_temperature", "nan"]),
        ({"edl_temperature": 1e-300}, ["edl_temperature", "1e-300"]),
        ({"edl_temperature": "hot"}, ["edl_temperature", "string_param"]),
        ({"edl_dtype": "FP8"}, ["edl_dtype", "FP8"]),
        ({"edl_dtype": "x" * 100_000}, ["edl_dtype", "xxx"]),
    ],
)
def test_absurd_parameters_are_named(values: dict[str, Any], words: list[str]) -> None:
    message = refusal_of(lambda: OutputOptions.parse(parameters(**values)))
    assert len(message) < 500
    for word in words:
        assert word in message


def test_other_parameters_are_left_alone() -> None:
    assert OutputOptions.parse(parameters(priority=3, sequence_id="7", edl_unheard_of=1)) == OutputOptions()
    assert "None" in refusal_of(lambda: OutputOptions.parse({"edl_top_k": kserve.InferParameter()}))


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
