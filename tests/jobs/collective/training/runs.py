"""Training runs for the tests of the trainer: the same steps by EDL on a rank, and by a plain loop in one process."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from edl.collective.training.batch_size.objective import AutoBatch
from edl.collective.training.learning_rate import AdaScale, Policy, SquareRoot
from edl.collective.training.sampler import ElasticSampler
from edl.collective.training.split import rank_share
from edl.collective.training.trainer import ElasticTrainer


@dataclass(frozen=True)
class Run:
    """What to train.

    Attributes:
        most: max_micro_batch of each rank.
        wrapped: in DDP.
        sampled: batches come with the sampler; otherwise the ranks bring what they like, which is `rows` of each rank.
        from_step, state: resume with that state of everything.
    """

    length: int = 37
    batch: int = 12
    steps: int = 3
    most: tuple[int | None, ...] = (None,) * 5
    wrapped: bool = True
    optimizer: str = "sgd"
    clip_norm: float | None = None
    sampled: bool = True
    rows: tuple[int, ...] = ()
    scaled: bool = False
    policy: Policy = None
    state: dict[str, Any] | None = field(default=None, compare=False)


def data(length: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(length, 6, generator=generator, dtype=torch.float64)
    return inputs, torch.randn(length, 2, generator=generator, dtype=torch.float64)


def endless(sampler: ElasticSampler) -> Iterator[list[int]]:
    for _ in sampler.epochs(1000):
        yield from sampler


def network() -> nn.Module:
    torch.manual_seed(11)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 2)).double()


def optimizer_of(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    if kind == "adam":
        return torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def alone(run: Run) -> list[Tensor]:
    """The parameters after a plain loop, without EDL but for the order of the data."""
    model = network()
    optimizer = optimizer_of(run.optimizer, model)
    inputs, targets = data(run.length)
    batches = endless(ElasticSampler(run.length, global_batch=run.batch, rank=0, world=1))
    place = 0
    for _ in range(run.steps):
        if run.sampled:
            rows = torch.tensor(next(batches))
        else:
            rows = torch.arange(place, place + sum(run.rows)) % run.length
            place += sum(run.rows)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs[rows]), targets[rows]).backward()
        if run.clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), run.clip_norm)
        optimizer.step()
    return [one.detach() for one in model.parameters()]


def elastic(group: dist.ProcessGroup, rank: int, world: int, run: Run) -> dict[str, Any]:
    """The same on one rank of several: its parameters, how often it synchronized, and its state."""
    model: nn.Module = network()
    reductions: list[int] = []
    if run.wrapped:
        model = DistributedDataParallel(model, process_group=group)
        model.register_comm_hook(None, _counting(reductions, group, world))
    optimizer = optimizer_of(run.optimizer, model)
    inputs, targets = data(run.length)
    sampler = ElasticSampler(run.length, global_batch=run.batch, rank=rank, world=world)
    trainer = ElasticTrainer(
        model,
        optimizer,
        sampler=sampler if run.sampled else None,
        global_batch=None if run.sampled else run.batch,
        max_micro_batch=run.most[rank],
        clip_norm=run.clip_norm,
        policy=run.policy,
        scaler=torch.amp.GradScaler("cpu", init_scale=64.0) if run.scaled else None,
        group=group,
    )
    if run.state is not None:
        model.load_state_dict(run.state["model"])
        optimizer.load_state_dict(run.state["optimizer"])
        sampler.load_state_dict(run.state["sampler"])
        trainer.load_state_dict(run.state["trainer"])
    micro_rows: list[list[int]] = []
    batches = endless(sampler)
    place = 0
    with mock.patch("torch.distributed.all_reduce", _spying(reductions, run.wrapped)):
        for _ in range(run.steps):
            if run.sampled:
                rows = torch.tensor(next(batches))
            else:
                begin = place + sum(run.rows[:rank])
                rows = torch.arange(begin, begin + run.rows[rank]) % run.length
                place += sum(run.rows)
            micro_rows.append([])
            for some_inputs, some_targets in trainer.micro_batches((inputs[rows], targets[rows])):
                micro_rows[-1].append(len(some_inputs))
                trainer.backward(nn.functional.mse_loss(model(some_inputs), some_targets))
            trainer.step()
    return {
        "parameters": [one.detach() for one in model.parameters()],
        "synchronized": len(reductions),
        "micro_rows": micro_rows,
        "samples": trainer.samples,
        "noise": (trainer.noise.variance, trainer.noise.square),
        "state": {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "sampler": sampler.state_dict(),
            "trainer": trainer.state_dict(),
        },
    }


def noise(group: dist.ProcessGroup, rank: int, world: int, most: tuple[int | None, ...]) -> tuple[float, float]:
    """Measured over many steps of a problem where it is known: variance 10, squared norm 5."""
    model = DistributedDataParallel(_Line(), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    trainer = ElasticTrainer(
        model, optimizer, global_batch=13, max_micro_batch=most[rank], policy=AdaScale(), group=group
    )
    generator = torch.Generator().manual_seed(1)
    truth = torch.tensor([2.0, -1.0], dtype=torch.float64)
    for _ in range(250):
        spread = torch.tensor([3.0, 1.0], dtype=torch.float64)
        targets = truth + spread * torch.randn(13, 2, generator=generator, dtype=torch.float64)
        mine = rank_share(13, world, rank)
        for some in trainer.micro_batches(targets[mine.start : mine.stop]):
            trainer.backward(model(some))
        trainer.step()
    return trainer.noise.variance, trainer.noise.square


class _Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(2, dtype=torch.float64))

    def forward(self, targets: Tensor) -> Tensor:
        return 0.5 * (self.x - targets).square().sum(1).mean()


def automatic(group: dist.ProcessGroup, rank: int, world: int) -> tuple[list[int], list[int], int]:
    """An epoch with an automatic batch, in which each rank reads three batches further ahead than the one before it.

    Returns:
        The rows that this rank trained step by step, their indices, and the last global batch.
    """
    generator = torch.Generator().manual_seed(4)
    targets = 3.0 * torch.randn(1200, 2, generator=generator, dtype=torch.float64)
    model = DistributedDataParallel(_Line(), process_group=group)
    sampler = ElasticSampler(len(targets), global_batch=8, rank=rank, world=world)
    trainer = ElasticTrainer(
        model,
        torch.optim.SGD(model.parameters(), lr=1e-4),
        sampler=sampler,
        policy=SquareRoot(),
        auto=AutoBatch(8, 40, every_steps=6),
        group=group,
    )
    batches = iter(sampler)
    ahead = deque(itertools.islice(batches, 3 * rank))
    sizes: list[int] = []
    seen: list[int] = []
    while not sampler.finished:
        ahead.extend(itertools.islice(batches, 1))
        rows = ahead.popleft()
        for some in trainer.micro_batches(targets[rows]):
            trainer.backward(model(some))
        sizes.append(sampler.share_rows)
        seen += rows[: sampler.share_rows]
        trainer.step()
    return sizes, seen, sampler.global_batch


def sharded(group: dist.ProcessGroup, rank: int, world: int, run: Run) -> list[Tensor]:
    """The parameters after training with FSDP2, whose forward waits for the other ranks."""
    model = network()
    fully_shard(model, mesh=DeviceMesh.from_group(group, "cpu"))
    optimizer = optimizer_of(run.optimizer, model)
    inputs, targets = data(run.length)
    sampler = ElasticSampler(run.length, global_batch=run.batch, rank=rank, world=world)
    trainer = ElasticTrainer(model, optimizer, sampler=sampler, max_micro_batch=run.most[rank], group=group)
    batches = endless(sampler)
    for _ in range(run.steps):
        rows = torch.tensor(next(batches))
        for some_inputs, some_targets in trainer.micro_batches((inputs[rows], targets[rows])):
            trainer.backward(nn.functional.mse_loss(model(some_inputs), some_targets))
        trainer.step()
    return [one.full_tensor().detach() for one in model.parameters() if isinstance(one, DTensor)]


def _counting(reductions: list[int], group: dist.ProcessGroup, world: int) -> Any:
    def hook(_, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are strings
        reductions.append(bucket.index())
        sent = dist.all_reduce(bucket.buffer().div_(world), group=group, async_op=True)
        return sent.get_future().then(lambda future: future.value()[0])

    return hook


def _spying(reductions: list[int], wrapped: bool) -> Any:
    real = dist.all_reduce

    def spy(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not wrapped:
            reductions.append(tensor.numel())
        return real(tensor, *args, **kwargs)

    return spy
