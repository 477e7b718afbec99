"""The trainer in one process: the order of calls, steps given up, rates, noise, state, the automatic batch."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from edl.collective.checkpoint.encoding import parse_meta
from edl.collective.checkpoint.state.state import State
from edl.collective.training import step as steps
from edl.collective.training.learning_rate import AdaScale, SampleSchedule, SquareRoot
from edl.collective.training.sampler import ElasticSampler, count_rows, cut_rows
from edl.collective.training.step import TrainingStep
from edl.collective.training.trainer import ElasticTrainer
from edl.collective.training.tuner import AutoBatch
from edl.errors import SettingsError


def schedule(samples_per_step: float = 100) -> tuple[SampleSchedule, torch.optim.Optimizer]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    steps = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[3, 6], gamma=0.1)
    optimizer.step()  # or PyTorch warns of a schedule that goes first
    return SampleSchedule(steps, samples_per_step), optimizer


def plateau() -> SampleSchedule:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    return SampleSchedule(torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer), 100)


@given(batches=st.lists(st.integers(1, 250), min_size=1, max_size=12))
def test_rate_depends_on_samples_only(batches: list[int]) -> None:
    moved, optimizer = schedule()
    samples = 0
    for batch in batches:
        samples += batch
        moved.move_to(samples)
        wanted = 1.0 if samples < 300 else 0.1 if samples < 600 else 0.01
        assert optimizer.param_groups[0]["lr"] == pytest.approx(wanted)


def test_near_fractions_make_a_step() -> None:
    moved, optimizer = schedule()
    progress = 0.0
    for _ in range(3000):
        progress += 0.1
    assert progress != 300
    moved.move_to(progress)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1)


Setup = tuple[ElasticTrainer, nn.Module, torch.optim.Optimizer]


def setup(
    kind: type[torch.optim.Optimizer] = torch.optim.SGD, module: nn.Module | None = None, **options: Any
) -> Setup:
    torch.manual_seed(3)
    model = (module or nn.Linear(4, 1)).double()
    optimizer = kind(model.parameters(), lr=0.1)
    if not {"sampler", "global_batch"} & options.keys():
        options["global_batch"] = 8
    return ElasticTrainer(model, optimizer, **options), model, optimizer


def batch_norm(**options: Any) -> Setup:
    return setup(module=nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)), **options)


def rows(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 4, generator=generator, dtype=torch.float64)
    return inputs, torch.randn(count, 1, generator=generator, dtype=torch.float64)


def train(setup: Setup, steps: int = 1, count: int = 8, seed: int = 0) -> None:
    trainer, model, _ = setup
    for step in range(steps):
        for inputs, targets in trainer.micro_batches(rows(count, seed + step)):
            trainer.backward(nn.functional.mse_loss(model(inputs), targets))
        trainer.step()


class Named(NamedTuple):
    inputs: Tensor
    names: list[str]
    number: int


def test_nests_are_cut_by_rows() -> None:
    batch = [
        {"ids": torch.arange(5)},
        (np.arange(10).reshape(5, 2), None),
        Named(torch.arange(5), list("abcde"), 7),
        torch.tensor(0.5),
    ]
    assert count_rows(batch) == 5
    ids, (pairs, nothing), named, scalar = cut_rows(batch, 1, 3)
    assert ids["ids"].tolist() == [1, 2]
    assert pairs.tolist() == [[2, 3], [4, 5]]
    assert (nothing, named.names, named.number, type(named), float(scalar)) == (None, ["b", "c"], 7, Named, 0.5)


def test_calls_out_of_order() -> None:
    trainer, model, _ = setup(max_micro_batch=4)
    inputs, targets = rows(8)
    with pytest.raises(SettingsError, match="no micro-batches"):
        trainer.step()
    with pytest.raises(SettingsError, match="loop over micro_batches"):
        trainer.backward(model(inputs).mean())
    micros = trainer.micro_batches((inputs, targets))
    next(micros)
    with pytest.raises(SettingsError, match=r"the loss has the shape \[8, 1\].*losses\.mean\(\)"):
        trainer.backward(model(inputs))
    with pytest.raises(SettingsError, match=r"backward\(\) was not called"):
        next(micros)
    with pytest.raises(SettingsError, match="2 of 2 micro-batches"):
        trainer.step()
    with pytest.raises(SettingsError, match=r"discard\(\)"):
        next(trainer.micro_batches((inputs, targets)))
    trainer.discard()
    train((trainer, model, trainer.optimizer))
    assert trainer.samples == 8


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (setup, {"sampler": ElasticSampler(8, global_batch=4), "global_batch": 4}, "either sampler"),
        (setup, {"max_micro_batch": 0}, "max_micro_batch=0"),
        (setup, {"clip_norm": 0.0}, "clip_norm=0.0"),
        (setup, {"clip_norm": float("nan")}, "clip_norm=nan"),
        (setup, {"auto": AutoBatch(1, 8)}, "policy"),
        (setup, {"base_batch": -1}, "base_batch=-1"),
        (
            setup,
            {"sampler": ElasticSampler(8, global_batch=4), "auto": AutoBatch(1, 9), "policy": AdaScale()},
            "epoch has 8",
        ),
        (batch_norm, {"global_batch": 8, "max_micro_batch": 2}, r"=2: .*BatchNorm1d cannot be trained with one row"),
        (batch_norm, {"sampler": ElasticSampler(17, global_batch=8)}, r'17 samples in batches of 8.*tail="drop"'),
        (batch_norm, {"sampler": ElasticSampler(17, global_batch=1)}, r"SyncBatchNorm and GroupNorm can"),
        (setup, {"kind": torch.optim.LBFGS}, "LBFGS needs a closure.*such as SGD or AdamW"),
        (setup, {"module": nn.LazyLinear(1)}, "weight of the model has no shape yet: run a batch"),
        (schedule, {"samples_per_step": 0}, "samples_per_step=0"),
        (plateau, {}, r"on_result=plateau\.step"),
        (count_rows, {"batch": 7}, "rows"),
        (count_rows, {"batch": (torch.zeros(3), torch.zeros(4))}, "rows"),
        (count_rows, {"batch": torch.zeros(())}, "rows"),
    ],
)
def test_what_cannot_be_is_refused(make: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        make(**options)


def test_batch_norm_never_sees_one_row() -> None:
    for sampler in (ElasticSampler(17, global_batch=8, tail="drop"), ElasticSampler(21, global_batch=8)):
        setup = batch_norm(sampler=sampler, max_micro_batch=3, policy=AdaScale())
        inputs, targets = rows(21)
        for batch in sampler:
            for some, wanted in setup[0].micro_batches((inputs[batch], targets[batch])):
                assert len(some) > 1
                setup[0].backward(nn.functional.mse_loss(setup[1](some), wanted))
            setup[0].step()
        assert sampler.finished


def test_foreign_parameters_are_refused() -> None:
    model, stranger = nn.Linear(4, 1), nn.Linear(4, 1)
    optimizer = torch.optim.SGD([*model.parameters(), *stranger.parameters()], lr=0.1)
    with pytest.raises(SettingsError, match=r"2 parameters that the model lacks.*nn\.ModuleList"):
        ElasticTrainer(model, optimizer, global_batch=8)
    ElasticTrainer(nn.ModuleList([model, stranger]), optimizer, global_batch=8)


def test_worker_without_a_group_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    trainer, _, _ = setup()
    with pytest.raises(SettingsError, match=r"2 workers, but no process group: call init_process_group\(\)"):
        next(trainer.micro_batches(rows(8)))
    with pytest.raises(SettingsError, match=r"call init_process_group\(\)"):
        iter(ElasticSampler(8, global_batch=4))
    assert list(ElasticSampler(8, global_batch=4, shuffle=False, rank=1, world=2)) == [[2, 3], [6, 7]]


@pytest.mark.parametrize(
    ("count", "weights", "message"),
    [
        (7, None, "7 rows on rank 0, but this rank's share is 8 of 8"),
        (8, [1.0] * 7 + [-1.0], "weights= of rank 0: .*non-negative"),
        (8, [1.0] * 7 + [float("nan")], "weights= of rank 0"),
        (8, [1.0] * 9, "got 9 for 8 rows"),
        (8, [0.0] * 8, "are 0 for all rows of all ranks"),
    ],
)
def test_foreign_batch_is_refused(count: int, weights: list[float] | None, message: str) -> None:
    trainer, _, _ = setup(sampler=ElasticSampler(20, global_batch=8))
    with pytest.raises(SettingsError, match=message):
        trainer.micro_batches(rows(count), weights=weights)


@pytest.mark.parametrize("lockstep", [True, False])
@pytest.mark.parametrize("sampled", [True, False])
def test_wrong_rows_fail_on_all_ranks(monkeypatch: pytest.MonkeyPatch, sampled: bool, lockstep: bool) -> None:
    """A rank whose batch is wrong tells the others before it raises, wherever they would wait for it."""
    told: list[bool] = []

    def exchange(numbers: Sequence[int], group: None, device: torch.device) -> list[Sequence[int]]:
        told.append(bool(numbers[0]))
        return [numbers, [not numbers[0], 4, 1, 4, 0]]

    monkeypatch.setattr(steps, "world_of", lambda group: 2)
    monkeypatch.setattr(steps, "exchange", exchange)
    monkeypatch.setattr(steps, "gather_bytes", lambda mine, group: [mine, b"" if mine else b"the other one's"])
    how = steps.StepRequirements(None, 1, False, lockstep)
    sampler = ElasticSampler(8, global_batch=8, rank=0, world=2) if sampled else None
    if sampler is not None:
        next(iter(sampler))
    weights = None if lockstep else [1.0, 1.0, 1.0, 1.0]
    for length, message in ((4, "the other one's"), (3, "of 3|for 3|3 rows")):
        with pytest.raises(SettingsError, match=message):
            steps.begin_step(
                torch.zeros(length, 1), None if sampled else 4, weights, sampler, how, None, torch.device("cpu")
            )
    assert told == [False, True]


def test_skipped_step_counts_samples() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    trainer, model, optimizer = one = setup(scaler=scaler)
    trainer.schedule = SampleSchedule(torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5), samples_per_step=8)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for inputs, _ in trainer.micro_batches(rows(8)):
        trainer.backward(model(inputs).mean() * float("inf"))
    trainer.step()
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    assert (trainer.samples, optimizer.param_groups[0]["lr"], scaler.get_scale()) == (8, 0.1, 2.0)
    train(one)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.025)


TRUTH = torch.tensor([2.0, -1.0, 0.5], dtype=torch.float64)
SPREADS = torch.tensor([3.0, 1.0, 0.2], dtype=torch.float64)


class Quadratic(nn.Module):
    """|x - target|²/2 for targets around `TRUTH`: at x = 0 a sample's gradient is minus its target."""

    def __init__(self, foreign: float = 0.0) -> None:
        super().__init__()
        self.x, self.body = (nn.Parameter(torch.zeros(3, dtype=torch.float64)) for _ in range(2))
        self.foreign = foreign

    def forward(self, targets: Tensor) -> Tensor:
        own = 0.5 * (self.x - targets).square().sum(1).mean()
        return own + self.foreign * (self.body * targets).sum(1).mean()


