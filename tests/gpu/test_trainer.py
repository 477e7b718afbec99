"""`ElasticTrainer` computes the plain loop's gradients under what people train with on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from edl.collective import ElasticTrainer

ROWS = 48
MICRO = 16


class Model(nn.Module):
    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(64, 128)
        self.block = nn.Sequential(nn.Linear(128, 128), nn.GELU(), nn.LayerNorm(128))
        self.last = nn.Linear(128, 10)
        self.checkpointed = checkpointed

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.first(inputs))
        hidden = checkpoint(self.block, hidden, use_reentrant=False) if self.checkpointed else self.block(hidden)
        return self.last(hidden)


@pytest.fixture(scope="module")
def world(device: torch.device, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A process group of this process alone: NCCL on a GPU, gloo on a CPU."""
    store = tmp_path_factory.mktemp("group") / "store"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def build(device: torch.device, checkpointed: bool) -> Model:
    torch.manual_seed(4)
    return Model(checkpointed).to(device)


def gradients(model: nn.Module) -> list[torch.Tensor]:
    found = []
    for parameter in model.parameters():
        assert parameter.grad is not None
        gradient: Any = parameter.grad
        found.append((gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient).detach().clone())
    return found


def fully_shard(model: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import fully_shard as shard

    shard(model)
    return model


CASES: dict[str, tuple[Callable[[Any], Any], torch.dtype | None, bool]] = {
    "plain": (lambda model: model, None, False),
    "bfloat16 autocast": (lambda model: model, torch.bfloat16, False),
    "gradient checkpointing": (lambda model: model, None, True),
    "FSDP2": (fully_shard, None, False),
}


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_the_plain_loops(device: torch.device, world: None, case: str) -> None:
    """A batch in three micro-batches has the gradient of one pass, up to the rounding of sums."""
    wrap, autocast, checkpointed = CASES[case]
    _compare(device, wrap, autocast, checkpointed)


def test_compiled_model(gpu: torch.device, world: None) -> None:
    """On a GPU alone: building kernels for a CPU takes minutes."""
    _compare(gpu, torch.compile, None, False)


def _compare(device: torch.device, wrap: Callable[[Any], Any], autocast: torch.dtype | None, again: bool) -> None:
    inputs = torch.randn(ROWS, 64, generator=torch.Generator().manual_seed(8)).to(device)
    targets = torch.arange(ROWS, device=device) % 10

    def loss_of(model: nn.Module, part: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device.type, dtype=autocast, enabled=autocast is not None):
            return nn.functional.cross_entropy(model(part), labels)

    plain = build(device, again)
    loss_of(plain, inputs, targets).backward()
    model = wrap(build(device, again))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = ElasticTrainer(model, optimizer, global_batch=ROWS, max_micro_batch=MICRO)
    for part, labels in trainer.micro_batches((inputs, targets)):
        trainer.backward(loss_of(model, part, labels))
    trainer.synchronize()
    tolerance = {"rtol": 2e-2, "atol": 2e-3} if autocast else {"rtol": 1e-4, "atol": 1e-6}
    for found, wanted in zip(gradients(model), gradients(plain), strict=True):
        torch.testing.assert_close(found, wanted, **tolerance)


def test_float16_with_a_grad_scaler(gpu: torch.device, world: None, tmp_path: Path) -> None:
    """The scale falls after an overflow, the step is left out, and training goes on."""
    model = build(gpu, False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**24)
    trainer = ElasticTrainer(model, optimizer, global_batch=ROWS, max_micro_batch=MICRO, scaler=scaler)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for number in range(12):
        inputs = torch.randn(ROWS, 64, generator=torch.Generator().manual_seed(number)).to(gpu)
        for part in trainer.micro_batches(inputs):
            with torch.autocast("cuda", dtype=torch.float16):
                loss = nn.functional.cross_entropy(model(part), torch.zeros(len(part), dtype=torch.int64, device=gpu))
            trainer.backward(loss)
        trainer.step()
    assert scaler.get_scale() < 2.0**24
    assert any(not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
