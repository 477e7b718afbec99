"""Accelerate's loop under `ElasticLoop` with teachers' labels: a restart labels what is left, and ends the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
accelerate = pytest.importorskip("accelerate", reason="Accelerate is not installed")

from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

from edl.collective.accelerate import ElasticLoop  # noqa: E402
from edl.collective.checkpoint.memory.slots import SlotPair  # noqa: E402
from edl.distill.torch import distill  # noqa: E402
from edl.testing import LocalTeacher  # noqa: E402

ROWS, EPOCHS = 40, 3


def train(folder: Path, teacher: str, until: int) -> tuple[Any, int]:
    """Train up to a batch, or the end; return the weights and how many rows teachers were asked for."""
    folder.mkdir(exist_ok=True)
    torch.manual_seed(0)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(4, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    data = TensorDataset(torch.arange(ROWS * 4.0).reshape(ROWS, 4) / 100)
    loader = DataLoader(data, batch_size=4, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    loop = ElasticLoop(accelerator, interval_steps=1, slots=SlotPair(folder / "slots"))
    batches = 0
    with distill(loader, teacher, inputs=["x"], outputs="y", ahead=2) as labelled:
        for _ in loop.epochs(EPOCHS):
            for (rows,), labels in loop.batches(labelled):
                assert torch.equal(rows, labels)
                with accelerator.accumulate(model):
                    accelerator.backward((model(rows) - labels).square().mean())
                    optimizer.step()
                    optimizer.zero_grad()
                batches += 1
                if batches == until:
                    return None, 0
        asked = labelled.stats().rows_asked
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]), asked


def test_restart_labels_what_is_left(tmp_path: Path) -> None:
    with LocalTeacher("echo", width=4) as teacher:
        whole, asked = train(tmp_path / "whole", teacher.endpoint, -1)
        assert asked == EPOCHS * ROWS
        train(tmp_path / "broken", teacher.endpoint, 15)  # the fifth batch of the second epoch
        again, asked = train(tmp_path / "broken", teacher.endpoint, -1)
    assert torch.equal(again, whole)
    assert asked == EPOCHS * ROWS - 14 * 4  # what was trained and saved is not labelled again
