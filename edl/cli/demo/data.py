"""Handwritten digits: 1,797 real images of 8x8 pixels that come with scikit-learn, and endless distortions of them.

Source: E. Alpaydin, C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning Repository, 1998.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor

from edl.cli.demo.plan import DemoPlan

__all__ = ["Batch", "Digits", "batches", "distort", "load"]

_HELD_OUT = 600
"""Of 1,797 digits, for the accuracy: a third, so that half a percent between students is three digits."""

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
        """Return indices of the training images that a seed's students have."""
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
    """Return every image turned by up to 15 degrees, scaled by up to 10%, moved by up to a pixel, with noise."""
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
    """Yield the epoch: in turn a batch for every seed, of newly distorted images. The same again at every call."""
    generators = [torch.Generator().manual_seed(2000 + seed) for seed in range(plan.seeds)]
    shares = [digits.share(seed, plan.labelled) for seed in range(plan.seeds)]
    for number in range(plan.batches):
        seed = plan.seed_of(number)
        chosen = shares[seed][torch.randint(plan.labelled, (plan.rows,), generator=generators[seed])]
        images = distort(digits.images[chosen], generators[seed])
        rows = np.arange(number * plan.rows, (number + 1) * plan.rows, dtype=np.int64)
        yield images.numpy(), digits.labels[chosen].numpy(), rows
