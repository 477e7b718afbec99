"""A `StatefulDataLoader` as a field of a `State`: its place comes back exactly, or is refused."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

stateful = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")

from torch.utils.data import BatchSampler, IterableDataset, RandomSampler, get_worker_info  # noqa: E402
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler  # noqa: E402

from edl.collective import ElasticSampler, State  # noqa: E402
from edl.collective.checkpoint.encoding import parse_meta  # noqa: E402
from edl.errors import SettingsError  # noqa: E402
from tests.fast.collective.checkpoint.test_state import pack, restore  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata 0.11 uses it
EPOCHS = 3


class Plain(IterableDataset):
    """Numbers, of which the first worker process has fewer; torchdata only counts the batches."""

    def __init__(self, batched: bool = False) -> None:
        self.position, self.batched = 0, batched

    def rest(self, start: int) -> Iterator[Any]:
        worker = get_worker_info()
        assert worker is None or isinstance(worker.dataset, Plain), "the script's dataset is hidden"
        for self.position in range(start + 1, (4 + 2 * worker.id if worker else 6)):
            row = self.position - 1 + (100 * worker.id if worker else 0)
            yield [row, row] if self.batched else row

    def __iter__(self) -> Iterator[Any]:
        yield from self.rest(0)


class Again(Plain):
    """Begins again at its end, which is its state."""

    def __iter__(self) -> Iterator[Any]:
        yield from self.rest(self.position)
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class Counting(Again):
    """Another order in each epoch, which it counts or is told; its state is a list that it goes on changing."""

    def __init__(self, batched: bool = False) -> None:
        super().__init__(batched)
        self.log = [0, 0]

    def set_epoch(self, epoch: int) -> None:
        self.log[0] = epoch

    def __iter__(self) -> Iterator[Any]:
        for row in super().__iter__():
            self.log[1] = self.position
            yield row + 10 * self.log[0]
        self.log[:] = [self.log[0] + 1, 0]

    def state_dict(self) -> dict[str, Any]:
        return {"log": self.log}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.log = state["log"]
        self.position = self.log[1]


class Once(Again):
    """Takes a restored place when it is first read, as torchdata's own examples do."""

    start = 0

    def __iter__(self) -> Iterator[Any]:
        start, self.start = self.start, 0
        yield from self.rest(start)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = state["position"]


class Kept(Plain):
    """Like a dataset of Hugging Face: every epoch of the same number begins at the restored place."""

    def __init__(self, batched: bool = False) -> None:
        super().__init__(batched)
        self.shared, self.kept = torch.tensor(0).share_memory_(), {}

    epoch = property(lambda self: int(self.shared))

    def set_epoch(self, epoch: int) -> None:
        self.shared.fill_(epoch)

    def __iter__(self) -> Iterator[Any]:
        yield from self.rest(self.kept["position"] if self.kept.get("epoch") == self.epoch else 0)

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.kept = state


class Own(Again):
    """Is its own iterator."""

    def __iter__(self) -> Iterator[Any]:
        self.position = 0
        return self

    def __next__(self) -> Any:
        return next(self.rest(self.position))


class Apart(Plain):
    """Its iterators have the state, each its own."""

    def __iter__(self) -> Iterator[Any]:
        return iter(Own(self.batched))


STREAMS = {
    "again": Again, "counting": Counting, "numbered": Counting, "once": Once, "kept": Kept, "epochs": Kept,
    "apart": Apart, "own": Own,
}  # fmt: skip


def loader_of(kind: str, **options: Any) -> Any:
    torch.manual_seed(5)
    options = {"batch_size": 2} | options
    if kind in STREAMS:
        return stateful.StatefulDataLoader(STREAMS[kind](options["batch_size"] is None), **options)
    options |= {
        "seeded": {"shuffle": True, "generator": torch.Generator().manual_seed(5)},
        "shuffled": {"shuffle": True},
        "distributed": {"sampler": StatefulDistributedSampler(range(5), 1, 0)},
        "sampler": {"sampler": Again()},
        "counter": {"sampler": Counting()},
        "batches": {"batch_size": 1, "batch_sampler": Once(batched=True)},
    }[kind]
    return stateful.StatefulDataLoader(range(5 if "shuffle" in options else 50), **options)


def read(kind: str, options: dict[str, Any], saved: Any = None, steps: int = 99, *, saving: bool = True) -> Any:
    """Batches that are read from a saved state on, up to so many, and the states after each, and between epochs."""
    state = State(loader=loader_of(kind, **options), epoch=0)
    if saved is not None:
        restore(state, *saved)
    batches: list[Any] = []
    states: list[Any] = []

    def save() -> None:
        if saving:
            captured = state.capture()
            states.append((len(batches), (captured, pack(captured))))

    try:
        while state.epoch < EPOCHS and len(batches) < steps:
            if kind in ("epochs", "numbered", "distributed"):
                (state.loader.sampler if kind == "distributed" else state.loader.dataset).set_epoch(3 * state.epoch)
            for batch in state.loader:
                batches.append([torch.as_tensor(batch).tolist(), torch.rand(1).item()])  # dropout, for instance
                save()
                if len(batches) == steps:
                    return batches, states
            state.epoch += 1
            save()
        return batches, states
    finally:
        if state.loader.num_workers and state.loader._iterator is not None:
            state.loader._iterator._shutdown_workers()  # which takes torch 5 s when they are collected


