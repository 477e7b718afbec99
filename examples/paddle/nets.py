"""The two networks: a teacher of two hidden layers, and a student of one."""

from paddle import nn


def teacher() -> nn.Layer:
    """Images [rows, 64] to logits [rows, 10]; about 85,000 parameters."""
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))


def student() -> nn.Layer:
    """The same, with 2,410 parameters."""
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
