"""A small residual network (He et al. 2016) with group normalization, so it does not matter how a batch is split."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Block(nn.Module):
    """Two convolutions and a skip connection around them."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.path = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.GroupNorm(4, outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.GroupNorm(4, outputs),
        )
        plain = inputs == outputs and stride == 1
        self.around = nn.Identity() if plain else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        return torch.relu(self.path(images) + self.around(images))


def resnet(classes: int, width: int = 16) -> nn.Module:
    """Return a network from images, float32 [rows, 3, height, width], to logits [rows, classes]."""
    stages = [Block(width, width, 1), Block(width, 2 * width, 2), Block(2 * width, 4 * width, 2)]
    ends = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, classes)]
    return nn.Sequential(nn.Conv2d(3, width, 3, 1, 1), *stages, *ends)
