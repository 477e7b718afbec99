"""One optimizer step in progress: how many samples it has over all ranks, and how this rank splits its share.

A step with a sampler knows every rank's share in advance. If the ranks need more information, they exchange that
information when the step begins. They also exchange whether a rank refuses its batch; if so, all ranks raise the same
error, and none waits for a rank that failed.
"""

from __future__ import annotations

import itertools
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from edl.collective.ranks import exchange, gather_bytes, rank_of, world_of
from edl.collective.training.sampler import ElasticSampler, count_rows, micro_batch_sizes
from edl.errors import SettingsError

ONE_ROW: Final = (
    "BatchNorm1d cannot be trained with one row, whose variance is not defined; SyncBatchNorm and GroupNorm can"
)


@dataclass(frozen=True)
class StepRequirements:
    """Requirements of the module and the policy for a step on this rank."""

    most: int | None  # largest number of rows in a micro-batch, None for no limit
    parts: int  # groups of samples that the step must have over all ranks, if there are enough samples
    all_backward: bool  # whether every rank needs a backward pass, even without a sample
    lockstep: bool  # whether all ranks need the same number of micro-batches
    least: int = 1  # fewest rows that a micro-batch should have
    strict: bool = False  # whether the module fails with fewer rows than `least`


@dataclass
class TrainingStep:
    """A step in progress."""

    samples: int  # samples of the global batch
    world: int  # number of ranks
    sizes: list[int]  # rows of this rank's micro-batches. A size of 0 means a backward pass without weight.
    left: int = field(init=False)  # micro-batches whose backward pass is still due
    weights: list[float] = field(init=False)  # of its micro-batches, by default rows; the sum over ranks is `samples`
    due: int | None = None  # rows of the micro-batch that the user is working on, None if there is none
    mark: tuple[int, int, int] | None = None  # `ElasticSampler.mark` when the step began, None without a sampler
    begun: bool = False  # whether a backward pass has begun
    unscaled: bool = False  # whether the gradients were divided by the loss scale
    synchronized: bool = False  # whether the gradients are those of the global batch
    stand_in: int = 1  # rows of the batch with which a micro-batch of size 0 is computed
    began_at: float = field(default_factory=time.perf_counter)  # `time.perf_counter()` when the step began

    def __post_init__(self) -> None:
        self.left = len(self.sizes)
        self.weights = [float(size) for size in self.sizes]

    @property
    def due_weight(self) -> float:
        return self.weights[len(self.sizes) - self.left]


def begin_step(
    batch: Any,
    rows: int | None,
    weights: Tensor | Sequence[float] | None,
    sampler: ElasticSampler | None,
    how: StepRequirements,
    group: dist.ProcessGroup | None,
    device: torch.device,
) -> TrainingStep:
    """Begin a step over the batches that the ranks have, or over the sampler's next global batch.

    `rows` is the number of rows that count in this rank's batch, according to the user. `device` is a device from which
    the group's backend can send. Collective if there is no sampler, if there are weights, or if all ranks need the same
    number of micro-batches. If the call is collective and batches or weights cannot be used, all ranks raise the same
    SettingsError.
    """
    world = world_of(group)
    given = mine = 0
    own_weight, fault = 0.0, ""
    try:
        given = count_rows(batch)
        mine = _own_rows(given, rows, sampler, group)
        if weights is not None:
            weights = torch.as_tensor(weights, dtype=torch.float64, device="cpu").reshape(-1)
            own_weight = _sum_weights(weights, given, mine, rank_of(group))
    except SettingsError as exc:
        fault = str(exc)
    sizes = _sizes(mine, world, how)
    samples = sampler.batch_samples if sampler is not None else 0
    if sampler is None or weights is not None or how.lockstep:
        # Weights are exchanged as bits, so that their sum is the same on every rank and counts of tokens stay exact.
        (bits,) = struct.unpack("<q", struct.pack("<d", own_weight))
        everyone = exchange([bool(fault), mine, len(sizes), given, bits], group, device)
        if world > 1 and any(failed for failed, *_ in everyone):
            fault = next(filter(None, gather_bytes(fault.encode(), group))).decode()
    else:
        everyone = [[bool(fault), mine, len(sizes), given, 0]]
    if fault:
        raise SettingsError(fault)
    if sampler is None:
        samples = sum(row[1] for row in everyone)
        _check_counted(everyone, samples, how)
    else:
        _check_rows([samples], how)
    if how.lockstep and world > 1:
        sizes = micro_batch_sizes(mine, how.most, max(row[2] for row in everyone), how.least)
    mark = None if sampler is None else sampler.mark
    idle = [0] if sampler is not None else [0] * min(given, 1)
    step = TrainingStep(samples, world, sizes or idle, mark=mark, stand_in=min(how.least, given))
    if isinstance(weights, Tensor):
        total = sum(struct.unpack("<d", struct.pack("<q", row[4]))[0] for row in everyone)
        if not total:
            raise SettingsError("weights= are 0 for all rows of all ranks: there is nothing to train in this step")
        ends = itertools.accumulate(step.sizes)
        parts = [float(weights[end - size : end].sum()) for size, end in zip(step.sizes, ends, strict=True)]
        step.weights = [part * (samples / total) for part in parts]
    return step


