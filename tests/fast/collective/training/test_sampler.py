"""The sampler: an epoch has every sample once, in the same global batches, whichever ranks come and go."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edl.collective.training.sampler import ElasticSampler
from edl.collective.training.split import micro_batch_sizes, rank_share
from edl.errors import ProtocolError, SettingsError


@given(samples=st.integers(2, 500), world=st.integers(1, 40), most=st.none() | st.integers(3, 60))
def test_nobody_has_one_sample_alone(samples: int, world: int, most: int | None) -> None:
    shares = [rank_share(samples, world, rank, least=2) for rank in range(world)]
    assert [place for one in shares for place in one] == list(range(samples))
    sizes = [len(one) for one in shares if one]
    assert min(sizes) >= 2
    assert max(sizes) - min(sizes) <= 1
    for size in sizes:
        for parts in (1, 2, 5):
            micro = micro_batch_sizes(size, most, parts, least=2)
            assert sum(micro) == size
            assert 1 not in micro
            assert len(micro) >= (parts if parts > 1 else 1)


@pytest.mark.parametrize(("world", "rank"), [(0, 0), (2, 2), (2, -1)])
def test_rank_outside_the_world_is_refused(world: int, rank: int) -> None:
    with pytest.raises(SettingsError, match=f"rank={rank} of world={world}"):
        rank_share(10, world, rank)


LENGTHS = st.integers(1, 120)
BATCHES = st.integers(1, 50)
TAILS = st.sampled_from(["keep", "pad", "drop"])
EVENTS = st.one_of(
    st.tuples(st.just("train"), st.integers(1, 4)),
    st.tuples(st.just("save"), st.just(0)),
    st.tuples(st.just("world"), st.integers(1, 6)),  # all go on from the state of now
    st.tuples(st.just("kill"), st.integers(1, 6)),  # all go on from the last save
    st.tuples(st.just("ahead"), st.integers(1, 5)),  # one rank reads ahead
    st.tuples(st.just("resize"), BATCHES),
)


class World:
    """Ranks with a sampler each, and a record of what was trained."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.arguments = arguments
        self.trained: list[list[int]] = []  # indices of each global batch
        self.start(1, None)
        self.save()

    def start(self, world: int, state: str | None) -> None:
        self.ranks = [ElasticSampler(**self.arguments, rank=rank, world=world) for rank in range(world)]
        for one in self.ranks:
            if state is not None:
                one.load_state_dict(json.loads(state))
        self.batches: list[Iterator[list[int]]] = [iter(one) for one in self.ranks]
        self.read: list[list[list[int]]] = [[] for _ in self.ranks]

    def state(self) -> str:
        (state,) = {json.dumps(one.state_dict()) for one in self.ranks}
        return state

    def save(self) -> None:
        self.saved = (self.state(), len(self.trained))

    def train(self) -> bool:
        """One step of every rank; False at the end of the epoch."""
        (left,) = {len(one) for one in self.ranks}
        if not left:
            assert all(one.finished for one in self.ranks)
            return False
        batch = []
        for rank, one in enumerate(self.ranks):
            rows = self.read[rank].pop(0) if self.read[rank] else next(self.batches[rank])
            assert len(rows) == max(one.share_rows, 1)
            batch += rows[: one.share_rows]
        (wanted,) = {one.batch_samples for one in self.ranks}
        assert len(batch) == wanted
        self.trained.append(batch)
        for one in self.ranks:
            one.advance()
        return True

    def do(self, event: str, number: int) -> None:
        if event == "train":
            all(self.train() for _ in range(number))
        elif event == "save":
            self.save()
        elif event == "world":
            self.start(number, self.state())
        elif event == "kill":
            state, steps = self.saved
            del self.trained[steps:]  # the model is rolled back as well
            self.start(number, state)
        elif event == "ahead":
            rank = number % len(self.ranks)
            for _ in range(number):
                self.read[rank] += [rows for rows in [next(self.batches[rank], None)] if rows is not None]
        elif event == "resize" and (self.arguments["tail"] != "drop" or number <= self.arguments["length"]):
            ats = []
            for one in self.ranks:
                with one.hold() as handed:
                    ats.append(handed)
            for one in self.ranks:
                one.resize(number, max(ats))