def measure(steps: int, kind: Any, model: Quadratic | None = None, lr: float = 0.0, **options: Any) -> ElasticTrainer:
    """Measure the noise of steps that change nothing, unless there is a rate."""
    generator = torch.Generator().manual_seed(1)
    model = model or Quadratic()
    trainer = ElasticTrainer(
        model, kind([model.x], lr=lr), global_batch=12, max_micro_batch=5, policy=AdaScale(), **options
    )
    for _ in range(steps):
        targets = TRUTH + SPREADS * torch.randn(12, 3, generator=generator, dtype=torch.float64)
        for some in trainer.micro_batches(targets):
            trainer.backward(model(some))
        trainer.step()
    return trainer


@pytest.mark.parametrize("scaled", [False, True])
def test_measured_noise_is_the_problems(scaled: bool) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=10**6) if scaled else None
    noise = measure(300, torch.optim.SGD, scaler=scaler).noise
    assert noise.variance == pytest.approx(float(SPREADS.square().sum()), rel=0.15)
    assert noise.square == pytest.approx(float(TRUTH.square().sum()), rel=0.15)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.RMSprop])
def test_first_adaptive_steps_are_left_out(kind: type[torch.optim.Optimizer]) -> None:
    """Their noise is that of gradients divided by the optimizer's own scale, which is not known at first."""
    assert not measure(10, kind).noise.known
    second = TRUTH.square() + SPREADS.square() / 12
    wanted = float((SPREADS.square() / second).sum()) / float((TRUTH.square() / second).sum())
    assert measure(30, kind).noise.scale == pytest.approx(wanted, rel=0.5)


