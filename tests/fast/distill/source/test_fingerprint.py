"""What the training loop gets with a label is what the teacher saw, or there is an error; and no error without need."""

from __future__ import annotations

import mmap
from collections import UserDict, deque
from collections.abc import Callable
from operator import itemgetter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edl.distill.source.chunk import ReuseDetector
from edl.distill.source.cutters import BatchCutter, Cutter, SampleListCutter
from edl.distill.source.fingerprint import Checksum
from edl.distill.transport.request import Payload
from edl.errors import ProtocolError, SourceError
from edl.protocol.tensors import array_of, as_array, from_raw, to_raw
from edl_serving.backends.backend import TensorSpec, cast_to_spec
from edl_serving.backends.callable import CallableBackend

X = {"x": itemgetter(0)}


def item_of(value: Any, cutter: type[Cutter] = BatchCutter, **getters: Any) -> Any:
    return cutter(getters or X, None, 1).put(value)[0]


def expect(item: Any, changed: bool) -> None:
    if changed:
        with pytest.raises(SourceError, match="yield a new array each time"):
            ReuseDetector().check_delivered(item)
    else:
        ReuseDetector().check_delivered(item)


class Wrapped:
    """What other frameworks have: no array, but numpy makes one of it."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return np.array(self.array, dtype=dtype)


def refills() -> dict[str, tuple[Any, Callable[[Any], Any]]]:
    """Items, and what a source does to them."""
    small = np.arange(16, dtype=np.uint8).reshape(4, 4)
    large = np.arange(200_000, dtype=np.float32).reshape(100, 2000)
    large[3, 4] = np.nan
    records = np.zeros(2, [("boxes", object), ("n", "i4")])
    records["boxes"] = [np.zeros(3), np.zeros(2)]
    strided = np.arange(400_000, dtype=np.int64).reshape(400, 1000)[::2, ::-3]
    return {
        "small": ((np.zeros((4, 3)), 0), lambda item: item[0].fill(1)),
        "one element": ((large.copy(), 0), lambda item: item[0].__setitem__((57, 1234), 0.5)),
        "rows change places": ((large.copy(), 0), lambda item: item[0].__setitem__(slice(None), item[0][::-1].copy())),
        "strided": ((strided.copy()[::2, ::-1], 0), lambda item: item[0].__setitem__((3, 7), -1)),
        "a large array": ((np.tile(large, (2, 2)), 0), lambda item: item[0].fill(1)),
        "a label": ((large, np.zeros(100)), lambda item: item[1].fill(1)),
        "a list": ([large, 0], lambda item: item.__setitem__(0, large.copy())),
        "a list of numbers": (([[1, 2], [3, 4]], 0), lambda item: item[0][1].__setitem__(0, 9)),
        "bytes": (([b"a", b"b"], 0), lambda item: item[0].__setitem__(0, b"a\0")),
        "objects": ((np.array([b"a", b"b"], object), 0), lambda item: item[0].__setitem__(0, b"a\0")),
        "arrays in an array": ((small, np.array([np.zeros(3), "a"], object)), lambda item: item[1][0].fill(1)),
        "arrays in records": ((small, records), lambda item: item[1]["boxes"][1].fill(1)),
        "numbers in records": ((small, records.copy()), lambda item: item[1]["n"].fill(1)),
        "a record": ((small, np.zeros(2, "i4,f4")[1]), lambda item: item[1].__setitem__("f0", 1)),
        "a bytearray": ((bytearray(b"abc"), 0), lambda item: item[0].__setitem__(0, 7)),
        "a dictionary": ({0: large, "label": 1}, lambda item: item.__setitem__(0, large.copy())),
        "deque": ((small, deque([1, 2])), lambda item: item[1].rotate(1)),
        "mmap": ((small, mmap.mmap(-1, 4096)), lambda item: item[1].__setitem__(7, 1)),
        "a matrix": ((large.copy().view(np.matrix), 0), lambda item: item[0].__setitem__((99, 1999), -1.0)),
        "__array__": ((Wrapped(small.copy()), 0), lambda item: item[0].array.__setitem__((3, 2), 9)),
        "a list of __array__": (([Wrapped(row) for row in small.copy()], 0), lambda item: item[0][3].array.fill(9)),
        "deque of rows": ((deque(small.copy()), 0), lambda item: item[0][3].fill(9)),
        "an object": (SimpleNamespace(x=small.copy()), lambda item: item.x.fill(9)),
        "an object's label": (SimpleNamespace(x=small.copy(), y=np.zeros(3)), lambda item: item.y.fill(9)),
        "a user's dictionary": (UserDict({0: large, "label": 1}), lambda item: item.__setitem__(0, large.copy())),
    }


@pytest.mark.parametrize("name", refills())
def test_a_refilled_item_is_noticed(name: str) -> None:
    value, refill = refills()[name]
    x = (lambda found: found.x) if name.startswith("an object") else itemgetter(0)
    item = item_of(value, x=x)
    expect(item_of(value, x=x), changed=False)
    refill(value)
    expect(item, changed=True)


def test_a_refilled_tensor_is_noticed() -> None:
    torch = pytest.importorskip("torch")
    for dtype in (torch.uint8, torch.float32, torch.bfloat16, torch.bool):
        for rows in (2, 400):
            tensor = torch.ones((rows, 300)).to(dtype)
            item = item_of((tensor, tensor.T))
            expect(item_of((tensor, tensor.T)), changed=False)
            tensor[-1, -1] = 0
            expect(item, changed=True)
    tensor = torch.ones(3, 3)
    item = item_of((tensor, 0))
    tensor.set_(torch.ones(3, 3))
    expect(item, changed=True)


@pytest.mark.parametrize("how", ["set_value", "assign", "item", "add_"])
def test_a_refilled_paddle_tensor_is_noticed(how: str) -> None:
    paddle = pytest.importorskip("paddle")
    refill = {
        "set_value": lambda tensor: tensor.set_value(np.zeros((300, 100), np.float32)),  # which paddle does not count
        "assign": lambda tensor: paddle.assign(paddle.zeros([300, 100]), tensor),
        "item": lambda tensor: tensor.__setitem__((7, 9), 0.0),
        "add_": lambda tensor: tensor.add_(paddle.ones([300, 100])),
    }[how]
    tensor = paddle.ones([300, 100])
    item = item_of((tensor, 0))
    expect(item_of((tensor, 0)), changed=False)
    refill(tensor)
    expect(item, changed=True)


@settings(max_examples=40)
@given(st.integers(5_000, 60_000), st.integers(1, 2**62), st.data())
def test_a_whole_look_sees_every_byte(size: int, seed: int, data: st.DataObject) -> None:
    words = np.random.default_rng(seed).integers(0, 256, size * 8 + seed % 8, np.uint8)
    before = Checksum(words)
    words[data.draw(st.integers(0, len(words) - 1))] ^= data.draw(st.integers(1, 255))
    assert not before.matches(words)


def test_what_is_kept_is_sent_as_it_was() -> None:
    """Else the cache would hold a label of what the buffer became, under the id of what it was."""
    found = np.zeros((2, 3))
    kept, sent = Payload.of({"x": found}, None, copy=True), Payload.of({"x": found}, None)
    found += 1
    assert not any(kept.raw[0])
    assert np.shares_memory(np.asarray(sent.raw[0]), found), "without a cache there is no need to copy"


def test_samples_of_clashing_types_are_named() -> None:
    with pytest.raises(SourceError, match="sample 1: input 'x' is float64, but earlier samples have int64"):
        item_of([(2**60 + 1,), (0.5,)], SampleListCutter)
    with pytest.raises(SourceError, match=r"no type holds both"):
        item_of([(np.uint64(2**63),), (-1,)], SampleListCutter)
    with pytest.raises(SourceError, match=r"no type holds both"):
        item_of([(b"a",), (1,)], SampleListCutter)
    cutter = SampleListCutter(X, 3, 1)
    _, (chunk,) = cutter.put([(1,), (0.5,), (True,)])
    assert chunk.fields["x"].tolist() == [1.0, 0.5, 1.0]


# Bytes and strings keep their last NULs wherever they become arrays and back, or are refused.

CLIPS = [b"\x01\0\0\0\0\0", b"\0" * 6, b"\x01\x02\x03\x04\x05\x06", b""]


def received(fields: dict[str, Any]) -> list[Any]:
    """What a teacher reads of the bytes that are sent."""
    payload = Payload.of(fields, None)
    ((_, datatype, shape),) = payload.inputs
    return from_raw(datatype, shape, payload.raw[0]).tolist()


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
    with pytest.raises(TypeError, match="'y' holds 300 as int64, which INT8 cannot hold"):
        cast_to_spec(TensorSpec("y", "INT8", ()), np.array([1, 300]))
    with pytest.raises(TypeError, match="which INT64 cannot hold"):
        cast_to_spec(TensorSpec("y", "INT64", ()), np.array([2**63], np.uint64))
    with pytest.raises(TypeError, match=r"holds .*e\+30 as float32, which FP16"):
        cast_to_spec(TensorSpec("y", "FP16", ()), np.array([np.inf, 1e30], np.float32))
    assert np.isinf(cast_to_spec(TensorSpec("y", "FP16", ()), np.array([np.inf], np.float32))).all()
