"""The demo's plan, images, teacher and students, and the check of the delivered samples.

The images are handwritten digits: 1,797 real images of 8x8 pixels, which scikit-learn includes, and distorted copies.
Source: E. Alpaydin, C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning Repository, 1998.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor, nn
from typing_extensions import override

from edl.distill.losses import kl_divergence


@dataclass(frozen=True)
class DemoPlan:
    """Settings of the demo.

    Attributes:
        out: folder for the picture, the figures and the teachers' logs.
        seeds: number of students of each kind; every seed has its own images, distortions and initial weights.
        rows: number of images in a step, and also in a request to a teacher.
        labelled: number of images that a seed's students learn from.
        pause_ms: milliseconds added to a teacher's time per batch, so that the small network takes as long as a large
            one.
        kill_at, join_at, drain_at: fractions of the epoch at which a teacher is killed, started and drained,
            respectively.
        temperature: temperature of the distributions that the distilled students learn.
    """

    out: Path
    seeds: int = 5
    steps: int = 800
    rows: int = 32
    labelled: int = 100
    teachers: int = 3
    pause_ms: float = 40.0
    teacher_epochs: int = 25
    kill_at: float = 0.25
    join_at: float = 0.40
    drain_at: float = 0.72
    temperature: float = 4.0
    dashboard: bool = False

    @property
    def batches(self) -> int:
        """Number of batches in the epoch; the seeds supply them in turn."""
        return self.seeds * self.steps

    @property
    def total_rows(self) -> int:
        """Number of samples in the epoch."""
        return self.batches * self.rows

    def seed_of(self, batch: int) -> int:
        """Return the seed that a batch belongs to."""
        return batch % self.seeds


_HELD_OUT = 600
"""Digits held out to measure accuracy, a third of 1,797: a difference of half a percent is three digits."""

Batch = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]
"""Images float32 [rows, 1, 8, 8], labels int64 [rows], and each sample's number in the epoch int64 [rows]."""


@dataclass(frozen=True)
class Digits:
    """Images float32 [n, 1, 8, 8] between 0 and 1, labels int64 [n]; no student trains on the test images."""

    images: Tensor
    labels: Tensor
    test_images: Tensor
    test_labels: Tensor

    def share(self, seed: int, size: int) -> Tensor:
        """Return indices of the training images for a seed's students."""
        generator = torch.Generator().manual_seed(1000 + seed)
        return torch.randperm(len(self.images), generator=generator)[:size]


