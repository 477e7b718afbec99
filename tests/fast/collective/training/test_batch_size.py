"""The automatic batch on made-up clusters, learning rates when it changes; and the sampler, whoever comes and goes."""

from __future__ import annotations

import json
import logging
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from edl.collective.training.gradients import GradientGroups, GradientNoise, divisor_of, is_adaptive
from edl.collective.training.learning_rate import AdaScale, Linear, Policy, RateScaling, SquareRoot
from edl.collective.training.sampler import ElasticSampler, micro_batch_sizes, rank_share
from edl.collective.training.trainer import ElasticTrainer
from edl.collective.training.tuner import (
    AutoBatch,
    BatchSizeTuner,
    StepShape,
    choose_batch_size,
    fit_step_time,
    micro_batch_shape,
    statistical_efficiency,
)
from edl.errors import ProtocolError, SettingsError


@pytest.mark.parametrize(
    "groups", [GradientGroups(1, 8, 3.0, 1.0), GradientGroups(2, 8, math.inf, 1.0), GradientGroups(2, 8, 1.0, math.nan)]
)
def test_what_says_nothing_is_left_out(groups: GradientGroups) -> None:
    noise = GradientNoise()
    noise.add_step(groups)
    assert not noise.known


SETTINGS = [(1, 32, 1), (1, 64, 2), (2, 32, 1), (2, 64, 1), (3, 48, 1), (3, 16, 2), (4, 64, 1), (4, 128, 3)]


def real_s(world: int, rows: int, parts: int, row_wait_s: float = 0.0) -> float:
    """Seconds of a step that sends half of its gradients while it computes, and of a loader that reads ahead."""
    compute_s = 0.020 + 0.0005 * rows
    send_s = 0.030 + 0.004 * (world - 2) if world > 1 else 0.0
    return max((parts - 1) * compute_s + math.hypot(compute_s, send_s), row_wait_s * rows * parts)


def measured(settings: list[StepShape] = SETTINGS, row_wait_s: float = 0.0) -> dict[StepShape, float]:
    return {setting: real_s(*setting, row_wait_s) for setting in settings}


@pytest.mark.parametrize(
    ("seconds", "costs"),
    [
        ({(1, 32, 1): 0.32}, [0, 0.01, 0, 0]),
        ({(2, 32, 1): 0.32, (2, 64, 1): 0.64}, [0, 0.01, 0, 0]),
        ({(1, 10, 2): 0.4, (1, 20, 2): 0.6, (2, 10, 1): 0.5, (3, 10, 1): 0.6}, [0.1, 0.01, 0.3, 0.1]),
        ({(1, 10, 1): 0.2, (1, 20, 1): 0.5}, [0, 90 / 4100, 0, 0]),  # a fixed cost would be below 0
    ],
)
def test_measured_times_are_explained(seconds: dict[StepShape, float], costs: list[float]) -> None:
    assert fit_step_time(seconds) == pytest.approx(costs, abs=1e-6)


def test_efficiency_is_that_of_pollux() -> None:
    assert statistical_efficiency(1000.0, 100, 100) == 1.0
    assert statistical_efficiency(1000.0, 1000, 100) == pytest.approx(0.55)
    assert statistical_efficiency(math.inf, 10**6, 1) == 1.0
    noise = GradientNoise(variance=500.0, square=0.5, steps=1.0)  # goodput is gain over scale, in AdaScale's words
    assert statistical_efficiency(noise.scale, 800, 100) == pytest.approx(noise.gain(800, 100) / 8)


@pytest.mark.parametrize("row_wait_s", [0.0, 0.0004, 0.001])
@pytest.mark.parametrize(("phi", "world", "most", "upper"), [(1e5, 4, 16, 2048), (300.0, 2, None, 500)])
def test_choices_end_near_the_best_batch(
    phi: float, world: int, most: int | None, upper: int, row_wait_s: float
) -> None:
    def goodput(batch: int) -> float:
        step_s = real_s(world, *micro_batch_shape(batch, world, most), row_wait_s)
        return batch / step_s * statistical_efficiency(phi, batch, 64)

    bounds = AutoBatch(least=32, most=upper, margin=0.02)
    batch, seen, settled = 64, measured(row_wait_s=row_wait_s), 0
    for _ in range(12):
        seen |= measured([(world, *micro_batch_shape(batch, world, most))], row_wait_s)
        chosen, _ = choose_batch_size(bounds, seen, phi, batch=batch, base_batch=64, world=world, max_micro_batch=most)
        assert chosen <= 2 * batch
        settled = settled + 1 if chosen == batch else 0
        batch = chosen
    assert settled >= 2
    assert goodput(batch) >= 0.9 * max(map(goodput, range(32, upper + 1, 7)))


