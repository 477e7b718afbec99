"""Automatic batch sizes: measures a run's steps, chooses the batch with the best goodput, and logs each decision.

Follows Qiao et al., "Pollux", OSDI 2021, section 3. For a step time T, a noise scale of phi samples (`gradients`) and
the base batch B0 that the learning rate was chosen for, the goodput of a batch B is B/T · (phi + B0)/(phi + B). T is
the time from one step to the next, so it includes the wait for the loader. With s micro-batches of m rows on each of W
ranks, T is modelled as

    T = s·(a + b·m) + c + d·(W - 2),   where c and d are 0 for W = 1

The costs a, b, c and d are fitted by least squares of the relative errors. The model leaves out how far sending
gradients overlaps with computing them. That is acceptable because a batch at most doubles at once, and the time of the
new batch is then measured.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from edl.collective.ranks import exchange
from edl.collective.training.gradients import GradientNoise
from edl.errors import SettingsError

logger = logging.getLogger("edl.collective")

StepShape: TypeAlias = tuple[int, int, int]  # ranks; rows per micro-batch and micro-batches, on the rank with most


def fit_step_time(measured: Mapping[StepShape, float]) -> npt.NDArray[np.float64]:
    """Find the a, b, c and d that best explain the measured seconds. None of them is negative.

    A cost that cannot be distinguished from the other costs is 0. With a single shape, the whole step time is
    attributed to the rows.
    """
    table = np.array([_terms(*shape) for shape in measured]) / np.array([[seconds] for seconds in measured.values()])
    free: list[int] = []
    for term in (1, 0, 2, 3):
        if np.linalg.matrix_rank(table[:, [*free, term]]) > len(free):
            free.append(term)
    while (found := np.linalg.lstsq(table[:, free], np.ones(len(table)), rcond=None)[0]).min() < 0:
        del free[int(found.argmin())]
    costs = np.zeros(4)
    costs[free] = found
    return costs


def _terms(world: int, rows: int, parts: int) -> npt.NDArray[np.float64]:
    return np.array([parts, parts * rows, world > 1, max(world - 2, 0)], dtype=np.float64)


_LEAST_EFFICIENCY = 0.6  # of a batch tried only to measure it: with less, about half of it would be wasted
_GROWTH = 2.0  # largest growth of the batch in one change: the fitted step times were never tested farther away


@dataclass(frozen=True)
class AutoBatch:
    """Let the trainer choose the global batch.

    Attributes:
        least: Samples of the smallest global batch.
        most: Samples of the largest global batch.
        every_steps: Steps between two decisions.
        margin: Smallest gain in goodput, as a fraction of the current goodput, for which the batch changes.
    """

    least: int
    most: int
    every_steps: int = 100
    margin: float = 0.05

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most:
            raise SettingsError(f"least={self.least}, most={self.most}: must be 1 <= least <= most")
        if self.every_steps < 1 or self.margin < 0:
            raise SettingsError(f"every_steps={self.every_steps}, margin={self.margin}: must be at least 1 and 0")


def statistical_efficiency(noise_scale: float, batch: int, base_batch: int) -> float:
    """Return the progress per sample, relative to the base batch. `noise_scale` may be infinite."""
    if math.isinf(noise_scale):
        return 1.0
    return (noise_scale + base_batch) / (noise_scale + batch)


def choose_batch_size(
    settings: AutoBatch,
    measured: Mapping[StepShape, float],
    noise_scale: float | None,
    *,
    batch: int,
    base_batch: int,
    world: int,
    max_micro_batch: int | None = None,
) -> tuple[int, str]:
    """Choose the global batch with the largest predicted goodput. Returns the batch, and a line for the log.

    A batch outside the bounds moves to the nearest bound. Otherwise, the batch at most doubles at once (or grows to one
    sample per rank), because the model is fitted only to measured sizes. If only one micro-batch shape was measured, a
    step's fixed cost cannot be distinguished from the cost of its rows; the batch is then doubled if that wastes
    little.

    `noise_scale` is None if the noise is not known yet. `max_micro_batch` is the smallest value on any rank.
    """
    inside = min(max(batch, settings.least), settings.most)
    if inside != batch:
        return (inside, f"batch {batch} -> {inside}: the bounds are {settings.least} to {settings.most}")
    if noise_scale is None or not measured:
        missing = "gradient noise" if noise_scale is None else "step times"
        return (batch, f"batch {batch} stays: no {missing} measured yet")
    limit = min(settings.most, max(int(batch * _GROWTH), world))
    phi = f"noise scale {noise_scale:.4g}"
    if len({shape[1:] for shape in measured}) < 2 and limit > batch:
        worth = statistical_efficiency(noise_scale, limit, batch)
        if worth < _LEAST_EFFICIENCY:
            return (batch, f"batch {batch} stays: {limit} would train {worth:.0%} as well per sample ({phi})")
        return (limit, f"batch {batch} -> {limit}: to measure a second size; {worth:.0%} as efficient ({phi})")
    costs = fit_step_time(measured)

    def seconds(size: int) -> float:
        return float(costs @ _terms(world, *micro_batch_shape(size, world, max_micro_batch)))

    def goodput(size: int) -> float:
        return size / seconds(size) * statistical_efficiency(noise_scale, size, base_batch)

    now = goodput(batch)
    best = max(_candidates(settings.least, limit, batch, world, max_micro_batch), key=goodput)
    gain = goodput(best) / now - 1
    share = statistical_efficiency(noise_scale, best, batch)
    if best == batch or gain < settings.margin:
        why = f"best is {best}, {gain:+.1%} goodput, below the margin of {settings.margin:.0%}"
        return (batch, f"batch {batch} stays: {why if best != batch else 'nothing is better'} ({phi})")
    faster = (best / seconds(best)) / (batch / seconds(batch))
    return (
        best,
        f"batch {batch} -> {best}: {gain:+.1%} goodput = {faster:.2f}x samples/s x {share:.2f} efficiency ({phi})",
    )


def micro_batch_shape(batch: int, world: int, max_micro_batch: int | None) -> tuple[int, int]:
    """Return rows per micro-batch and micro-batches per step on the fullest rank; a lone rank needs 2 for the noise."""
    rows = -(-batch // world)
    parts = -(-rows // max_micro_batch) if max_micro_batch else 1
    if world == 1:
        parts = max(parts, min(rows, 2))
    return -(-rows // parts), parts


def _candidates(least: int, most: int, batch: int, world: int, max_micro_batch: int | None) -> list[int]:
    """Return sizes between the bounds, about 10% apart, and sizes that fill the ranks' memory exactly."""
    sizes = {least, batch, most}
    size = float(least)
    while size < most:
        sizes.add(min(max(round(size / world) * world, least), most))
        size *= 1.1
    full = world * (max_micro_batch or 0)
    if full:
        sizes.update(range(full * max(-(-least // full), 1), most + 1, full * max(1, most // full // 64)))
    return sorted(sizes)


_KEPT = 32  # settings whose times are kept: older ones are of batches no longer used, and would slow the fit


class BatchSizeTuner:
    """Collects step times and decides on the batch at intervals. Its saved state is the same on every rank."""

    def __init__(self, settings: AutoBatch, base_batch: int) -> None:
        self.settings = settings
        self.base_batch = base_batch
        self._steps = 0
        self._setting = (0, 0)  # world and batch to which the times belong
        self._seconds: list[float] = []  # on this rank, since the last decision or change
        self._measured: dict[StepShape, float] = {}

    def record_step(
        self,
        world: int,
        batch: int,
        max_micro_batch: int | None,
        noise: GradientNoise,
        seconds: float | None,
        group: dist.ProcessGroup | None,
        device: torch.device,
    ) -> int:
        """Record a step, and choose the batch every `every_steps` steps. Returns the new or current batch. Collective.

        `seconds` is the time since the previous step on this rank, or None if the step should not be counted.
        """
        if self._setting != (world, batch):
            self._setting = (world, batch)
            self._seconds.clear()
        if seconds is not None:
            self._seconds.append(seconds)
        self._steps += 1
        if self._steps % self.settings.every_steps:
            return batch
        micros = max(round(statistics.median(self._seconds) * 1e6), 1) if self._seconds else 0
        self._seconds.clear()
        everyone = exchange([micros, max_micro_batch or 0], group, device)
        tightest = min((most for _, most in everyone if most), default=None)
        chosen, reason = self._decide(tightest, noise, max(micros for micros, _ in everyone) / 1e6)
        logger.info("%s", reason)
        # Rounding may differ between kinds of machines, so all ranks use the first rank's decision.
        ((agreed,), *_) = exchange([chosen], group, device)
        return agreed

    def _decide(self, most: int | None, noise: GradientNoise, seconds: float) -> tuple[int, str]:
        world, batch = self._setting
        if seconds > 0:
            shape = (world, *micro_batch_shape(batch, world, most))
            self._measured.pop(shape, None)  # so that the newest is last
            self._measured[shape] = seconds
        for old in list(self._measured)[:-_KEPT]:
            del self._measured[old]
        return choose_batch_size(
            self.settings,
            self._measured,
            noise.scale if noise.known else None,
            batch=batch,
            base_batch=self.base_batch,
            world=world,
            max_micro_batch=most,
        )

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self._steps, "measured": [[*shape, seconds] for shape, seconds in self._measured.items()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._steps = int(state["steps"])
        self._seconds.clear()
        self._measured = {(world, rows, parts): seconds for world, rows, parts, seconds in state["measured"]}