def _own_rows(given: int, rows: int | None, sampler: ElasticSampler | None, group: dist.ProcessGroup | None) -> int:
    rank, world = rank_of(group), world_of(group)
    if sampler is None:
        if rows is not None and not 0 <= rows <= given:
            raise SettingsError(f"rows={rows} of a batch of {given} on rank {rank}: must be from 0 to {given}")
        return given if rows is None else rows
    mine, samples = sampler.share_rows, sampler.batch_samples
    if sampler.place != (rank, world):
        raise SettingsError(
            f"the sampler gives the share of rank {sampler.place[0]} of {sampler.place[1]}, but this is rank "
            f"{rank} of {world} in the trainer's group: iterate over the sampler in this world, or give it "
            "the rank= and world= of the group"
        )
    if rows is not None and rows != mine:
        raise SettingsError(
            f"rows={rows} on rank {rank}, but the sampler says that {mine} rows of this batch count: call "
            "micro_batches(batch), since rows= is for training without a sampler"
        )
    if given != sampler.handed_rows or not samples:
        raise SettingsError(
            f"a batch of {given} rows on rank {rank}, but this rank's share is {mine} of {samples}: use "
            "DataLoader(batch_sampler=sampler), and let only step() advance it"
        )
    return mine


def _sum_weights(weights: Tensor, given: int, mine: int, rank: int) -> float:
    """Return the weight of this rank's share. Rows passed in place of an empty share are ignored."""
    if len(weights) != given or not bool((weights.isfinite() & (weights >= 0)).all()):
        raise SettingsError(
            f"weights= of rank {rank}: expected one finite, non-negative number per row of the batch"
            + (f"; got {len(weights)} for {given} rows" if len(weights) != given else "")
        )
    return float(weights[:mine].sum())


def _sizes(mine: int, world: int, how: StepRequirements) -> list[int]:
    # One group of samples cannot tell noise from gradient. Several ranks are several groups already.
    return micro_batch_sizes(mine, how.most, min(mine // how.least, how.parts) if world == 1 else 1, how.least)


def _check_counted(everyone: Sequence[Sequence[int]], samples: int, how: StepRequirements) -> None:
    """Refuse batches that cannot be trained together. Every rank knows all sizes, so all ranks refuse alike."""
    _check_rows([mine or given for _, mine, _, given, _ in everyone if given], how)
    if how.all_backward and not all(given for _, _, _, given, _ in everyone):
        raise SettingsError(
            "a rank has no row, but the module needs a backward pass on every rank: pass a batch of one row with "
            "micro_batches(batch, rows=0), as ElasticSampler does"
        )
    if not samples:
        raise SettingsError("no rank has a sample for this step")


def _check_rows(counts: list[int], how: StepRequirements) -> None:
    """Refuse shares that the module cannot be trained on. All ranks refuse, so none waits for a failed rank."""
    if how.strict and any(0 < count < how.least for count in counts):
        raise SettingsError(
            f"a rank has one row for this step, and {ONE_ROW}: give every rank {how.least} rows or none (for the "
            'last batch of an epoch, use ElasticSampler(tail="drop") or tail="pad")'
        )
