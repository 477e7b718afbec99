"""A run that was broken off goes on bit for bit, and no broken step is stored."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from edl.collective import Checkpointer, ElasticSampler, ElasticTrainer, State
from edl.collective.loop_position import BoundaryCheckpointer
from edl.errors import SettingsError

EPOCHS, STEPS_AN_EPOCH = 2, 4
ALL = EPOCHS * STEPS_AN_EPOCH


def train(folder: Path, seed: int, steps: int, *, workers: int, own_generator: bool = True) -> list[Tensor]:
    """Restore what is in `folder`, train up to `steps` steps from the beginning, save. Returns the parameters."""
    torch.manual_seed(seed)
    data = TensorDataset(torch.linspace(-1, 1, 8 * STEPS_AN_EPOCH).outer(torch.arange(1.0, 5.0)))
    model = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.5), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    sampler = ElasticSampler(len(data), global_batch=8, seed=0)
    trainer = ElasticTrainer(model, optimizer, sampler=sampler, max_micro_batch=3)
    state = State(model=model, optimizer=optimizer, sampler=sampler, trainer=trainer, step=-1)
    generator = torch.Generator() if own_generator else None
    loader = DataLoader(data, batch_sampler=sampler, num_workers=workers, generator=generator)
    with Checkpointer(state, storage=str(folder)) as checkpointer:
        checkpointer.restore()
        for _ in sampler.epochs(EPOCHS):
            for batch in loader:
                for (inputs,) in trainer.micro_batches(batch):
                    trainer.backward(model(inputs).square().mean())
                trainer.step()
                state.step += 1
                if state.step + 1 == steps:
                    break
            if state.step + 1 == steps:
                break
        checkpointer.save(state.step, force=True)
    return [one.detach() for one in model.parameters()]


@pytest.mark.parametrize("workers", [0, 1])
def test_dropout_goes_on(tmp_path: Path, workers: int) -> None:
    whole = train(tmp_path / "whole", 0, ALL, workers=workers)
    for number, steps in enumerate((2, STEPS_AN_EPOCH + 2, ALL)):  # twice within an epoch
        broken = train(tmp_path / "broken", number, steps, workers=workers)
    for one, other in zip(whole, broken, strict=True):
        assert torch.equal(one, other)


@pytest.fixture(autouse=True)
def new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """No loop has begun in this process."""
    monkeypatch.setattr(BoundaryCheckpointer, "_opened", False)


def boundary_of(folder: Path) -> BoundaryCheckpointer:
    return BoundaryCheckpointer({"storage": str(folder), "interval_steps": 1, "storage_interval_s": 1e-6})


@pytest.mark.parametrize(("ended", "stored"), [(False, 1.0), (True, 777.0)])
def test_broken_step_is_not_stored(tmp_path: Path, ended: bool, stored: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Closed in the middle of a step, and after the end."""
    model = torch.nn.Linear(2, 2)
    torch.nn.init.constant_(model.weight, 1.0)
    boundary = boundary_of(tmp_path)
    boundary.open(State(model=model))
    for step in range(3):
        boundary.count_step()
        boundary.begin_step(step)
    torch.nn.init.constant_(model.weight, 777.0)
    if ended:
        boundary.save_end(3)
    boundary.close()

    monkeypatch.setattr(BoundaryCheckpointer, "_opened", False)  # the next process
    again = torch.nn.Linear(2, 2)
    boundary = boundary_of(tmp_path)
    assert boundary.open(State(model=again))
    boundary.close()
    assert again.weight.flatten().tolist() == [stored] * 4


def test_a_second_loop_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would find the end of the first one, which a restart of that is to find, and train nothing."""
    state = State(model=torch.nn.Linear(2, 2))
    for _ in range(2):  # nothing is kept
        boundary = BoundaryCheckpointer({})
        assert not boundary.open(state)
        boundary.close()
    monkeypatch.setenv("EDL_SLOTS", str(tmp_path / "slots"))
    first = BoundaryCheckpointer({})
    first.open(state)
    first.save_end(0)
    first.close()
    for second in (BoundaryCheckpointer({}), boundary_of(tmp_path / "stored")):
        with pytest.raises(SettingsError, match=r"keeps the state of one training loop.*job of its own"):
            second.open(state)
