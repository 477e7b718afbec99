"""A small ResNet, and one rank's part of training it for a while: between two changes of the world."""

from __future__ import annotations

import datetime
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from edl.collective.update.sampler import ElasticSampler
from edl.collective.update.schedule import SampleSchedule
from edl.collective.update.trainer import ElasticTrainer

__all__ = ["Phase", "accuracy", "resnet", "train_phase"]

_TIMEOUT = datetime.timedelta(seconds=60)
_RATE = 0.005
"""For batches of 32: half of the best one of 0.002, 0.005, 0.01 and 0.1. With 0.1 larger batches learn as well at the
same rate, so that a rule which ignores the batch would not show."""


@dataclass(frozen=True)
class Phase:
    """What every rank of one world does: resume, train, leave.

    Attributes:
        folder: holds train.npz, and state.pt once there is one.
        seed: of weights, order and flips.
        base_batch: that the rate belongs to, and steps of the schedule are counted in.
        global_batch: of each step.
        world: ranks.
        until: samples trained in all when the phase ends.
        total: samples of the whole training.
        killed: end by SIGKILL instead of saving, a few steps after the last save.
    """

    folder: Path
    seed: int
    base_batch: int
    global_batch: int
    world: int
    until: int
    total: int
    killed: bool = False


class _Block(nn.Module):
    def __init__(self, ins: int, outs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(ins, outs, 3, stride, 1, bias=False)
        self.norm = nn.BatchNorm2d(outs)
        self.second = nn.Conv2d(outs, outs, 3, 1, 1, bias=False)
        self.last_norm = nn.BatchNorm2d(outs)
        self.short = nn.Conv2d(ins, outs, 1, stride, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.last_norm(self.second(F.relu(self.norm(self.first(inputs)))))
        return F.relu(found + self.short(inputs))


def resnet() -> nn.Module:
    """Eight convolutions deep, for [n, 3, 32, 32] and ten classes."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, 1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        _Block(16, 16, 1),
        _Block(16, 32, 2),
        _Block(32, 64, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


def normalized(images: Tensor) -> Tensor:
    """uint8 to float32, about -2 to 2."""
    return images.float().sub_(120.0).div_(62.0)


def accuracy(folder: Path) -> float:
    """Of the state that the last phase left, on the test images."""
    model = resnet()
    model.load_state_dict(torch.load(folder / "state.pt", weights_only=True)["model"])
    model.eval()
    with np.load(folder / "test.npz") as test, torch.no_grad():
        labels = torch.from_numpy(test["labels"])
        parts = torch.split(torch.from_numpy(test["images"]), 500)
        logits = [model(normalized(part)) for part in parts]
    return float((torch.cat(logits).argmax(1) == labels).float().mean())


def train_phase(rank: int, phase: Phase) -> None:
    """One rank of a world: resume from `state.pt`, train until it is time to leave."""
    torch.set_num_threads(1)  # several wait for one another far longer than they compute, on a busy machine
    torch.manual_seed(phase.seed)
    store = f"file://{phase.folder}/store-{phase.global_batch}-{phase.world}-{phase.until}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=phase.world, timeout=_TIMEOUT)
    model = resnet()
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=_RATE, momentum=0.9, weight_decay=5e-4)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=phase.total // phase.base_batch)
    with np.load(phase.folder / "train.npz") as train:
        dataset = TensorDataset(torch.from_numpy(train["images"]), torch.from_numpy(train["labels"]))
    sampler = ElasticSampler(len(dataset), global_batch=phase.global_batch, seed=phase.seed)
    schedule = SampleSchedule(cosine, samples_per_step=phase.base_batch)
    trainer = ElasticTrainer(wrapped, optimizer, sampler=sampler, base_batch=phase.base_batch, schedule=schedule)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "sampler": sampler, "trainer": trainer}
    saved = phase.folder / "state.pt"
    if saved.exists():
        for name, found in torch.load(saved, weights_only=True).items():
            state[name].load_state_dict(found)
    for _ in sampler.epochs(10**6):
        for batch in DataLoader(dataset, batch_sampler=sampler):
            for images, labels in trainer.micro_batches(batch):
                flipped = torch.where(_flips(images, phase.seed + sampler.epoch), images.flip(3), images)
                trainer.backward(F.cross_entropy(wrapped(normalized(flipped)), labels))
            trainer.step()
            left = phase.until - trainer.samples
            if phase.killed and left <= 0:
                os.kill(os.getpid(), signal.SIGKILL)
            # A world that is killed loses what it trained in its last steps, and nothing else.
            if rank == 0 and (left <= 0 or (phase.killed and left > 4 * phase.global_batch)):
                partial = saved.with_suffix(".partial")
                torch.save({name: one.state_dict() for name, one in state.items()}, partial)
                partial.replace(saved)
            if left <= 0:
                dist.barrier()
                dist.destroy_process_group()
                return


def _flips(images: Tensor, seed: int) -> Tensor:
    """Which images are mirrored: a function of the picture and the epoch, not of the rank that happens to train it."""
    sums = images.flatten(1).sum(1, dtype=torch.int64)
    return ((sums * 2654435761 + seed * 40503) >> 7 & 1).bool().view(-1, 1, 1, 1)
