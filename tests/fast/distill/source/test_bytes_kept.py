"""Bytes and strings keep their last NULs wherever they become arrays and back, or are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edl.distill.source.arrays import as_array
from edl.distill.transport.request import Payload
from edl.errors import ProtocolError, SourceError
from edl.protocol.tensors import array_of, from_raw, to_raw
from edl_serving.backends.backend import TensorSpec
from edl_serving.backends.callable import CallableBackend
from edl_serving.backends.specs import cast_to_spec

CLIPS = [b"\x01\0\0\0\0\0", b"\0" * 6, b"\x01\x02\x03\x04\x05\x06", b""]


def received(fields: dict[str, Any]) -> list[Any]:
    """What a teacher reads of the bytes that are sent."""
    payload = Payload.of(fields, None)
    ((_, datatype, shape),) = payload.inputs
    found: list[Any] = from_raw(datatype, shape, payload.raw[0]).tolist()
    return found


@settings(max_examples=40)
@given(st.lists(st.binary(max_size=6) | st.text(max_size=4), min_size=1, max_size=5))
def test_any_bytes_and_text_arrive(words: list[Any]) -> None:
    expected = [word.encode(errors="replace") if isinstance(word, str) else word for word in words]
    words = [word.decode() if isinstance(before, str) else word for before, word in zip(words, expected, strict=True)]
    assert received({"x": as_array(words, "x")}) == expected
    assert received({"x": as_array(np.array(words, object), "x")}) == expected
    assert received({"x": np.stack([as_array(word, "x") for word in words])}) == expected
    assert received({"x": as_array([words, words], "x")}) == [expected, expected]


@settings(max_examples=40)
@given(st.lists(st.binary(min_size=1, max_size=4), min_size=1, max_size=4))
def test_fixed_bytes_arrive_or_are_refused(words: list[bytes]) -> None:
    array = np.array(words)
    assert array.dtype.kind == "S"
    if all(len(word) == array.dtype.itemsize and word[-1] for word in words):
        assert received({"x": as_array(array, "x")}) == words
        assert received({"x": array}) == words
    else:
        with pytest.raises(SourceError, match=r"batch 3, input 'x'.*ends in NULs.*dtype=object"):
            as_array(array, "batch 3, input 'x'")
        with pytest.raises(ProtocolError, match="ends in NULs"):
            to_raw(array)
        with pytest.raises(ProtocolError, match="ends in NULs"):
            array_of([array, array])


def test_a_models_words_keep_their_nuls() -> None:
    def speak(inputs: Any) -> Any:
        return {"listed": CLIPS[: len(inputs["x"])], "text": ["é\0"] * len(inputs["x"])}

    backend = CallableBackend(speak, ["x:float32[1]"])
    answer = backend.predict({"x": np.zeros((3, 1), np.float32)})
    assert [bytes(word) for word in answer["listed"]] == CLIPS[:3]
    assert from_raw("BYTES", [3], to_raw(answer["text"])).tolist() == ["é\0".encode()] * 3
    words = TensorSpec("words", "BYTES", ())
    assert cast_to_spec(words, np.array([b"ab", b"cd"])).tolist() == [b"ab", b"cd"]
    with pytest.raises(TypeError, match=r"'words'.*ends in NULs"):
        cast_to_spec(words, np.array(CLIPS))


def test_outputs_a_type_lacks_are_refused() -> None:
    assert cast_to_spec(TensorSpec("y", "INT8", ()), np.array([-128, 127])).tolist() == [-128, 127]
    with pytest.raises(TypeError, match="'y' holds 300 as int64, which INT8 does not have"):
        cast_to_spec(TensorSpec("y", "INT8", ()), np.array([1, 300]))
    with pytest.raises(TypeError, match="which INT64 does not have"):
        cast_to_spec(TensorSpec("y", "INT64", ()), np.array([2**63], np.uint64))
    with pytest.raises(TypeError, match=r"holds .*e\+30 as float32, which FP16"):
        cast_to_spec(TensorSpec("y", "FP16", ()), np.array([np.inf, 1e30], np.float32))
    assert np.isinf(cast_to_spec(TensorSpec("y", "FP16", ()), np.array([np.inf], np.float32))).all()
