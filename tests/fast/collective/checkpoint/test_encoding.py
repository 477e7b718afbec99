"""Plain values come back exactly as they were; everything else is refused by name."""

from __future__ import annotations

import collections
import enum
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from edl.collective.checkpoint.encoding import decode, encode, from_json
from edl.errors import ProtocolError, SettingsError

_LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=-(10**5000), max_value=10**5000)
    | st.floats(allow_nan=True)
    | st.complex_numbers(allow_nan=True)
    | st.text()
    | st.binary()
)
_KEYS = st.none() | st.booleans() | st.integers() | st.text() | st.tuples(st.integers(), st.text())
_VALUES = st.recursive(
    _LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(_KEYS, inner, max_size=4)
        | st.dictionaries(st.text(), inner, max_size=3).map(collections.OrderedDict)
        | st.lists(inner, max_size=3).map(lambda values: collections.deque(values, maxlen=7))
    ),
    max_leaves=20,
)
_DTYPES = ("?", "i1", "u1", "<i2", ">i4", "<u8", "<f2", "<f4", ">f8", "<c8", "<c16", "S3", "<U2", "<M8[s]")


def through(value: Any) -> Any:
    """Encode and decode, with what is taken aside copied as bytes."""
    aside: list[Any] = []

    def take(one: Any, path: tuple[Any, ...]) -> int:
        aside.append(one.clone() if isinstance(one, torch.Tensor) else np.frombuffer(one.tobytes(), np.uint8))
        return len(aside) - 1

    return decode(from_json(encode(value, take)), aside.__getitem__)


def exact(one: Any) -> Any:
    """Something that is equal only for values of the same types and bits."""
    if isinstance(one, dict):
        return type(one), [(exact(key), exact(value)) for key, value in one.items()]
    if isinstance(one, list | tuple | collections.deque):
        return type(one), getattr(one, "maxlen", None), [exact(value) for value in one]
    if isinstance(one, set | frozenset):
        return type(one), {exact(value) for value in one}
    if isinstance(one, float) and type(one) is float:
        return "float", math.copysign(1, one), one.hex()
    if isinstance(one, complex) and type(one) is complex:
        return "complex", exact(one.real), exact(one.imag)
    return type(one), one


@settings(max_examples=60)
@given(_VALUES)
def test_values_come_back_exactly(value: Any) -> None:
    assert exact(through(value)) == exact(value)


@settings(max_examples=40)
@given(st.sampled_from(_DTYPES), st.lists(st.integers(0, 3), max_size=3), st.randoms(use_true_random=False))
def test_numpy_values_come_back(dtype: str, shape: list[int], random: Any) -> None:
    count = math.prod(shape)
    array = np.frombuffer(
        b"".join(np.array(random.randrange(2)).astype(dtype).tobytes() for _ in range(count)), dtype
    ).reshape(shape)
    back = through({"a": array, "scalar": np.array(1).astype(dtype)[()]})
    assert (back["a"].dtype, back["a"].shape) == (array.dtype, array.shape)
    assert back["a"].tobytes() == array.tobytes()
    assert type(back["scalar"]) is type(np.array(1).astype(dtype)[()])


def test_other_known_types_come_back() -> None:
    value = [torch.Size([2, 3]), torch.bfloat16, torch.device("cuda", 1), {1, "a", None}, frozenset({(1, 2)})]
    value += [collections.Counter("abracadabra")]
    assert [type(one) for one in through(value)] == [type(one) for one in value]
    assert through(value) == value
    assert torch.equal(through({"t": torch.arange(3)})["t"], torch.arange(3))


class Colour(enum.IntEnum):
    RED = 1


Point = collections.namedtuple("Point", "x y")


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (object(), "builtins.object"),
        (Colour.RED, "Colour"),
        (Point(1, 2), "Point"),
        (np.array([None]), "ndarray"),
        (np.zeros(1, dtype=[("a", "i4")]), "numpy type"),
    ],
)
def test_other_types_are_refused_by_name(value: object, said: str) -> None:
    with pytest.raises(SettingsError, match=said) as caught:
        encode({"a": [0, value]}, lambda one, path: 0, ("field",))
    assert "field.a.1" in str(caught.value)


def test_recursive_value_is_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(SettingsError, match="deep"):
        encode(endless, lambda one, path: 0)


@pytest.mark.parametrize(
    "form",
    [
        {"eval": "1"},
        {"tuple": 1},
        {"int": "z"},
        {"float": "00"},
        {"bytes": "*"},
        {"scalar": ["O", ""]},
        {"dict": [[{"dict": []}, 1]]},
        {"array": ["|O", [1], 0]},
        {"tuple": [], "dict": []},
    ],
)
def test_a_broken_form_is_an_error(form: Any) -> None:
    with pytest.raises(ProtocolError):
        decode(form, lambda number: np.zeros(8, np.uint8))
