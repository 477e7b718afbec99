"""What users' models and optimizers do beside the ordinary: the same steps on a rank, and by a plain loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from edl.collective.training.learning_rate import AdaScale
from edl.collective.training.sampler import ElasticSampler
from edl.collective.training.trainer import ElasticTrainer
from tests.jobs.collective.training.runs import data, endless

LENGTH, BATCH, STEPS = 37, 12, 4


@dataclass(frozen=True)
class Case:
    """What to train.

    Attributes:
        around: what is put around the module, innermost first: "ddp", "compile".
        frozen: the first layer does not learn.
        second: the second layer has an optimizer of its own.
        most: max_micro_batch of each rank.
        fail: (step, micro-batch) in which the user's code raises; the step is tried again.
    """

    network: str = "plain"
    around: tuple[str, ...] = ()
    frozen: bool = False
    second: bool = False
    clip_norm: float | None = None
    scaled: bool = False
    dtype: torch.dtype = torch.float64
    most: tuple[int | None, ...] = (2, 3, None)
    fail: tuple[int, int] | None = None


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


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.last(torch.tanh(self.first(inputs)))
        return found


def _made(case: Case) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    torch.manual_seed(11)
    kinds: dict[str, Callable[[], nn.Module]] = {"plain": Plain, "tied": Tied, "branch": Branch}
    model = kinds[case.network]().to(case.dtype)
    if case.frozen:
        model.first.weight.requires_grad_(False)
    parts = [model.first, model.last] if case.second else [model]
    return model, [torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01) for one in parts]


def alone(case: Case) -> list[Tensor]:
    """The parameters after a plain loop, without EDL but for the order of the data."""
    model, optimizers = _made(case)
    inputs, targets = data(LENGTH)
    batches = endless(ElasticSampler(LENGTH, global_batch=BATCH, rank=0, world=1))
    for _ in range(STEPS):
        rows = torch.tensor(next(batches))
        for one in optimizers:
            one.zero_grad()
        nn.functional.mse_loss(model(inputs[rows].to(case.dtype)), targets[rows].to(case.dtype)).backward()
        if case.clip_norm is not None:
            nn.utils.clip_grad_norm_(optimizers[0].param_groups[0]["params"], case.clip_norm)
        for one in optimizers:
            one.step()
    return [one.detach() for one in model.parameters()]


def elastic(group: dist.ProcessGroup, rank: int, world: int, case: Case) -> list[Tensor]:
    """The same on one rank of several."""
    model, optimizers = _made(case)
    wrapped: nn.Module = model
    for around in case.around:
        if around == "ddp":
            unused = case.network == "branch"
            wrapped = DistributedDataParallel(wrapped, process_group=group, find_unused_parameters=unused)
        else:
            wrapped = torch.compile(wrapped, backend="aot_eager")  # type: ignore[assignment]
    sampler = ElasticSampler(LENGTH, global_batch=BATCH, rank=rank, world=world)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0) if case.scaled else None
    trainer = ElasticTrainer(
        wrapped,
        optimizers[0],
        sampler=sampler,
        max_micro_batch=case.most[rank],
        clip_norm=case.clip_norm,
        scaler=scaler,
        group=group,
    )
    inputs, targets = data(LENGTH)
    batches = endless(sampler)
    kept: list[Exception] = []  # as a log handler or a debugger would: with it live the variables of `compute`

    def compute(step: int, rows: Tensor) -> None:
        micros = trainer.micro_batches((inputs[rows].to(case.dtype), targets[rows].to(case.dtype)))
        for number, (some_inputs, some_targets) in enumerate(micros):
            loss = nn.functional.mse_loss(wrapped(some_inputs), some_targets)
            if (step, number) == case.fail and not kept:
                raise MemoryError
            trainer.backward(loss)

    for step in range(STEPS):
        rows = torch.tensor(next(batches))
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
    return [one.detach() for one in model.parameters()]


def refused(group: dist.ProcessGroup, rank: int, world: int, kind: str) -> None:
    """Gradients that would be averaged twice, in part, or over other ranks."""
    model: nn.Module = Plain().double()
    options: dict[str, Any] = {"group": group}
    if kind in ("part", "part, compiled"):
        model.first = DistributedDataParallel(model.first, process_group=group)
    elif kind == "static graph":
        model = DistributedDataParallel(model, process_group=group, static_graph=True)
        options["policy"] = AdaScale()
    elif kind == "sharded in part":
        fully_shard(model.first, mesh=DeviceMesh.from_group(group, "cpu"))
    elif kind.startswith("sub-mesh"):
        alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        ranks = torch.tensor([dist.get_process_group_ranks(group)])
        mesh = DeviceMesh.from_group([alone, group], "cpu", mesh=ranks, mesh_dim_names=("dp", "tp"))
        if kind == "sub-mesh, tensor parallel":
            weight = distribute_tensor(model.first.weight.data, mesh["tp"], [Shard(0)])
            model.first.weight = nn.Parameter(weight)
        fully_shard(model, mesh=mesh["dp"])
    elif kind == "other ranks":
        model = DistributedDataParallel(model, process_group=group)
        del options["group"]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if kind == "part, compiled":
        model = torch.compile(model, backend="eager")  # type: ignore[assignment]
    ElasticTrainer(model, optimizer, global_batch=BATCH, **options)


def sharded(group: dist.ProcessGroup, rank: int, world: int, given_up: int) -> list[Tensor]:
    """The parameters after steps of which each was given up once, after so many of its two micro-batches."""
    model, _ = _made(Case())
    fully_shard(model, mesh=DeviceMesh.from_group(group, "cpu"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    sampler = ElasticSampler(LENGTH, global_batch=BATCH, rank=rank, world=world)
    trainer = ElasticTrainer(model, optimizer, sampler=sampler, max_micro_batch=3, group=group)
    inputs, targets = data(LENGTH)
    batches = endless(sampler)
    for _ in range(STEPS):
        rows = torch.tensor(next(batches))
        for last, again in ((given_up, True), (2, False)):
            for number, (some_inputs, some_targets) in enumerate(trainer.micro_batches((inputs[rows], targets[rows]))):
                loss = nn.functional.mse_loss(model(some_inputs), some_targets)
                if number == last:
                    break
                trainer.backward(loss)
            if again:
                trainer.discard(retry=True)
        trainer.step()
    return [one.full_tensor().detach() for one in model.parameters() if isinstance(one, DTensor)]


def other_group(group: dist.ProcessGroup, rank: int, world: int, place: tuple[int, int] | None) -> None:
    """A step with a sampler that splits batches among the default group's ranks, or says that this is another rank."""
    model = Plain().double()
    where = {} if place is None else {"rank": place[0], "world": place[1]}
    sampler = ElasticSampler(LENGTH, global_batch=BATCH, **where)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = ElasticTrainer(model, optimizer, sampler=sampler, group=group)
    inputs, _ = data(LENGTH)
    for rows in sampler:
        for some in trainer.micro_batches(inputs[rows]):
            trainer.backward(model(some).mean())
        trainer.step()


