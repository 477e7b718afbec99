"""One optimizer step in progress: how many samples it has over all ranks, and how this rank cuts its share.

A step with a sampler knows every rank's share in advance; a step without one counts the rows of all ranks by a small
exchange. The averaging and the update itself are in `trainer`.
"""

from __future__ import annotations

import itertools
import math
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from edl.collective.ranks import exchange, rank_of, world_of
from edl.collective.training.sampler import ElasticSampler, micro_batch_sizes
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
    sizes: list[int]  # rows of this rank's micro-batches. A size of 0 stands for a backward pass without weight.
    left: int = field(init=False)  # micro-batches whose backward pass is still to come
    # Weights of this rank's micro-batches, by default their rows. Over all ranks they add up to `samples`.
    weights: list[float] = field(init=False)
    due: int | None = None  # rows of the micro-batch that the user is working on, None if there is none
    mark: tuple[int, int, int] | None = None  # `ElasticSampler.mark` when the step began, None without a sampler
    begun: bool = False  # whether a backward pass has begun
    synchronized: bool = False  # whether the gradients are those of the global batch
    stand_in: int = 1  # rows of the batch with which a micro-batch of size 0 is computed
    began_at: float = field(default_factory=time.perf_counter)  # `time.perf_counter()` when the step began

    def __post_init__(self) -> None:
        self.left = len(self.sizes)
        self.weights = [float(size) for size in self.sizes]

    @property
    def due_weight(self) -> float:
        """The weight of the micro-batch whose backward pass comes next."""
        return self.weights[len(self.sizes) - self.left]


def begin_sampled_step(
    given: int,
    counted: int | None,
    sampler: ElasticSampler,
    how: StepRequirements,
    group: dist.ProcessGroup | None,
    device: torch.device,
) -> TrainingStep:
    """Begin a step over the sampler's next global batch.

    Nothing is sent, because every rank can compute every share, unless the ranks must agree on the number of
    micro-batches. This rank's batch has `given` rows, of which `counted` count according to the user, or as many as the
    sampler says if None. `device` is one from which the group's backend can send.

    Raises:
        SettingsError: The rows are not those that the sampler gave.
    """
    mine, samples, world = sampler.share_rows, sampler.batch_samples, world_of(group)
    if sampler.place != (rank_of(group), world):
        raise SettingsError(
            f"the sampler gives the share of rank {sampler.place[0]} of {sampler.place[1]}, but this is rank "
            f"{rank_of(group)} of {world} in the trainer's group: iterate over the sampler in this world, or give it "
            "the rank= and world= of the group"
        )
    if counted is not None and counted != mine:
        raise SettingsError(
            f"rows={counted}, but the sampler says that {mine} rows of this batch count: call micro_batches(batch), "
            "since rows= is for training without a sampler"
        )
    if given != sampler.handed_rows or not samples:
        raise SettingsError(
            f"a batch of {given} rows, but this rank's share is {mine} of {samples}: use DataLoader(batch_sampler="
            "sampler), and let only step() advance it"
        )
    _check_rows([samples], how)
    sizes = _sizes(mine, world, how)
    if how.lockstep and world > 1:
        counts = exchange([len(sizes)], group, device)
        sizes = micro_batch_sizes(mine, how.most, max(count for (count,) in counts), how.least)
    return TrainingStep(samples, world, sizes or [0], mark=sampler.mark, stand_in=min(how.least, given))


def begin_counted_step(
    given: int, mine: int, how: StepRequirements, group: dist.ProcessGroup | None, device: torch.device
) -> TrainingStep:
    """Begin a step over the batches that the ranks have, with `mine` of this rank's `given` rows counting. Collective.

    Raises:
        SettingsError: No rank has a sample, or a rank has no row but must run a backward pass, or has one row but its
            module needs more, or its `mine` is not from 0 to `given`; raised on all ranks alike.
    """
    world = world_of(group)
    sizes = _sizes(min(max(mine, 0), given), world, how)
    everyone = exchange([mine, len(sizes), given], group, device)
    for rank, (rows, _, most) in enumerate(everyone):
        if not 0 <= rows <= most:
            raise SettingsError(f"rows={rows} of a batch of {most} on rank {rank}: must be from 0 to {most}")
    samples = sum(rows for rows, _, _ in everyone)
    _check_rows([rows or rows_given for rows, _, rows_given in everyone if rows_given], how)
    if how.lockstep and world > 1:
        sizes = micro_batch_sizes(mine, how.most, max(count for _, count, _ in everyone), how.least)
    if how.all_backward and not all(rows for _, _, rows in everyone):
        raise SettingsError(
            "a rank has no row, but the module needs a backward on every rank: give it a batch of one row with "
            "micro_batches(batch, rows=0), as ElasticSampler does"
        )
    if not samples:
        raise SettingsError("no rank has a sample for this step")
    return TrainingStep(samples, world, sizes or [0] * min(given, 1), stand_in=min(how.least, given))


def _sizes(mine: int, world: int, how: StepRequirements) -> list[int]:
    # One group of samples cannot tell noise from gradient. Several ranks are several groups already.
    return micro_batch_sizes(mine, how.most, min(mine // how.least, how.parts) if world == 1 else 1, how.least)


def _check_rows(counts: list[int], how: StepRequirements) -> None:
    """Refuse shares that the module cannot be trained on, on all ranks alike, so that none waits for a failed one."""
    if how.strict and any(0 < count < how.least for count in counts):
        raise SettingsError(
            f"a rank has one row for this step, and {ONE_ROW}: let every rank have {how.least} rows or none (for the "
            'last batch of an epoch ElasticSampler(tail="drop") or tail="pad")'
        )


def weight_micro_batches(
    step: TrainingStep,
    weights: Tensor | Sequence[float],
    given: int,
    group: dist.ProcessGroup | None,
    device: torch.device,
) -> None:
    """Weight a step's micro-batches by the weights of their rows instead of the number of rows. Collective.

    `weights` has shape (given,), one for each of the `given` rows of this rank's batch. Rows given in place of an empty
    share are ignored.

    Raises:
        SettingsError: A rank's weights are not one finite, non-negative number per row, or all ranks' are 0; raised on
            all ranks alike.
    """
    rows = torch.as_tensor(weights, dtype=torch.float64, device="cpu").reshape(-1)
    fits = len(rows) == given and bool((rows.isfinite() & (rows >= 0)).all())
    ends = itertools.accumulate(step.sizes)
    parts = [float(rows[end - size : end].sum()) for size, end in zip(step.sizes, ends, strict=True)]
    # Exchanged as bits, so that the sums are the same on every rank and counts of tokens stay exact.
    (bits,) = struct.unpack("<q", struct.pack("<d", sum(parts) if fits else math.nan))
    sums = [struct.unpack("<d", struct.pack("<q", found))[0] for (found,) in exchange([bits], group, device)]
    ranks = [rank for rank, total in enumerate(sums) if math.isnan(total)]
    if ranks:
        raise SettingsError(
            f"weights= of rank {ranks[0]}: expected one finite number from 0 on for each row of the batch"
            + (f"; here are {len(rows)} for {given} rows" if len(rows) != given else "")
        )
    total = sum(sums)
    if not total:
        raise SettingsError("weights= are 0 for all rows of all ranks: there is nothing to train in this step")
    step.weights = [part * (step.samples / total) for part in parts]
