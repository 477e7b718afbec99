"""What the page says of Accelerate: an update of accumulated batches weighs all tokens alike."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")

from edl.distill.compress import top_k  # noqa: E402
from edl.distill.losses import token_loss  # noqa: E402


def test_update_of_accumulated_batches() -> None:
    torch.manual_seed(0)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = accelerator.prepare(torch.nn.Linear(4, 7))
    rows, labels = torch.randn(9, 4), top_k(torch.randn(9, 7).numpy(), 3)
    token_loss(model(rows), labels).backward()
    whole = model.weight.grad.clone()
    model.zero_grad()
    for part in (slice(0, 2), slice(2, 9)):
        with accelerator.accumulate(model):
            loss = token_loss(model(rows[part]), labels[part], token_count=9)
            accelerator.backward(loss * accelerator.num_processes * accelerator.gradient_accumulation_steps)
    torch.testing.assert_close(model.weight.grad, whole)