def test_unknown_optimizer_is_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "edl.collective"):
        measure(3, torch.optim.Adamax)
    assert caplog.text.count("gradient noise is measured without Adamax's own scaling") == 1


def test_foreign_parameters_are_left_alone() -> None:
    """The optimizer does not have them, so they are neither clipped nor measured."""
    models = (Quadratic(), Quadratic(foreign=1e3))
    found = [measure(5, torch.optim.SGD, model, lr=0.1, clip_norm=0.1).noise.state_dict() for model in models]
    assert found[0] == found[1]
    assert torch.equal(models[0].x, models[1].x)


def test_trainer_goes_through_a_checkpoint() -> None:
    def fresh() -> tuple[Setup, State]:
        sampler = ElasticSampler(50, global_batch=8)
        one = setup(torch.optim.Adam, sampler=sampler, policy=AdaScale(), scaler=torch.amp.GradScaler("cpu"))
        trainer, model, optimizer = one
        trainer.schedule = SampleSchedule(torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4]), samples_per_step=8)
        return one, State(model=model, optimizer=optimizer, sampler=sampler, trainer=trainer)

    (whole, _), (first, saved), (second, restored) = fresh(), fresh(), fresh()
    train(whole, 6)
    train(first, 3)
    captured = saved.capture()
    meta = parse_meta(captured.meta)
    loading = restored.begin_load(meta)
    for entry, tensor in zip(meta.entries, captured.tensors, strict=True):
        loading.fill_tensor(entry, tensor.detach().clone())
    loading.finish()
    train(second, 3, seed=3)
    assert all(torch.equal(a, b) for a, b in zip(whole[1].parameters(), second[1].parameters(), strict=True))
    assert second[0].state_dict() == whole[0].state_dict()
    assert second[0].sampler.consumed == 48