@pytest.mark.parametrize(
    ("batch", "phi", "seen", "wanted", "reason"),
    [
        (16, 100.0, SETTINGS, 32, "bounds are 32 to 1024"),
        (4096, 100.0, SETTINGS, 1024, "bounds are 32 to 1024"),
        (64, None, SETTINGS, 64, "no gradient noise"),
        (64, 100.0, [], 64, "no step times"),
        (64, 33.0, [(2, 32, 1)], 128, "to measure a second size; 60% as efficient"),
        (64, 31.0, [(2, 32, 1)], 64, "would train 60% as well"),
        (1024, 1e6, SETTINGS, 1024, "nothing is better"),
        (64, 1e6, SETTINGS, 128, "x samples/s x 1.00 efficiency"),
    ],
)
def test_each_decision_says_why(
    batch: int, phi: float | None, seen: list[tuple[int, int, int]], wanted: int, reason: str
) -> None:
    chosen, why = choose_batch_size(
        AutoBatch(32, 1024), measured(seen), phi, batch=batch, base_batch=64, world=4, max_micro_batch=512
    )
    assert chosen == wanted
    assert reason in why
    assert why.startswith(f"batch {batch} ")


CPU = torch.device("cpu")


def test_tuner_remembers_and_logs(caplog: pytest.LogCaptureFixture) -> None:
    bounds, noise = AutoBatch(32, 1024, every_steps=3), GradientNoise(variance=5e5, square=1.0, steps=9.0)
    first, second = BatchSizeTuner(bounds, 64), BatchSizeTuner(bounds, 64)
    decided = []
    with caplog.at_level("INFO", "edl.collective"):
        for batch, tuner in ((64, first), (128, second)):
            decided += [tuner.record_step(1, batch, None, noise, s, None, CPU) for s in (9.0, 0.060, 0.061)]
            second.load_state_dict(first.state_dict())
    assert decided == [64, 64, 128, 128, 128, 256]
    assert [record.message.split(":")[0] for record in caplog.records] == ["batch 64 -> 128", "batch 128 -> 256"]
    assert first.state_dict()["measured"] == [[1, 32, 2, 0.061]]


def test_foreign_times_are_left_out() -> None:
    tuner = BatchSizeTuner(AutoBatch(32, 1024, every_steps=4), 64)
    for batch, seconds in ((32, 9.0), (64, 1.0), (64, None), (64, 2.0)):
        tuner.record_step(1, batch, 16, GradientNoise(), seconds, None, CPU)
    assert tuner.state_dict() == {"steps": 4, "measured": [[1, 16, 4, 1.5]]}


def trained(optimizer: Any, policy: Policy, base_batch: int = 8) -> tuple[Tensor, torch.optim.Optimizer]:
    """A weight after five steps of 32 samples, and the optimizer."""
    torch.manual_seed(3)
    model = nn.Linear(4, 1).double()
    made = optimizer(model.parameters())
    trainer = ElasticTrainer(model, made, global_batch=32, base_batch=base_batch, policy=policy)
    for step in range(5):
        inputs = torch.randn(32, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        for some in trainer.micro_batches(inputs):
            trainer.backward((model(some) - 1).square().mean())
        trainer.step()
    return model.weight.detach(), made


def adam(rate: float, beta1: float, beta2: float, eps: float, kind: Any = torch.optim.Adam) -> Any:
    return lambda parameters: kind(parameters, lr=rate, betas=(beta1, beta2), eps=eps)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_adam_is_scaled_as_by_malladi(kind: Any) -> None:
    """1 - S(1 - beta) for both decays, epsilon / sqrt(S), the rate times sqrt(S)."""
    found, optimizer = trained(adam(0.01, 0.9, 0.99, 1e-3, kind), SquareRoot())
    wanted, _ = trained(adam(0.02, 1 - 4 * 0.1, 1 - 4 * 0.01, 1e-3 / 2, kind), None)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-14)
    group = optimizer.param_groups[0]
    assert (group["lr"], group["betas"], group["eps"]) == (0.01, (0.9, 0.99), 1e-3), "as the user gave them"
    plain, _ = trained(adam(0.02, 0.9, 0.99, 1e-3, kind), None)
    assert not torch.allclose(found, plain, rtol=1e-4)


@pytest.mark.parametrize("moments", [None, False, True])
def test_other_optimizers_change_rate_only(moments: bool | None) -> None:
    kind = torch.optim.NAdam if moments is None else torch.optim.Adam
    found, _ = trained(adam(0.01, 0.9, 0.99, 1e-3, kind), SquareRoot(moments=moments))
    plain, _ = trained(adam(0.02, 0.9, 0.99, 1e-3, kind), None)
    assert torch.allclose(found, plain, rtol=1e-12) is not bool(moments)


def test_too_large_batch_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "edl.collective"):
        found, _ = trained(adam(0.01, 0.9, 0.99, 1e-3), SquareRoot(), base_batch=2)
    assert torch.isfinite(found).all()
    assert caplog.text.count("too large for the square root rule") == 1


UNKNOWN = GradientNoise()
HALF = GradientNoise(variance=64.0, square=1.0, steps=10.0)  # at a batch of 64, as much noise as signal


