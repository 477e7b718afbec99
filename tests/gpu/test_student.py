"""A student's training step beside its teacher on one GPU: labels arrive with their images, copied asynchronously."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from edl.distill.losses import DistillLoss
from edl.distill.torch import distill
from edl.testing import LocalTeacher
from edl.testing.models import fingerprint_of
from tests.gpu import models


@pytest.mark.parametrize("workers", [0, 2])
def test_labels_belong_to_their_images(device: torch.device, workers: int) -> None:
    """Pinned batches and labels go to the device without waiting, and are whole when a step uses them."""
    images = torch.from_numpy(np.random.default_rng(1).integers(256, size=(512, 3, 32, 32), dtype=np.uint8))
    pinned = device.type == "cuda"
    loader = DataLoader(
        TensorDataset(images, torch.arange(len(images))),
        batch_size=64,
        num_workers=workers,
        pin_memory=pinned,
        multiprocessing_context="forkserver" if workers else None,
    )
    student = models.resnet50(width=8, classes=10).to(device)
    optimizer, loss = torch.optim.SGD(student.parameters(), lr=1e-3), DistillLoss(temperature=2.0, alpha=1.0)
    seen: list[int] = []
    with (
        LocalTeacher("fingerprint", shape=[3, 32, 32], dtype="uint8") as teacher,
        distill(loader, teacher.endpoint, inputs=["x", None], outputs="y") as labelled,
    ):
        for (pixels, rows), labels in labelled:
            on_device = [_to_device(tensor, device) for tensor in (pixels, labels)]
            expected = torch.from_numpy(fingerprint_of(pixels.numpy()))
            loss(student(on_device[0].float() / 255), on_device[1] / 2039, None).backward()
            optimizer.step()
            optimizer.zero_grad()
            assert torch.equal(on_device[1].cpu(), expected)
            seen += rows.tolist()
    assert seen == list(range(512))
    assert all(torch.isfinite(parameter).all() for parameter in student.parameters())


def _to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    pinned = tensor if tensor.is_pinned() or device.type != "cuda" else tensor.pin_memory()
    return pinned.to(device, non_blocking=True)
