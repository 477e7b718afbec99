"""What a `State` saves comes back bit for bit into other objects; what cannot is refused by name."""

from __future__ import annotations

import collections
import copy
import enum
import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from edl.collective.checkpoint.encoding import decode, encode, from_json, parse_meta
from edl.collective.checkpoint.state.state import CapturedState, State, WorldChange
from edl.collective.checkpoint.state.tensors import view_of
from edl.errors import ProtocolError, SettingsError

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.complex64, torch.complex128, torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
]  # fmt: skip


def pack(captured: CapturedState) -> torch.Tensor:
    """The data, as a slot would hold it."""
    data = torch.zeros(captured.data_nbytes, dtype=torch.uint8)
    for entry, tensor in zip(captured.entries, captured.tensors, strict=True):
        view_of(data, entry).copy_(tensor)
    return data


def restore(state: State, captured: CapturedState, data: torch.Tensor) -> None:
    meta = parse_meta(captured.meta)
    loading = state.begin_load(meta)
    loading.fill_tensors(meta.entries, data)
    loading.finish()


def through(source: State, target: State) -> None:
    captured = source.capture()
    data = pack(captured)
    restore(target, captured, data)
    data.fill_(0xAA)  # nothing restored may still look at it


def bits(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def model(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.LazyLinear(5))


def trained(seed: int, steps: int = 3) -> tuple[nn.Sequential, torch.optim.Optimizer, Any]:
    net = model(seed)
    net(torch.randn(2, 3, 5, 5))
    optimizer = torch.optim.AdamW(
        [{"params": net[0].parameters(), "lr": 0.1}, {"params": [*net[1].parameters(), *net[3].parameters()]}]
    )
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 5])
    for _ in range(steps):
        optimizer.zero_grad()
        net(torch.randn(2, 3, 5, 5)).square().sum().backward()
        optimizer.step()
        scheduler.step()
    return net, optimizer, scheduler


def all_bits(net: nn.Module, optimizer: torch.optim.Optimizer) -> list[bytes]:
    state = optimizer.state_dict()["state"]
    return [bits(one) for one in net.state_dict().values()] + [
        bits(state[number][key]) for number in sorted(state) for key in sorted(state[number])
    ]


def test_training_job_comes_back() -> None:
    net, optimizer, scheduler = trained(0)
    source = State(model=net, optimizer=optimizer, scheduler=scheduler, epoch=3, best=None, seen=[1, (2, 3)])
    other, other_optimizer, other_scheduler = trained(1, steps=0)
    target = State(model=other, optimizer=other_optimizer, scheduler=other_scheduler, epoch=0, best=0.5, seen=[])
    through(source, target)
    assert all_bits(other, other_optimizer) == all_bits(net, optimizer)
    assert (target.epoch, target.best, target.seen) == (3, None, [1, (2, 3)])
    for one, its, schedule in ((net, optimizer, scheduler), (other, other_optimizer, other_scheduler)):
        torch.manual_seed(9)
        its.zero_grad()
        one(torch.randn(2, 3, 5, 5)).sum().backward()
        its.step()
        schedule.step()
    assert all_bits(other, other_optimizer) == all_bits(net, optimizer)
    assert other_scheduler.get_last_lr() == scheduler.get_last_lr()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (3, 0, 2), (3, 5)], ids=str)
def test_types_and_shapes_come_back(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    count = int(np.prod(shape)) * dtype.itemsize
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (count,), dtype=torch.uint8)
    tensor = raw.view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)
    target = State(rng=False)
    through(State(rng=False, inside=[tensor], itself=tensor), target)
    for back in (target.inside[0], target.itself):
        assert (back.dtype, back.shape, bits(back)) == (dtype, tensor.shape, bits(tensor))


def test_tied_parameters_stay_tied() -> None:
    def tied() -> nn.ModuleDict:
        net = nn.ModuleDict({"in": nn.Linear(4, 4), "out": nn.Linear(4, 4)})
        net["out"].weight = net["in"].weight
        return net

    source, target = tied(), tied()
    weight = target["in"].weight
    before = weight.data_ptr()
    through(State(model=source), State(model=target))
    assert target["out"].weight is target["in"].weight is weight
    assert weight.data_ptr() == before, "what is restored is where it was"
    assert bits(target["in"].weight) == bits(source["in"].weight)


class Extra(nn.Linear):
    """A module whose state is not all tensors of its own."""

    def get_extra_state(self) -> dict[str, Any]:
        return {"note": self.note}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.note = state["note"]

    note = "none"