@pytest.mark.parametrize(
    ("policy", "factor"),
    [
        (None, 1.0),
        (Linear(0), 4.0),
        (SquareRoot(), 2.0),
        (SquareRoot(1000), 1.0),  # until it is warm
        (AdaScale(), 1.6),
        (lambda scale: scale**0.75, 4**0.75),
    ],
)
def test_a_batch_four_times_the_base(policy: Policy, factor: float) -> None:
    scaling = RateScaling(policy, base_batch=64, batch=64)
    scaling.set_batch(256, HALF)
    assert scaling.factor(HALF) == pytest.approx(factor)


def test_warm_up_only_for_larger_rates() -> None:
    scaling = RateScaling(Linear(warmup_samples=1000), base_batch=100, batch=400)
    factors = []
    for _ in range(4):
        factors.append(scaling.factor(UNKNOWN))
        scaling.count_step(400, UNKNOWN)
    assert factors == pytest.approx([1.0, 2.2, 3.4, 4.0])
    scaling.set_batch(200, UNKNOWN)
    assert scaling.factor(UNKNOWN) == 2.0
    scaling.set_batch(600, UNKNOWN)
    assert scaling.factor(UNKNOWN) == 2.0
    scaling.count_step(500, UNKNOWN)
    assert scaling.factor(UNKNOWN) == pytest.approx(4.0)


def test_adascale_progress_is_invariant() -> None:
    scaling = RateScaling(AdaScale(), base_batch=64, batch=256)
    scaling.count_step(256, HALF)
    assert scaling.progress == pytest.approx(1.6 * 64)
    scaling.count_step(128, HALF)  # the last batch of an epoch counts in proportion
    assert scaling.progress == pytest.approx(2.4 * 64)
    assert scaling.samples == 384


@pytest.mark.parametrize(("batch", "factor"), [(256, 1.0), (32, 0.5)])
def test_adascale_is_careful_without_noise(batch: int, factor: float) -> None:
    assert RateScaling(AdaScale(), base_batch=64, batch=batch).factor(UNKNOWN) == factor


@pytest.mark.parametrize(
    ("make", "message"),
    [
        *(
            (lambda values=values: AutoBatch(*values), "must be")
            for values in ((0, 5), (6, 5), (1, 5, 0), (1, 5, 1, -1))
        ),
        *((lambda rule=rule: rule(-1), "warmup_samples=-1") for rule in (Linear, SquareRoot)),
        (lambda: RateScaling(None, base_batch=0, batch=1), "base_batch=0"),
        *((lambda value=value: factor_of(value), "scale of 2") for value in (0.0, -1.0, math.nan, math.inf)),
        (lambda: sampler_of(length=0), "length=0"),
        (lambda: sampler_of(global_batch=0), "global_batch=0"),
        (lambda: sampler_of(seed=-1), "seed=-1"),
        (lambda: sampler_of(tail="fold"), "tail='fold'"),
        (lambda: sampler_of(tail="drop", global_batch=11), "leaves no batch"),
        (lambda: sampler_of(rank=1), "rank and world"),
    ],
)
def test_what_cannot_be_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        make()


def factor_of(value: float) -> float:
    return RateScaling(lambda scale: value, base_batch=64, batch=128).factor(UNKNOWN)


def sampler_of(**changes: Any) -> ElasticSampler:
    return ElasticSampler(**{"length": 10, "global_batch": 4, **changes})


WITHOUT_MOMENTUM = (0.0, 0.9)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.Adam, {"betas": WITHOUT_MOMENTUM}),
        (torch.optim.Adam, {"betas": WITHOUT_MOMENTUM, "eps": 0.1}),
        (torch.optim.Adam, {"betas": WITHOUT_MOMENTUM, "amsgrad": True}),
        (torch.optim.AdamW, {"betas": WITHOUT_MOMENTUM, "weight_decay": 0.0}),
        (torch.optim.RMSprop, {"alpha": 0.9}),
        (torch.optim.RMSprop, {"alpha": 0.9, "centered": True}),
        (torch.optim.Adagrad, {}),
        (torch.optim.Adagrad, {"initial_accumulator_value": 2.0}),
    ],
)
def test_step_is_gradient_by_divisor(kind: type[torch.optim.Optimizer], options: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(2)
    one = torch.nn.Parameter(torch.zeros(50, dtype=torch.float64))
    optimizer = kind([one], lr=0.1, **options)
    for _ in range(12):
        before = one.detach().clone()
        one.grad = torch.randn(50, generator=generator, dtype=torch.float64) + 0.5
        optimizer.step()
    state, group = optimizer.state[one], optimizer.param_groups[0]
    assert is_adaptive(state, group)
    divisor = divisor_of(state, group)
    assert divisor is not None
    factors = (one.detach() - before) * divisor / one.grad  # the same for every element
    torch.testing.assert_close(factors, factors[:1].expand(50), rtol=1e-5, atol=0.0)


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
    with pytest.raises(SettingsError, match="20 samples were already handed out"):
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