def load() -> Digits:
    """Return the images, always split in the same way."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels / 16.0, dtype=torch.float32).view(-1, 1, 8, 8)
    targets = torch.tensor(labels, dtype=torch.int64)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    test, train = order[:_HELD_OUT], order[_HELD_OUT:]
    return Digits(images[train], targets[train], images[test], targets[test])


def distort(images: Tensor, generator: torch.Generator) -> Tensor:
    """Rotate each image by up to 15 degrees, scale it by up to 10%, shift it by up to a pixel, and add noise."""
    count = len(images)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(count, *shape, generator=generator) * 2 - 1

    angle, scale = uniform() * math.radians(15), 1 + uniform() * 0.1
    placement = torch.zeros(count, 2, 3)
    placement[:, 0, 0] = placement[:, 1, 1] = angle.cos() * scale
    placement[:, 1, 0] = angle.sin() * scale
    placement[:, 0, 1] = -placement[:, 1, 0]
    placement[:, :, 2] = uniform(2) * (2 / 8)
    grid = F.affine_grid(placement, list(images.shape), align_corners=False)
    moved = F.grid_sample(images, grid, align_corners=False)
    return moved + 0.1 * torch.randn(moved.shape, generator=generator)


def batches(digits: Digits, plan: DemoPlan) -> Iterator[Batch]:
    """Yield the epoch: a batch of newly distorted images for each seed in turn. Every call yields the same batches."""
    generators = [torch.Generator().manual_seed(2000 + seed) for seed in range(plan.seeds)]
    shares = [digits.share(seed, plan.labelled) for seed in range(plan.seeds)]
    for number in range(plan.batches):
        seed = plan.seed_of(number)
        chosen = shares[seed][torch.randint(plan.labelled, (plan.rows,), generator=generators[seed])]
        images = distort(digits.images[chosen], generators[seed])
        rows = np.arange(number * plan.rows, (number + 1) * plan.rows, dtype=np.int64)
        yield images.numpy(), digits.labels[chosen].numpy(), rows


class Teacher(nn.Module):
    """Maps digits [rows, 1, 8, 8] to logits [rows, 10]."""

    def __init__(self, pause_ms: float = 0.0) -> None:
        super().__init__()
        self._pause_s = pause_ms / 1000
        self.layers = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.Flatten(),
            nn.Dropout(0.3),
            nn.Linear(64 * 4 * 4, 128),
            nn.ReLU(),
            nn.Linear(128, 10),
        )

    @override
    def forward(self, image: Tensor) -> Tensor:
        logits: Tensor = self.layers(image)
        if self._pause_s:
            time.sleep(self._pause_s)
        return logits


def teacher(pause_ms: float = 0.0) -> nn.Module:
    """Build the model for `edl serve --torch-factory edl.cli.demo.models:teacher`, which then loads the checkpoint."""
    return Teacher(float(pause_ms))


def student() -> nn.Module:
    """Return a network with 4,810 parameters, 1/31 of the teacher's number."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def size(model: nn.Module) -> int:
    """Return the number of parameters."""
    return sum(parameter.numel() for parameter in model.parameters())


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Return the share of images that the model classifies correctly."""
    model.eval()
    right = int((model(images).argmax(dim=1) == labels).sum())
    model.train()
    return right / len(labels)


def train_teacher(digits: Digits, epochs: int, tell: Callable[[int, float], None]) -> Teacher:
    """Train on all training images with their labels. `tell(epoch, loss)` is called after every epoch."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    model = Teacher()
    optimizer = torch.optim.Adam(model.parameters())
    rows, count = 64, len(digits.images)
    total = epochs * -(-count // rows)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=total)
    for epoch in range(epochs):
        for chosen in torch.split(torch.randperm(count, generator=generator), rows):
            loss = F.cross_entropy(model(distort(digits.images[chosen], generator)), digits.labels[chosen])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
        tell(epoch + 1, loss.item())
    return model.eval()


class ModelPair:
    """Two students with equal initial weights and images: `alone` learns labels, `distilled` learns soft labels."""

    def __init__(self, seed: int, steps: int, temperature: float) -> None:
        torch.manual_seed(seed)
        self.alone = student()
        self.distilled = student()
        self.distilled.load_state_dict(self.alone.state_dict())
        self._temperature = temperature
        # One optimizer for both: no parameter has a gradient from the other student's loss.
        self._optimizer = torch.optim.Adam([*self.alone.parameters(), *self.distilled.parameters()])
        self._schedule = torch.optim.lr_scheduler.OneCycleLR(self._optimizer, 2e-2, total_steps=steps)

    def step(self, images: Tensor, labels: Tensor, logits: Tensor) -> tuple[float, float]:
        """Take an optimizer step for both students; return their losses."""
        hard = F.cross_entropy(self.alone(images), labels)
        soft = kl_divergence(self.distilled(images), logits, temperature=self._temperature)
        self._optimizer.zero_grad()
        (hard + soft).backward()
        self._optimizer.step()
        self._schedule.step()
        return hard.item(), soft.item()


# --- Checking the delivered samples ---

# Different batch sizes round differently: up to 1e-5 was seen. Logits of two images differ by whole units.
_TOLERANCE = 1e-3


Delivered: TypeAlias = tuple[np.ndarray[Any, Any], ...]
"""A batch as it was delivered to the students: images, labels, sample numbers, logits."""


@dataclass(frozen=True)
class Findings:
    """The number of wrong samples, by kind of error.

    Attributes:
        checked: samples delivered.
        lost, repeated: samples that never arrived, and samples that arrived more than once.
        changed: samples whose image or label differs from the source's.
        mislabelled: samples whose logits differ from those that the teacher's network gives when it runs in this
            process.
        out_of_order: samples that arrived after a later sample.
        largest_difference: largest difference between the delivered logits and those computed in this process.
    """

    checked: int
    lost: int
    repeated: int
    changed: int
    mislabelled: int
    out_of_order: int
    largest_difference: float

    @property
    def all_well(self) -> bool:
        """Whether no sample is wrong."""
        return not (self.lost or self.repeated or self.out_of_order or self.changed or self.mislabelled)


@torch.no_grad()
def check(plan: DemoPlan, delivered: Sequence[Delivered], digits: Digits, teacher: nn.Module) -> Findings:
    """Compare the batches, in order, with a new run of the source and with the teacher's network in this process."""
    images, labels, numbers, logits = (np.concatenate(column) for column in zip(*delivered, strict=True))
    times = np.bincount(numbers, minlength=plan.total_rows)
    own_images, own_labels, _ = (np.concatenate(column) for column in zip(*batches(digits, plan), strict=True))
    same_image = (images == own_images[numbers]).all(axis=(1, 2, 3))
    changed = int((~same_image | (labels != own_labels[numbers])).sum())
    teacher.eval()
    own_logits = torch.cat([teacher(part) for part in torch.split(torch.from_numpy(images), 1024)]).numpy()
    difference = np.abs(own_logits - logits).max(axis=1)
    return Findings(
        checked=len(numbers),
        lost=int((times == 0).sum()),
        repeated=int((times > 1).sum()),
        changed=changed,
        mislabelled=int((~(difference <= _TOLERANCE)).sum()),
        out_of_order=int((numbers < np.maximum.accumulate(numbers)).sum()),
        largest_difference=float(difference.max()),
    )
