"""Looks at everything that was delivered again: every sample once, in order, unchanged, with its own label."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from edl.cli.demo.data import Digits, batches
from edl.cli.demo.plan import DemoPlan

__all__ = ["Delivered", "Findings", "check"]

# Another batch size rounds otherwise: differences up to 1e-5 were seen. Logits of two images differ by whole units.
_TOLERANCE = 1e-3


class Delivered:
    """What the students were given, row by row in the order in which it came."""

    def __init__(self, plan: DemoPlan) -> None:
        self._parts: list[tuple[np.ndarray[Any, Any], ...]] = []
        self.plan = plan

    def add(self, *fields: np.ndarray[Any, Any]) -> None:
        """Add a batch: images, labels, numbers of the samples, logits."""
        self._parts.append(fields)

    def columns(self) -> tuple[np.ndarray[Any, Any], ...]:
        """Return all batches, joined."""
        return tuple(np.concatenate(column) for column in zip(*self._parts, strict=True))


@dataclass(frozen=True)
class Findings:
    """How many samples were wrong, and in which way.

    Attributes:
        checked: samples delivered.
        lost, repeated: samples that came never, and more than once.
        changed: image or label is not what the source gave.
        mislabelled: the teacher's network, run here, gives other logits for that image.
        out_of_order: samples that came after a sample that should have come later.
        largest_difference: between logits delivered and computed here.
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
        """Whether nothing is wrong."""
        return not (self.lost or self.repeated or self.out_of_order or self.changed or self.mislabelled)


@torch.no_grad()
def check(delivered: Delivered, digits: Digits, teacher: nn.Module) -> Findings:
    """Compare with the source, run once more, and with the teacher's network, run in this process."""
    plan = delivered.plan
    images, labels, numbers, logits = delivered.columns()
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