class Copied(nn.Linear):
    """A module whose `state_dict` gives copies, so that to write to them would change nothing."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for key in destination:
            destination[key] = destination[key].clone()


@pytest.mark.parametrize("kind", [Extra, Copied])
def test_modules_with_own_state_come_back(kind: type[nn.Linear]) -> None:
    source, target = kind(3, 2), kind(3, 2)
    source.note = "kept"
    through(State(model=source), State(model=target))
    assert bits(target.weight) == bits(source.weight)
    assert kind is not Extra or target.note == "kept"


def test_optimizer_state_goes_by_name() -> None:
    net, optimizer, _ = trained(0)
    other = copy.deepcopy(net)
    groups = [{"params": [*other[0].parameters()][::-1]}, {"params": [*other[3].parameters(), *other[1].parameters()]}]
    target = torch.optim.AdamW(groups)
    through(State(model=net, optimizer=optimizer), State(model=other, optimizer=target))
    for (name, one), two in zip(net.named_parameters(), other.parameters(), strict=True):
        assert bits(target.state[two]["exp_avg"]) == bits(optimizer.state[one]["exp_avg"]), name


def test_wide_optimizer_state_is_not_cast() -> None:
    def half() -> tuple[nn.Linear, torch.optim.Optimizer]:
        net = nn.Linear(3, 3).to(torch.bfloat16)
        return net, torch.optim.SGD(net.parameters(), lr=0.1)

    net, optimizer = half()
    optimizer.state[net.weight]["momentum_buffer"] = torch.randn(3, 3)
    other, target = half()
    through(State(model=net, optimizer=optimizer), State(model=other, optimizer=target))
    back = target.state[other.weight]["momentum_buffer"]
    assert (back.dtype, bits(back)) == (torch.float32, bits(optimizer.state[net.weight]["momentum_buffer"]))


def test_random_numbers_go_on() -> None:
    def draw() -> list[float]:
        return [random.random(), float(np.random.rand()), float(torch.rand(()))]

    random.gauss(0, 1)
    source = State()
    captured = source.capture()
    data = pack(captured)
    wanted = draw()
    restore(State(rng=False), captured, data)
    assert draw() != wanted
    restore(State(), captured, data)
    assert draw() == wanted


def test_unfit_model_is_refused_by_name() -> None:
    with pytest.raises(SettingsError, match="net: the saved state does not fit"):
        through(State(net=nn.Linear(2, 2)), State(net=nn.Linear(2, 3)))
    with pytest.raises(SettingsError, match="saved as module"):
        through(State(net=nn.Linear(2, 2)), State(net=1))
    net = nn.Linear(2, 2)
    momentum, adam = torch.optim.SGD(net.parameters(), momentum=0.9), torch.optim.Adam(net.parameters())
    net(torch.ones(2)).sum().backward()
    momentum.step()
    with pytest.raises(SettingsError, match="optimizer: Adam does not accept the saved state"):
        through(State(optimizer=momentum), State(optimizer=adam))
    with pytest.raises(SettingsError, match=r"net\.weight is on the meta device.*to_empty"):
        through(State(net=nn.Linear(2, 2)), State(net=nn.Linear(2, 2, device="meta")))


def masked(mask: torch.Tensor) -> nn.Module:
    net = nn.Module()
    net.register_buffer("mask", mask)
    return net


def test_tensors_that_copy_cannot_fill() -> None:
    """An expanded one, which the script replaced before the first save, and one that was made in `inference_mode`."""
    with torch.inference_mode():
        made = [torch.ones(3), torch.ones(3)]
    for one, other in (made, [torch.ones(1).expand(3), torch.ones(1).expand(3)]):
        net, saved = masked(one), torch.arange(3.0)
        through(State(net=masked(saved), mean=saved), State(net=net, mean=other))
        assert torch.equal(net.mask, saved)
        assert torch.equal(other, saved), "the script may have another name for the field"


class Odd(torch.Tensor):
    """A tensor of a kind that only its maker knows."""


class Greedy:
    """An object whose `load_state_dict` wants more than the state."""

    def state_dict(self) -> dict[str, Any]:
        return {"scale": 1.0}

    def load_state_dict(self, state: dict[str, Any], strict: bool) -> None:
        raise AssertionError(f"called with {state}, {strict}")


def test_what_would_not_come_back_is_refused() -> None:
    """At the first save, since a restart that fails helps nobody."""
    odd, lazy, ones = torch.ones(2).as_subclass(Odd), nn.LazyLinear(2), [torch.ones(1), torch.ones(2)]
    wide = torch.ones(1).expand(2)
    for value, words in {
        "hook": ({"f": lambda: 0}, r"value\.f is a builtins\.function"),
        "sparse": (torch.eye(2).to_sparse(), "sparse"),
        "names": ({"b.c": torch.ones(1), "b": {"c": torch.ones(1)}}, "both named"),
        "odd": ([odd], r"value\.0 is a .*\.Odd, which would be restored as a plain tensor"),
        "set": ({"a": {torch.ones(1)}}, r"value\.a has a tensor in a set or as a key"),
        "key": ({torch.ones(1): 1}, r"value has a tensor in a set or as a key"),
        "lazy": (lazy, r"value\.weight has no shape yet"),
        "meta": ({"w": torch.ones(2, device="meta")}, r"value\.w is a .* tensor on meta"),
        "nested": ([torch.nested.nested_tensor(ones, layout=torch.jagged)], r"value\.0 is a nested tensor"),
        "expanded": (wide, r"value is an expanded tensor.*clone"),
        "buffer": (masked(wide), r"value\.mask is an expanded tensor"),
        "frozen": ([nn.Parameter(wide, requires_grad=False)], r"value\.0 is an expanded tensor"),
        "greedy": (Greedy(), r"value: its load_state_dict\(\) must take one argument, the saved state"),
    }.values():
        with pytest.raises(SettingsError, match=words):
            State(rng=False, value=value).capture()
    for names in ({"per_rank": "stream"}, {"local": ["strem"]}):
        with pytest.raises(SettingsError, match=f"names {'a, e, m, r, s, t' if 'per_rank' in names else 'strem'}, but"):
            State(rng=False, stream=3, **names).capture()


def test_listed_parameters_stay_the_same() -> None:
    def job() -> State:
        weights = [nn.Parameter(torch.rand(2)), torch.rand(2, requires_grad=True), torch.zeros(2, dtype=torch.bfloat16)]
        fixed = nn.Parameter(torch.arange(3), requires_grad=False)
        return State(rng=False, weights=weights, fixed={"n": fixed, 0: None, "s": "x", "np": np.float32(3)})

    source, target, bare = job(), job(), State(rng=False)
    optimizer = torch.optim.SGD(target.weights[:2], lr=0.5)
    through(source, target)
    through(source, bare)
    for restored in (target, bare):
        assert [bits(one) for one in restored.weights] == [bits(one) for one in source.weights]
        assert [type(one) for one in restored.weights] == [nn.Parameter, torch.Tensor, torch.Tensor]
        assert [one.requires_grad for one in restored.weights] == [True, True, False]
        assert type(restored.fixed["n"]) is nn.Parameter
        assert restored.fixed == {**source.fixed, "n": restored.fixed["n"]}
    sum(one.sum() for one in target.weights[:2]).backward()
    optimizer.step()
    assert torch.equal(target.weights[0], source.weights[0] - 0.5)
    assert torch.equal(target.weights[1], source.weights[1] - 0.5)


@pytest.mark.parametrize("name", ["capture", "adjust", "rng", "_fields"])
def test_field_may_not_hide_a_method(name: str) -> None:
    with pytest.raises(SettingsError, match=name):
        setattr(State(), name, 1)


def test_incomplete_state_is_never_loaded() -> None:
    captured = State(rng=False, a=[torch.ones(3)], b=[torch.ones(2)]).capture()
    meta = parse_meta(captured.meta)
    loading = State(rng=False).begin_load(meta)
    loading.fill_tensors(meta.entries[:1], pack(captured))
    with pytest.raises(ProtocolError, match=r"incomplete.*b\.0"):
        loading.finish()


def test_missing_and_new_fields_are_said(caplog: pytest.LogCaptureFixture) -> None:
    target = State(rng=False, added=5)
    through(State(rng=False, net=nn.Linear(1, 1), epoch=2), target)
    assert (target.added, target.epoch) == (5, 2)
    assert "added" in caplog.text
    assert "net" in caplog.text


def test_adjust_functions_keep_order() -> None:
    state, seen = State(), []
    for name in ("first", "second"):
        state.register_adjust_function(lambda change, name=name: seen.append((name, change)))
    state.adjust(change := WorldChange(4, 2, 17))
    assert seen == [("first", change), ("second", change)]


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


def recoded(value: Any) -> Any:
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
    assert exact(recoded(value)) == exact(value)


@pytest.mark.parametrize("dtype", _DTYPES)
def test_numpy_values_come_back(dtype: str) -> None:
    array = np.array([[0, 1, 1], [1, 0, 1]]).astype(dtype)
    for value in (array, array.T, array[:, :0], array[0, 0], np.array(array[0, 0])):
        back = recoded(value)
        assert (type(back), back.dtype, back.shape) == (type(value), value.dtype, value.shape)
        assert back.tobytes() == value.tobytes()


def test_other_known_types_come_back() -> None:
    value = [torch.Size([2, 3]), torch.bfloat16, torch.device("cuda", 1), {1, "a", None}, frozenset({(1, 2)})]
    value += [collections.Counter("abracadabra")]
    assert [type(one) for one in recoded(value)] == [type(one) for one in value]
    assert recoded(value) == value
    assert torch.equal(recoded({"t": torch.arange(3)})["t"], torch.arange(3))


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
