"""The two networks: a teacher with two hidden layers, and a student with one."""

from paddle import nn


def teacher() -> nn.Layer:
    """Return a network from images [rows, 64] to logits [rows, 10], with about 85,000 parameters."""
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))


def student() -> nn.Layer:
    """Return a network with the same inputs and outputs, and 2,410 parameters."""
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
