"""Steps that were given up: what happens to their samples, to the scaler, and to the steps after them."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from edl.collective.training.sampler import ElasticSampler
from edl.collective.training.trainer import ElasticTrainer
from edl.errors import SettingsError

LENGTH, BATCH = 22, 4


class Job:
    """A trainer over numbered samples."""

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


def test_discarded_samples_are_left_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The samples of a discarded step are left out and everything else comes once."""
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


def test_discarded_step_can_be_retried(caplog: pytest.LogCaptureFixture) -> None:
    """A discarded step can be tried again in smaller micro batches."""
    clean, job = Job(), Job()
    for (batch,) in clean.loader:
        clean.step(batch)
    with caplog.at_level(logging.WARNING, "edl.collective"):
        for number, (batch,) in enumerate(job.loader):
            if number == 2:
                with pytest.raises(MemoryError):
                    job.compute(batch, fail_in=0)
                job.trainer.discard(retry=True)
                job.trainer.max_micro_batch = 1
            job.step(batch)
    assert not caplog.records
    assert job.trained == clean.trained
    for mine, theirs in zip(job.parameters(), clean.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_restarted_loop_needs_no_word() -> None:
    """A loop that is begun anew needs no word about the step that it repeats."""
    clean, job = Job(max_micro_batch=2), Job(max_micro_batch=2)
    for (batch,) in clean.loader:
        clean.step(batch)
    batches = iter(job.loader)
    job.step(next(batches)[0])
    (batch,) = next(batches)
    with pytest.raises(MemoryError):
        job.compute(batch, fail_in=1)
    with pytest.raises(SettingsError, match=r"discard\(\)"):
        job.compute(next(batches)[0])  # this one is another batch
    for (batch,) in job.loader:
        job.step(batch)
    assert job.trained == clean.trained
    assert all(torch.equal(*both) for both in zip(job.parameters(), clean.parameters(), strict=True))


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
