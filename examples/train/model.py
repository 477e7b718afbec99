"""The student, which is all that `edl train` needs, and the teacher, which `edl serve` builds."""

import torch
from torch import nn


def model() -> nn.Module:
    """Return a network from digits [rows, 8, 8] to logits [rows, 10], with 4,810 parameters."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=5e-3)


def teacher() -> nn.Module:
    """Return a network with the same inputs and outputs, and 151,306 parameters."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 8)),
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )
