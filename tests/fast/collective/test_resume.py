"""A run that was broken off in an epoch goes on bit for bit, dropout included, if it is written as the docs say."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from edl.collective import Checkpointer, ElasticSampler, ElasticTrainer, State

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
