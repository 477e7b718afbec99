"""The same steps by a plain loop and by EDL on a rank of several, with models and optimizers of every kind."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from edl.collective.training.learning_rate import AdaScale, SquareRoot
from edl.collective.training.sampler import ElasticSampler
from edl.collective.training.trainer import ElasticTrainer
from edl.collective.training.tuner import AutoBatch


@dataclass(frozen=True)
class Case:
    """What to train.

    Attributes:
        most: max_micro_batch of each rank.
        around: what is put around the module, innermost first: "ddp", "compile"; or "fsdp" alone.
        rows: of each rank, which bring what they like; without, batches come with a sampler.
        frozen: the first layer does not learn.
        second: the last layer has an optimizer of its own.
        fail: (step, micro-batch) in which the user's code raises; the step is tried again.
        give_up: each step is given up once after so many micro-batches.
        state: resume with that state of everything.
    """

    network: str = "plain"
    around: tuple[str, ...] = ("ddp",)
    length: int = 37
    batch: int = 12
    steps: int = 3
    most: tuple[int | None, ...] = (2, 3, None, 1, 4)
    optimizer: str = "sgd"
    clip_norm: float | None = None
    rows: tuple[int, ...] = ()
    scaled: bool = False
    frozen: bool = False
    second: bool = False
    fail: tuple[int, int] | None = None
    give_up: int | None = None
    state: dict[str, Any] | None = field(default=None, compare=False)


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.last(self.norm(torch.tanh(self.first(inputs))))
        return found


class Tied(nn.Module):
    """Two layers that share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, again = nn.Linear(6, 6), nn.Linear(6, 2), nn.Linear(6, 6)
        again.weight = self.first.weight
        self.again = again

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.last(torch.tanh(self.again(torch.tanh(self.first(inputs)))))
        return found


