"""The two networks: a convolutional teacher, and a student with one hidden layer."""

from torch import nn


def teacher() -> nn.Module:
    """Return a network from digits [rows, 1, 8, 8] to logits [rows, 10], with about 150,000 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def student() -> nn.Module:
    """Return a network with the same inputs and outputs, and 4,810 parameters."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
