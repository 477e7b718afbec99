"""Which batch makes the most progress a second: throughput times statistical efficiency. Pure.

Qiao et al., "Pollux: Co-adaptive Cluster Scheduling for Goodput-Optimized Deep Learning", OSDI 2021, section 3: with a
step time T (`step_time`), a noise scale of phi samples (`noise`) and the base batch B0 that the learning rate was
chosen for, the goodput of a batch B is B/T · (phi + B0)/(phi + B). T is here with the wait for the loader.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from edl.collective.training.batch_size.step_time import StepMeasurement, fit_loader_time, fit_step_time
from edl.errors import SettingsError

__all__ = ["AutoBatch", "BatchSizeDecision", "choose_batch_size", "micro_batch_shape", "statistical_efficiency"]

_LEAST_EFFICIENCY = 0.5  # of samples in a batch that is tried only to measure it: half of them would be wasted
_GROWTH = 2.0  # of the batch at a change: farther away the model of step times was never seen to hold


@dataclass(frozen=True)
class AutoBatch:
    """Lets the trainer choose the global batch.

    Attributes:
        least: samples of the smallest global batch.
        most: samples of the largest global batch.
        every_steps: after how many steps to decide again.
        margin: by which part the goodput must be better than the present for a change.
    """

    least: int
    most: int
    every_steps: int = 100
    margin: float = 0.05

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most:
            raise SettingsError(f"least={self.least}, most={self.most}: must be 1 <= least <= most")
        if self.every_steps < 1 or self.margin < 0:
            raise SettingsError(f"every_steps={self.every_steps}, margin={self.margin}: at least 1, and not below 0")


def statistical_efficiency(noise_scale: float, batch: int, base_batch: int) -> float:
    """Return the progress that a sample makes, relative to a sample in the base batch.

    Args:
        noise_scale: of the gradients, in samples; may be infinite.
        batch: samples of a step.
        base_batch: samples of a step that the learning rate was chosen for.
    """
    if math.isinf(noise_scale):
        return 1.0
    return (noise_scale + base_batch) / (noise_scale + batch)


@dataclass(frozen=True)
class BatchSizeDecision:
    """A decision about the global batch.

    Attributes:
        batch: samples from now on.
        reason: for the log, in a line.
    """

    batch: int
    reason: str


def choose_batch_size(
    settings: AutoBatch,
    measured: Sequence[StepMeasurement],
    noise_scale: float | None,
    *,
    batch: int,
    base_batch: int,
    world: int,
    max_micro_batch: int | None = None,
) -> BatchSizeDecision:
    """Choose the global batch with the largest goodput that the model predicts.

    It never more than doubles at once, since the model is fitted to what was seen. As long as a single micro-batch size
    was seen, which cannot tell a step's fixed cost from that of its rows, it is doubled where that wastes little.

    Args:
        settings: the bounds.
        measured: step times, in several settings.
        noise_scale: in samples, None if not known yet.
        batch: samples of a step now.
        base_batch: samples of a step that the learning rate was chosen for.
        world: the number of ranks.
        max_micro_batch: the smallest of all ranks.

    Returns:
        The batch, and the reason.
    """
    inside = min(max(batch, settings.least), settings.most)
    if inside != batch:
        return BatchSizeDecision(
            inside, f"batch {batch} -> {inside}: the bounds are {settings.least} to {settings.most}"
        )
    if noise_scale is None or not measured:
        missing = "gradient noise" if noise_scale is None else "step times"
        return BatchSizeDecision(batch, f"batch {batch} stays: no {missing} measured yet")
    limit = min(settings.most, max(int(batch * _GROWTH), world))
    phi = f"noise scale {noise_scale:.4g}"
    if len({(step.rows, step.parts) for step in measured}) < 2 and limit > batch:
        worth = statistical_efficiency(noise_scale, limit, batch)
        if worth < _LEAST_EFFICIENCY + 0.1:
            return BatchSizeDecision(
                batch, f"batch {batch} stays: {limit} would train {worth:.0%} as well per sample ({phi})"
            )
        return BatchSizeDecision(
            limit, f"batch {batch} -> {limit}: to measure a second size; {worth:.0%} as efficient ({phi})"
        )
    model, loader = fit_step_time(measured), fit_loader_time(measured)

    def seconds(size: int) -> float:
        rows, parts = micro_batch_shape(size, world, max_micro_batch)
        step_s = model.seconds(world, rows, parts)
        return step_s + loader.waited_s(rows * parts, step_s)

    def goodput(size: int) -> float:
        return size / seconds(size) * statistical_efficiency(noise_scale, size, base_batch)

    now = goodput(batch)
    best = max(_candidates(settings.least, limit, batch, world, max_micro_batch), key=goodput)
    gain = goodput(best) / now - 1
    share = statistical_efficiency(noise_scale, best, batch)
    if best == batch or gain < settings.margin:
        why = f"best is {best}, {gain:+.1%} goodput, below the margin of {settings.margin:.0%}"
        return BatchSizeDecision(batch, f"batch {batch} stays: {why if best != batch else 'nothing is better'} ({phi})")
    faster = (best / seconds(best)) / (batch / seconds(batch))
    return BatchSizeDecision(
        best, f"batch {batch} -> {best}: {gain:+.1%} goodput = {faster:.2f}x samples/s x {share:.2f} efficiency ({phi})"
    )


def micro_batch_shape(batch: int, world: int, max_micro_batch: int | None) -> tuple[int, int]:
    """Return the rows of a micro-batch and the number of micro-batches, on the rank that has most.

    A single rank makes at least two micro-batches: with a single group of samples, noise could not be measured.

    Args:
        batch: samples of a step.
        world: the number of ranks.
        max_micro_batch: samples that fit into the ranks' memory, None for no limit.
    """
    rows = -(-batch // world)
    parts = -(-rows // max_micro_batch) if max_micro_batch else 1
    if world == 1:
        parts = max(parts, min(rows, 2))
    return -(-rows // parts), parts


def _candidates(least: int, most: int, batch: int, world: int, max_micro_batch: int | None) -> list[int]:
    """Return sizes between the bounds, about a tenth apart, and sizes that fill the ranks' memory exactly."""
    sizes = {least, batch, most}
    size = float(least)
    while size < most:
        sizes.add(min(max(round(size / world) * world, least), most))
        size *= 1.1
    full = world * (max_micro_batch or 0)
    if full:
        sizes.update(range(full * max(-(-least // full), 1), most + 1, full * max(1, most // full // 64)))
    return sorted(sizes)