class Branch(nn.Module):
    """A layer that few samples use, so that ranks and micro-batches may have no gradient of it; one that none uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.never = nn.Linear(6, 2), nn.Linear(6, 2), nn.Linear(6, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.first(inputs)
        some = inputs[:, :1] > 1.2
        return torch.where(some, found + self.last(inputs), found) if some.any() else found


def data(length: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(length, 6, generator=generator, dtype=torch.float64)
    return inputs, torch.randn(length, 2, generator=generator, dtype=torch.float64)


def endless(sampler: ElasticSampler) -> Iterator[list[int]]:
    for _ in sampler.epochs(1000):
        yield from sampler


def _made(case: Case) -> nn.Module:
    torch.manual_seed(11)
    kinds: dict[str, Callable[[], nn.Module]] = {"plain": Plain, "tied": Tied, "branch": Branch}
    model = kinds[case.network]().double()
    if case.frozen:
        model.first.weight.requires_grad_(False)
    return model


def _optimizers(case: Case, model: nn.Module) -> list[torch.optim.Optimizer]:
    parts = [model.first, model.last] if case.second else [model]
    if case.optimizer == "adam":
        return [torch.optim.AdamW(one.parameters(), lr=0.05, weight_decay=0.1) for one in parts]
    return [torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01) for one in parts]


def alone(case: Case) -> list[Tensor]:
    """The parameters after a plain loop, without EDL but for the order of the data."""
    model = _made(case)
    optimizers = _optimizers(case, model)
    inputs, targets = data(case.length)
    batches = endless(ElasticSampler(case.length, global_batch=case.batch, rank=0, world=1))
    for step in range(case.steps):
        begin, total = step * sum(case.rows), sum(case.rows)
        rows = torch.arange(begin, begin + total) % case.length if case.rows else torch.tensor(next(batches))
        for one in optimizers:
            one.zero_grad()
        nn.functional.mse_loss(model(inputs[rows]), targets[rows]).backward()
        if case.clip_norm is not None:
            nn.utils.clip_grad_norm_(optimizers[0].param_groups[0]["params"], case.clip_norm)
        for one in optimizers:
            one.step()
    return [one.detach() for one in model.parameters()]


def _wrapped(case: Case, model: nn.Module, group: dist.ProcessGroup, reductions: list[int], world: int) -> nn.Module:
    for around in case.around:
        if around == "ddp":
            unused = case.network == "branch"
            model = DistributedDataParallel(model, process_group=group, find_unused_parameters=unused)
            model.register_comm_hook(None, _counting(reductions, group, world))
        elif around == "fsdp":
            fully_shard(model, mesh=DeviceMesh.from_group(group, "cpu"))
        else:
            model = torch.compile(model, backend="aot_eager")  # type: ignore[assignment]
    return model


def elastic(group: dist.ProcessGroup, rank: int, world: int, case: Case) -> dict[str, Any]:
    """The same on one rank of several: its parameters, how often it synchronized, and its state."""
    inner = _made(case)
    reductions: list[int] = []
    model = _wrapped(case, inner, group, reductions, world)
    optimizers = _optimizers(case, inner)
    sampler = ElasticSampler(case.length, global_batch=case.batch, rank=rank, world=world)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0) if case.scaled else None
    source: dict[str, Any] = {"global_batch": case.batch} if case.rows else {"sampler": sampler}
    limits = {"max_micro_batch": case.most[rank], "clip_norm": case.clip_norm}
    trainer = ElasticTrainer(model, optimizers[0], scaler=scaler, group=group, **source, **limits)
    fields = {"model": inner, "optimizer": optimizers[0], "sampler": sampler, "trainer": trainer}
    if case.state is not None:
        for name, one in fields.items():
            one.load_state_dict(case.state[name])
    inputs, targets = data(case.length)
    batches = endless(sampler)
    micro_rows: list[int] = []
    kept: list[Exception] = []  # as a log handler or a debugger would: with it live the variables of `compute`

    def compute(step: int, rows: Tensor, last: int | None = None) -> None:
        micros = trainer.micro_batches((inputs[rows], targets[rows]))
        for number, (some_inputs, some_targets) in enumerate(micros):
            micro_rows.append(len(some_inputs))
            loss = nn.functional.mse_loss(model(some_inputs), some_targets)
            if (step, number) == case.fail and not kept:
                raise MemoryError
            if number == last:
                return
            trainer.backward(loss)

    with mock.patch("torch.distributed.all_reduce", _spying(reductions, "ddp" in case.around)):
        for step in range(case.steps):
            begin = step * sum(case.rows) + sum(case.rows[:rank])
            own = torch.arange(begin, begin + case.rows[rank]) % case.length if case.rows else None
            rows = torch.tensor(next(batches)) if own is None else own
            if case.give_up is not None:
                compute(step, rows, case.give_up)
                trainer.discard(retry=True)
            try:
                compute(step, rows)
            except MemoryError as exc:
                kept.append(exc)
                trainer.discard(retry=True)
                compute(step, rows)
            if case.second:
                trainer.synchronize()
                if scaler is None:
                    optimizers[1].step()
                else:
                    scaler.step(optimizers[1])
                optimizers[1].zero_grad()
            trainer.step()
    assert bool(kept) == (case.fail is not None)
    parameters = [one.full_tensor() if isinstance(one, DTensor) else one for one in inner.parameters()]
    return {
        "parameters": [one.detach() for one in parameters],
        "synchronized": len(reductions),
        "largest": max(micro_rows, default=0),
        "samples": trainer.samples,
        "state": None if "fsdp" in case.around else {name: one.state_dict() for name, one in fields.items()},
    }


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


def refused(group: dist.ProcessGroup, rank: int, world: int, kind: str) -> None:
    """Gradients that would be averaged twice, in part, or over other ranks."""
    model: nn.Module = Plain().double()
    options: dict[str, Any] = {"group": group, "global_batch": 12}
    if kind in ("part", "part, compiled"):
        model.first = DistributedDataParallel(model.first, process_group=group)
    elif kind == "static graph":
        model = DistributedDataParallel(model, process_group=group, static_graph=True)
        options["policy"] = AdaScale()
    elif kind == "sharded in part":
        fully_shard(model.first, mesh=DeviceMesh.from_group(group, "cpu"))
    elif kind.startswith("sub-mesh"):
        single = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        ranks = torch.tensor([dist.get_process_group_ranks(group)])
        mesh = DeviceMesh.from_group([single, group], "cpu", mesh=ranks, mesh_dim_names=("dp", "tp"))
        if kind == "sub-mesh, tensor parallel":
            weight = distribute_tensor(model.first.weight.data, mesh["tp"], [Shard(0)])
            model.first.weight = nn.Parameter(weight)
        fully_shard(model, mesh=mesh["dp"])
    elif kind == "other ranks":
        model = DistributedDataParallel(model, process_group=group)
        del options["group"]
    elif kind.startswith("sampler"):
        where = {"rank": 0, "world": 1} if kind == "sampler of rank 0" else {}
        options = {"group": group, "sampler": ElasticSampler(37, global_batch=12, **where)}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if kind == "part, compiled":
        model = torch.compile(model, backend="eager")  # type: ignore[assignment]
    trainer = ElasticTrainer(model, optimizer, **options)
    if kind.startswith("sampler"):
        for rows in options["sampler"]:
            trainer.micro_batches(data(37)[0][rows])


class Line(nn.Module):
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
    model = DistributedDataParallel(Line(), process_group=group)
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


PADDING = -100


def _tagging() -> tuple[nn.Module, Tensor, Tensor]:
    """A model that scores each token, and sentences with 1 to 9 tokens; one has none that counts."""
    torch.manual_seed(11)
    model = nn.Sequential(nn.Embedding(20, 6), nn.Tanh(), nn.Linear(6, 5)).double()
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(20, (37, 9), generator=generator)
    labels = torch.randint(5, (37, 9), generator=generator)
    lengths = torch.randint(1, 10, (37,), generator=generator)
    lengths[7] = 0
    labels[torch.arange(9) >= lengths[:, None]] = PADDING
    return model, ids, labels


def _token_loss(scores: Tensor, labels: Tensor) -> Tensor:
    """The mean over tokens that are no padding; 0 where there are none."""
    total = nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten(), ignore_index=PADDING, reduction="sum")
    return total / (labels != PADDING).sum().clamp(min=1)


def tagged_alone() -> list[Tensor]:
    """The parameters after a plain loop whose loss is the mean over the tokens of the whole batch."""
    model, ids, labels = _tagging()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    for rows in ElasticSampler(37, global_batch=12, rank=0, world=1):
        optimizer.zero_grad()
        _token_loss(model(ids[rows]), labels[rows]).backward()
        optimizer.step()
    return [one.detach() for one in model.parameters()]


def tagged(group: dist.ProcessGroup, rank: int, world: int, ddp: bool, counted: bool) -> list[Tensor]:
    """The same on one rank of several; `counted` has no sampler, and shares as uneven as can be."""
    model, ids, labels = _tagging()
    wrapped = DistributedDataParallel(model, process_group=group) if ddp else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    sampler = ElasticSampler(37, global_batch=12, rank=rank, world=world)
    source: dict[str, Any] = {"global_batch": 12} if counted else {"sampler": sampler}
    trainer = ElasticTrainer(wrapped, optimizer, max_micro_batch=2, group=group, **source)
    whole = ElasticSampler(37, global_batch=12, rank=0, world=1)
    for rows in whole if counted else sampler:
        mine = rows
        if counted:
            mine = rows[: len(rows) // 3] if rank == 0 else rows[len(rows) // 3 :] if rank == world - 1 else rows[:1]
        count = 0 if counted and 0 < rank < world - 1 else None
        if count is None and not mine:
            mine, count = rows[:1], 0
        weights = (labels[mine] != PADDING).sum(1)
        for some_ids, some_labels in trainer.micro_batches((ids[mine], labels[mine]), count, weights=weights):
            trainer.backward(_token_loss(wrapped(some_ids), some_labels))
        trainer.step()
    return [one.detach() for one in model.parameters()]