@given(length=LENGTHS, batch=BATCHES, tail=TAILS, seed=st.integers(0, 3), events=st.lists(EVENTS, max_size=20))
def test_every_sample_comes_exactly_once(
    length: int, batch: int, tail: str, seed: int, events: list[tuple[str, int]]
) -> None:
    if tail == "drop":
        batch = min(batch, length)
    world = World({"length": length, "global_batch": batch, "tail": tail, "seed": seed})
    for event, number in events:
        world.do(event, number)
    while world.train():
        pass
    seen = Counter(index for one in world.trained for index in one)
    if tail == "keep":
        assert seen == Counter(range(length))
    elif tail == "drop":
        assert set(seen.values()) <= {1}
        assert length - len(seen) < world.ranks[0].global_batch
    else:
        assert set(seen) == set(range(length))
        assert sum(seen.values()) - length < len(world.trained[-1])


@given(length=LENGTHS, batch=BATCHES, worlds=st.lists(st.integers(1, 6), min_size=1, max_size=8))
def test_global_batches_are_one_processes(length: int, batch: int, worlds: list[int]) -> None:
    alone, changing = (World({"length": length, "global_batch": batch, "tail": "keep"}) for _ in range(2))
    while alone.train():
        changing.do("world", worlds[len(alone.trained) % len(worlds)])
        assert changing.train()
    assert changing.trained == alone.trained


def test_order_depends_on_seed_and_epoch() -> None:
    def order(seed: int, epoch: int, **more: Any) -> list[int]:
        sampler = ElasticSampler(50, global_batch=50, seed=seed, rank=0, world=1, **more)
        sampler.set_epoch(epoch)
        (rows,) = sampler
        return rows

    assert order(0, 1) == order(0, 1)
    assert len({tuple(order(seed, epoch)) for seed in range(3) for epoch in range(3)}) == 9
    assert order(0, 1, shuffle=False) == list(range(50))


def test_finished_epoch_resumes_as_empty() -> None:
    first = ElasticSampler(10, global_batch=4, rank=0, world=1)
    for _ in first:
        first.advance()
    second = ElasticSampler(10, global_batch=4, rank=0, world=1)
    second.load_state_dict(first.state_dict())
    assert list(second) == []
    with pytest.raises(SettingsError, match=r"set_epoch\(1\)"):
        iter(first)
    with pytest.raises(SettingsError, match=r"set_epoch\(1\)"):
        first.advance()


def test_nobody_reads_ahead_while_it_is_held() -> None:
    sampler = ElasticSampler(100, global_batch=10, rank=0, world=1)
    batches = iter(sampler)
    next(batches)
    read: list[int] = []
    with sampler.hold() as handed:
        reader = threading.Thread(target=lambda: read.append(len(next(batches))))
        reader.start()
        sampler.resize(25, handed)
        assert not read
    reader.join(30)
    assert read == [25]


def test_handed_out_batch_is_not_changed() -> None:
    sampler = ElasticSampler(100, global_batch=10, rank=0, world=1)
    batches = iter(sampler)
    next(batches), next(batches)
    with pytest.raises(SettingsError, match="20 were handed out"):
        sampler.resize(5, at=10)


def test_users_new_batch_wins() -> None:
    first = ElasticSampler(100, global_batch=10, rank=0, world=1)
    first.advance()
    first.resize(20, at=10)
    same, other = (ElasticSampler(100, global_batch=size, rank=0, world=1) for size in (10, 30))
    for one in (same, other):
        one.load_state_dict(first.state_dict())
    assert (same.global_batch, other.global_batch) == (20, 30)
    assert [len(rows) for rows in other] == [30, 30, 30]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"length": 11}, SettingsError, "repeated or left out"),
        ({"seed": 4}, SettingsError, "repeated or left out"),
        ({"order_crc": 1}, ProtocolError, "order of epoch 0"),
        ({"version": 9}, ProtocolError, "version 9"),
    ],
)
def test_unfit_state_is_refused(change: dict[str, int], error: type[Exception], message: str) -> None:
    sampler = ElasticSampler(10, global_batch=4, rank=0, world=1)
    with pytest.raises(error, match=message):
        sampler.load_state_dict(sampler.state_dict() | change)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"length": 0}, "length=0"),
        ({"global_batch": 0}, "global_batch=0"),
        ({"seed": -1}, "seed=-1"),
        ({"tail": "fold"}, "tail='fold'"),
        ({"tail": "drop", "global_batch": 11}, "leaves no batch"),
        ({"rank": 1}, "rank and world"),
    ],
)
def test_unworkable_settings_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        ElasticSampler(**{"length": 10, "global_batch": 4, **arguments})