def test_auto_changed_batch_survives() -> None:
    first, _, _ = setup(global_batch=8, policy=SquareRoot())
    first.resize(32)
    same, other = setup(global_batch=8, policy=SquareRoot())[0], setup(global_batch=16, policy=SquareRoot())[0]
    for one in (same, other):
        one.load_state_dict(first.state_dict())
    assert (same.global_batch, same.rate_factor) == (32, 2.0)
    assert (other.global_batch, other.rate_factor) == (16, 1.0)


def test_auto_grows_a_noisy_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step takes as long with more rows, so all of them are for free."""
    monkeypatch.setattr("edl.collective.training.trainer.time", SimpleNamespace(perf_counter=lambda: 0.01))
    monkeypatch.setattr(TrainingStep, "began_at", property(lambda _: 0.0, lambda *_: None), raising=False)
    generator = torch.Generator().manual_seed(4)
    targets = TRUTH * 0.01 + SPREADS * torch.randn(2000, 3, generator=generator, dtype=torch.float64)
    model, sampler = Quadratic(), ElasticSampler(len(targets), global_batch=8)
    optimizer, auto = torch.optim.SGD([model.x], lr=1e-4), AutoBatch(8, 64, every_steps=10)
    trainer = ElasticTrainer(model, optimizer, sampler=sampler, policy=AdaScale(), auto=auto)
    seen: list[Tensor] = []
    for (batch,) in DataLoader(TensorDataset(targets), batch_sampler=sampler, num_workers=2):
        for some in trainer.micro_batches(batch):
            trainer.backward(model(some))
        trainer.step()
        seen.append(batch)
    assert len(seen[0]) == 8
    assert max(map(len, seen)) >= 32
    assert sorted(torch.cat(seen)[:, 0].tolist()) == sorted(targets[:, 0].tolist())


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


LENGTH, BATCH = 22, 4


class Job:
    def __init__(self, **options: Any) -> None:
        torch.manual_seed(3)
        self.model = nn.Linear(2, 1).double()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.sampler = ElasticSampler(LENGTH, global_batch=BATCH)
        self.trainer = ElasticTrainer(self.model, self.optimizer, sampler=self.sampler, **options)
        numbers = torch.arange(LENGTH, dtype=torch.float64)
        self.loader = DataLoader(TensorDataset(torch.stack([numbers / LENGTH, numbers], 1)), batch_sampler=self.sampler)
        self.trained: list[int] = []

    def compute(self, batch: Tensor, *, fail_in: int | None = None) -> None:
        for number, (rows,) in enumerate(self.trainer.micro_batches((batch,))):
            loss = self.model(rows / LENGTH).square().mean()
            if number == fail_in:
                raise MemoryError
            self.trainer.backward(loss)

    def step(self, batch: Tensor) -> None:
        self.compute(batch)
        self.trainer.step()
        self.trained += batch[:, 1].int().tolist()

    def parameters(self) -> list[Tensor]:
        return [one.detach() for one in self.model.parameters()]


def test_discarded_samples_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    job, lost = Job(max_micro_batch=2), []
    with caplog.at_level(logging.WARNING, "edl.collective"):
        for number, (batch,) in enumerate(job.loader):
            if number == 2:
                with pytest.raises(MemoryError):
                    job.compute(batch, fail_in=1)
                job.trainer.discard()
                lost = batch[:, 1].int().tolist()
                saved = job.sampler.state_dict()
            else:
                job.step(batch)
    assert sorted(job.trained + lost) == list(range(LENGTH))
    assert job.sampler.finished
    assert job.trainer.samples == LENGTH - BATCH
    assert [record.message for record in caplog.records] == ["a step was discarded: 4 samples are left out of epoch 0"]
    resumed = Job()  # the position in a checkpoint is that of the loader
    resumed.sampler.load_state_dict(saved)
    for (batch,) in resumed.loader:
        resumed.step(batch)
    assert sorted(job.trained[: 2 * BATCH] + lost + resumed.trained) == list(range(LENGTH))


def test_scaler_goes_on_after_an_error() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    clean, job = Job(), Job(scaler=scaler, clip_norm=1e9)
    for (batch,) in clean.loader:
        clean.step(batch)
    for (batch,) in job.loader:
        job.compute(batch)
        job.trainer.synchronize()  # unscales; and now something of the user's fails
        job.trainer.discard(retry=True)
        job.step(batch)
    assert scaler.get_scale() == 8.0
    for mine, theirs in zip(job.parameters(), clean.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
