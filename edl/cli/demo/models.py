"""The teacher, a convolutional network; the student, a hidden layer; and how they are trained."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor, nn
from typing_extensions import override

from edl.cli.demo.data import Digits, distort
from edl.distill.losses import kl_divergence

__all__ = ["ModelPair", "Teacher", "accuracy", "size", "student", "teacher", "train_teacher"]


class Teacher(nn.Module):
    """Digits [rows, 1, 8, 8] to logits [rows, 10].

    Args:
        pause_ms: sleep so long in every call. A little network on a processor thus takes the time that a large one
            takes on an accelerator, without taking the students' cores.
    """

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
    """Return what `edl serve --torch-factory edl.cli.demo.models:teacher` builds, before it loads the checkpoint."""
    return Teacher(float(pause_ms))


def student() -> nn.Module:
    """Return a network of 4,810 parameters, 1/31 of the teacher's."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def size(model: nn.Module) -> int:
    """Return the number of parameters."""
    return sum(parameter.numel() for parameter in model.parameters())


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Share of the images that the model gets right."""
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
    """Two students that start equal and see the same images in the same order; only what they learn from differs.

    Attributes:
        alone: learns the images' labels.
        distilled: learns the teachers' softened distributions, and never sees a label.
    """

    def __init__(self, seed: int, steps: int, temperature: float) -> None:
        torch.manual_seed(seed)
        self.alone = student()
        self.distilled = student()
        self.distilled.load_state_dict(self.alone.state_dict())
        self._temperature = temperature
        self._learners = [_Learner(model, steps) for model in (self.alone, self.distilled)]

    def step(self, images: Tensor, labels: Tensor, logits: Tensor) -> tuple[float, float]:
        """Take an optimizer step of both; return their losses."""
        hard = F.cross_entropy(self.alone(images), labels)
        soft = kl_divergence(self.distilled(images), logits, temperature=self._temperature)
        for learner, loss in zip(self._learners, (hard, soft), strict=True):
            learner.step(loss)
        return hard.item(), soft.item()


class _Learner:
    def __init__(self, model: nn.Module, steps: int) -> None:
        self._optimizer = torch.optim.Adam(model.parameters())
        self._schedule = torch.optim.lr_scheduler.OneCycleLR(self._optimizer, 2e-2, total_steps=steps)

    def step(self, loss: Tensor) -> None:
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self._schedule.step()