def normalized(group: dist.ProcessGroup, rank: int, world: int, *, ddp: bool) -> list[Tensor]:
    """Two epochs of a model with BatchNorm1d, whose last batch has too few samples to give each rank two."""
    torch.manual_seed(11)
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
    wrapped = DistributedDataParallel(model, process_group=group) if ddp else model
    sampler = ElasticSampler(LENGTH + 3, global_batch=BATCH, rank=rank, world=world)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = ElasticTrainer(wrapped, optimizer, sampler=sampler, max_micro_batch=3, group=group)
    inputs, targets = data(LENGTH + 3)
    for _ in sampler.epochs(2):
        for rows in sampler:
            for some_inputs, some_targets in trainer.micro_batches((inputs[rows], targets[rows])):
                trainer.backward(nn.functional.mse_loss(wrapped(some_inputs), some_targets))
            trainer.step()
    return [one.detach() for one in model.parameters()]


class Tagger(nn.Module):
    """Scores each token of a padded sentence."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.last = nn.Embedding(20, 6), nn.Linear(6, 5)

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.last(torch.tanh(self.embed(ids)))
        return found


PADDING = -100


def sentences() -> tuple[Tensor, Tensor]:
    """Ids and labels of sentences with 1 to 9 tokens; one has none that counts."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(20, (LENGTH, 9), generator=generator)
    labels = torch.randint(5, (LENGTH, 9), generator=generator)
    lengths = torch.randint(1, 10, (LENGTH,), generator=generator)
    lengths[7] = 0
    labels[torch.arange(9) >= lengths[:, None]] = PADDING
    return ids, labels


def token_loss(scores: Tensor, labels: Tensor) -> Tensor:
    """The mean over tokens that are no padding; 0 where there are none."""
    total = nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten(), ignore_index=PADDING, reduction="sum")
    return total / (labels != PADDING).sum().clamp(min=1)


def tagged_alone() -> list[Tensor]:
    """The parameters after a plain loop whose loss is the mean over the tokens of the whole batch."""
    torch.manual_seed(11)
    model = Tagger().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    ids, labels = sentences()
    for rows in ElasticSampler(LENGTH, global_batch=BATCH, rank=0, world=1):
        optimizer.zero_grad()
        token_loss(model(ids[rows]), labels[rows]).backward()
        optimizer.step()
    return [one.detach() for one in model.parameters()]


def tagged(group: dist.ProcessGroup, rank: int, world: int, *, ddp: bool, counted: bool) -> list[Tensor]:
    """The same on one rank of several; `counted` has no sampler, and shares as uneven as can be."""
    torch.manual_seed(11)
    model = Tagger().double()
    wrapped = DistributedDataParallel(model, process_group=group) if ddp else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    sampler = ElasticSampler(LENGTH, global_batch=BATCH, rank=rank, world=world)
    source: dict[str, Any] = {"global_batch": BATCH} if counted else {"sampler": sampler}
    trainer = ElasticTrainer(wrapped, optimizer, max_micro_batch=2, group=group, **source)
    ids, labels = sentences()
    whole = ElasticSampler(LENGTH, global_batch=BATCH, rank=0, world=1)
    for rows in whole if counted else sampler:
        mine = rows
        if counted:
            mine = rows[: len(rows) // 3] if rank == 0 else rows[len(rows) // 3 :] if rank == world - 1 else rows[:1]
        count = 0 if counted and 0 < rank < world - 1 else None
        if count is None and not mine:
            mine, count = rows[:1], 0
        weights = (labels[mine] != PADDING).sum(1)
        for some_ids, some_labels in trainer.micro_batches((ids[mine], labels[mine]), count, weights=weights):
            trainer.backward(token_loss(wrapped(some_ids), some_labels))
        trainer.step()
    return [one.detach() for one in model.parameters()]


def weighed_wrongly(group: dist.ProcessGroup, rank: int, world: int, weights: list[float]) -> None:
    """A step in which the last rank's weights are these."""
    model = Plain().double()
    trainer = ElasticTrainer(model, torch.optim.SGD(model.parameters(), lr=0.1), global_batch=2 * world, group=group)
    inputs, _ = data(2)
    trainer.micro_batches(inputs, weights=weights if rank == world - 1 else [0.0, 0.0])