WORKERS = {"num_workers": 2}
STAYING = {"num_workers": 2, "persistent_workers": True}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *((kind, options) for kind in STREAMS for options in ({}, {"batch_size": 1}, {"drop_last": True})),
        *((kind, {"batch_size": None}) for kind in ("again", "once", "kept", "apart", "own")),
        *((kind, {}) for kind in ("seeded", "shuffled", "distributed", "sampler", "counter", "batches")),
        *((kind, STAYING) for kind in STREAMS),
        ("once", STAYING | {"drop_last": True, "snapshot_every_n_steps": 2}),
        ("again", STAYING | {"batch_size": None}),
        *((kind, STAYING) for kind in ("seeded", "distributed", "counter")),
        *((kind, WORKERS | {"snapshot_every_n_steps": 2}) for kind in ("once", "kept", "shuffled")),
    ],
)
def test_loader_goes_on_at_its_step(monkeypatch: pytest.MonkeyPatch, kind: str, options: dict[str, Any]) -> None:
    """Restarted after each batch and between two epochs, and once more after another batch."""
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(IterableDataset=Kept))
    whole, states = read(kind, options)
    assert len(states) == len(whole) + EPOCHS >= 9
    twice = states
    if "num_workers" in options:  # starting these takes long: the end of the first epoch tells
        end = len(states) // EPOCHS - 1
        states, twice = states[end - 1 : end + 1], states[end - 2 : end + 1 : 2]
    for number, saved in states:
        assert read(kind, options, saved, saving=False)[0] == whole[number:], number
    for number, saved in twice:
        one, after = read(kind, options, saved, 1)
        last = after[-1][1] if after else saved
        assert one + read(kind, options, last, saving=False)[0] == whole[number:], number


def test_loader_not_begun_is_left_alone() -> None:
    loader = loader_of("seeded", num_workers=2)
    drawn = torch.get_rng_state()
    captured = State(loader=loader, rng=False).capture()
    assert loader._iterator is None, "a save started the worker processes of a loader that nobody reads"
    assert torch.equal(torch.get_rng_state(), drawn), "a save drew random numbers"
    assert captured.holders == {0}, "without its replica the place would be lost with its host"


@pytest.mark.parametrize("field", ["loader", "place"])
def test_place_is_refused_in_another_world(field: str) -> None:
    value, named = (loader_of("seeded"), []) if field == "loader" else ({"shard": 3}, [field])
    state = State(**{field: value}, per_rank=named)
    meta = parse_meta(state.capture().meta)
    assert meta.per_rank == {field}
    assert meta.sharded
    with pytest.raises(SettingsError, match=f"field {field} .* as many workers as before"):
        state.begin_load(meta, local=False)
    State(other=1).begin_load(meta, local=False)  # who does not want the place may go on without


@pytest.mark.parametrize("options", [{}, STAYING])
def test_place_for_all_epochs_is_refused(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    _, states = read("kept", options)
    for _, saved in states[1:8:3] if options else states[1:8]:
        with pytest.raises(SettingsError, match="after a restart, Kept begins every epoch where"):
            read("kept", options, saved)
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(IterableDataset=Kept))
    with pytest.raises(SettingsError, match=r"set_epoch\(3\) after restore"):  # the loop does not call it
        read("kept", options, read("epochs", options)[1][len(states) // EPOCHS][1])  # after a batch of the second epoch


def test_loader_that_cannot_say_is_refused() -> None:
    loader = stateful.StatefulDataLoader
    for words, made in {
        "give the State the sampler": loader(range(12), batch_sampler=ElasticSampler(12, global_batch=4)),
        "in_order=True": loader_of("seeded", num_workers=1, in_order=False),
        "shuffles differently after a restart": loader(range(9), sampler=RandomSampler(range(9))),
        "inside another batch_sampler": loader(range(9), batch_sampler=BatchSampler(Again(), 2, False)),
    }.items():
        with pytest.raises(SettingsError, match=words):
            State(loader=made).capture()
    for workers in (0, 1):
        state = State(loader=loader(Plain(), num_workers=workers))
        next(iter(state.loader))
        with pytest.raises(SettingsError, match="of Plain, which has no state_dict"):
            state.capture()
    begun = loader_of("again")
    next(iter(begun))
    with pytest.raises(SettingsError, match="give it to the State first"):
        State(loader=begun).capture()
    with pytest.raises(SettingsError, match="choose one"):
        State(loader=1, local=["loader"], per_rank=["loader"])
