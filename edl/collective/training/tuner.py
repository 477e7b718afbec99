"""Automatic batch sizes: measures a run's steps, chooses the batch with the best goodput, and logs the decision.

Qiao et al., "Pollux: Co-adaptive Cluster Scheduling for Goodput-Optimized Deep Learning", OSDI 2021, section 3: with a
step time T, a noise scale of phi samples (`gradients`) and the base batch B0 that the learning rate was chosen for, the
goodput of a batch B is B/T · (phi + B0)/(phi + B). Here, T includes the wait for the loader.

The step time follows section 3.2 of the same paper. With m rows in each of s + 1 micro-batches on each of W ranks, a
step takes

    T = s·T_grad + (T_grad^g + T_sync^g)^(1/g)
    T_grad = a + b·m,   T_sync = 0 for W = 1, otherwise c + d·(W - 2)

where g from 1 to 10 says how far sending gradients overlaps with computing them. The numbers are fitted by least
squares of the logarithms, because errors of times are relative.

Pollux leaves out how long a rank waits between two steps, mostly for its loader. For a share of R rows that is
L = p + q·R if the loader reads on demand, and max(0, L - T) if it reads ahead. Which of the two applies, and p and q,
are chosen to fit the measured waits best.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from edl.collective.ranks import exchange
from edl.collective.training.gradients import GradientNoise
from edl.errors import SettingsError

logger = logging.getLogger("edl.collective")


_GAMMAS = (1.0, 1.5, 2.0, 3.0, 5.0, 10.0)  # Pollux's range; predictions for neighbours differ by a few percent
_FARTHEST = 20.0  # largest change of a logarithm in the search: e^20 exceeds any real cost, and is far from overflow
_NO_WAIT = 0.02
"""Shorter waits, as a fraction of a step, are not counted as the loader's: the loop itself needs that long."""


@dataclass(frozen=True)
class StepMeasurement:
    """How long steps took in one setting."""

    world: int  # number of ranks
    rows: int  # rows of a micro-batch, on the rank that has most
    parts: int  # micro-batches of a step, on the rank that has most
    seconds: float  # seconds of a step, on the slowest rank; the median of several steps
    waited_s: float = 0.0  # seconds between two steps, waiting for the next batch, on the rank that waits longest

    @property
    def share(self) -> int:
        """Rows of a step on the rank that has most."""
        return self.rows * self.parts


@dataclass(frozen=True)
class StepTime:
    """The fitted step time, with the numbers of the module's formula."""

    fixed_s: float  # a, in seconds
    row_s: float  # b, in seconds per row
    sync_s: float = 0.0  # c, in seconds
    rank_s: float = 0.0  # d, in seconds per rank
    gamma: float = 1.0  # g

    def seconds(self, world: int, rows: float, parts: int) -> float:
        """Return the seconds of an optimizer step with `parts` micro-batches of `rows` rows on each rank."""
        table = np.array([[world], [rows], [parts], [0.0]], dtype=np.float64)
        return float(_times(table, [self.fixed_s, self.row_s, self.sync_s, self.rank_s], self.gamma)[0])


@dataclass(frozen=True)
class LoaderTime:
    """How long a rank's loader needs for its share of a batch: p and q of the module's formula."""

    fixed_s: float = 0.0  # p, in seconds
    row_s: float = 0.0  # q, in seconds per row
    ahead: bool = False  # whether the loader reads while a step computes

    def waited_s(self, share: float, step_s: float) -> float:
        """Return the seconds that a rank waits for a share of `share` rows, with steps of `step_s` seconds."""
        needed_s = self.fixed_s + self.row_s * share
        return max(0.0, needed_s - step_s) if self.ahead else needed_s


def fit_loader_time(measured: Sequence[StepMeasurement]) -> LoaderTime:
    """Find the loader that explains the measured waits best.

    If only one share size was measured, all of the time is put down to its rows. If several loaders explain the waits
    equally well, the one that predicts the longest waits for larger batches is chosen.
    """
    if not measured:
        return LoaderTime()
    found: list[tuple[float, float, LoaderTime]] = []
    largest = max(measured, key=lambda step: step.share)
    for ahead in (False, True):
        # A loader that reads ahead and causes no wait needs at most a step's time; that tells nothing more.
        telling = [step for step in measured if not ahead or step.waited_s > _NO_WAIT * step.seconds]
        points = [(step.share, step.waited_s + (step.seconds if ahead else 0.0)) for step in telling]
        for model in _lines(points, ahead=ahead):
            errors = [
                np.log((step.seconds + model.waited_s(step.share, step.seconds)) / (step.seconds + step.waited_s))
                for step in measured
            ]
            doubled_s = model.waited_s(2 * largest.share, 2 * largest.seconds)
            found.append((round(float(np.square(errors).mean()), 5), -doubled_s, model))
    return min(found, key=lambda candidate: candidate[:2])[2]


def _lines(points: list[tuple[int, float]], *, ahead: bool) -> list[LoaderTime]:
    """Return lines through points of (rows, seconds), by least squares and through the origin; nothing is below 0."""
    if not points:
        return [LoaderTime(ahead=ahead)]
    rows, seconds = np.array(points, dtype=np.float64).T
    lines = [LoaderTime(0.0, float(rows @ seconds / (rows @ rows)), ahead)]
    if len(set(rows)) > 1:
        row_s, fixed_s = np.polyfit(rows, seconds, 1)
        if row_s >= 0 and fixed_s >= 0:
            lines.append(LoaderTime(float(fixed_s), float(row_s), ahead))
        elif row_s < 0:
            lines.append(LoaderTime(float(seconds.mean()), 0.0, ahead))
    return lines


def fit_step_time(measured: Sequence[StepMeasurement]) -> StepTime:
    """Find the model that explains the measured times best. Costs that the measurements cannot tell apart are set to 0.

    Raises:
        SettingsError: There is no measurement.
    """
    if not measured:
        raise SettingsError("no step was measured yet")
    worlds = {step.world for step in measured if step.world > 1}
    several = len({(step.rows, step.parts) for step in measured}) > 1
    free = np.array([several, True, bool(worlds), len(worlds) > 1])
    table = np.array([(step.world, step.rows, step.parts, step.seconds) for step in measured], dtype=np.float64).T
    fits = [_search(table, gamma, start, free) for gamma in (_GAMMAS if worlds else (1.0,)) for start in _starts(table)]
    _, model = min(fits, key=lambda found: found[0])
    return model


def _starts(table: npt.NDArray[np.float64]) -> list[npt.NDArray[np.float64]]:
    """Return points to search from: either few or most of the shortest micro-batch's seconds are fixed costs."""
    _, rows, parts, seconds = table
    shortest = float((seconds / parts).min())
    return [
        np.log([fixed * shortest, (1 - fixed) * shortest / rows.max(), fixed * shortest, 0.1 * shortest])
        for fixed in (0.1, 0.7)
    ]


def _search(
    table: npt.NDArray[np.float64], gamma: float, start: npt.NDArray[np.float64], free: npt.NDArray[np.bool_]
) -> tuple[float, StepTime]:
    """Minimize by the Levenberg-Marquardt method, over logarithms of the free numbers so that they stay above zero."""

    def numbers(logs: npt.NDArray[np.float64]) -> list[float]:
        # Without the clip, a number that should be 0 would run away to minus infinity, where slopes vanish.
        found: list[float] = np.where(free, np.exp(np.clip(logs, start - _FARTHEST, start + _FARTHEST)), 0.0).tolist()
        return found

    def errors(logs: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        off: npt.NDArray[np.float64] = np.log(_times(table, numbers(logs), gamma) / table[3])
        return off

    logs, damping = start, 1e-2
    now = errors(logs)
    for _ in range(40):
        slopes = np.stack([(errors(logs + nudge) - now) / 1e-6 for nudge in np.eye(4) * 1e-6], axis=1)
        square = slopes.T @ slopes + damping * np.eye(4)
        there = logs - np.clip(np.linalg.solve(square, slopes.T @ now), -2.0, 2.0)
        found = errors(there)
        better = float(now @ now - found @ found)
        damping = max(damping * 0.2, 1e-9) if better > 0 else damping * 5.0
        if better > 0:
            logs, now = there, found
        if abs(better) < 1e-12 or damping > 1e6:
            break
    fixed_s, row_s, sync_s, rank_s = numbers(logs)
    return float(now @ now), StepTime(fixed_s, row_s, sync_s, rank_s, gamma)


def _times(table: npt.NDArray[np.float64], numbers: list[float], gamma: float) -> npt.NDArray[np.float64]:
    """Return `StepTime.seconds` for every column of a table of (world, rows, parts, seconds), shape (4, steps)."""
    world, rows, parts, _ = table
    fixed_s, row_s, sync_s, rank_s = numbers
    grad = fixed_s + row_s * rows
    sync = np.where(world > 1, sync_s + rank_s * (world - 2), 0.0)
    longer, shorter = np.maximum(grad, sync), np.minimum(grad, sync)
    # Scaled by the longer one, so that the tenth power of a millisecond does not underflow.
    together = longer * (1 + (shorter / longer) ** gamma) ** (1 / gamma)
    times: npt.NDArray[np.float64] = (parts - 1) * grad + together
    return times


# --- Choosing the batch with the best goodput ---


_LEAST_EFFICIENCY = 0.6  # of a batch tried only to measure it: with less, about half of it would be wasted
_GROWTH = 2.0  # largest growth of the batch in one change: the fitted step times were never tested farther away


@dataclass(frozen=True)
class AutoBatch:
    """Let the trainer choose the global batch.

    Attributes:
        least: Samples of the smallest global batch.
        most: Samples of the largest global batch.
        every_steps: Steps between two decisions.
        margin: Smallest gain in goodput for which the batch changes, as a fraction of the present goodput.
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

    `noise_scale` is in samples, and may be infinite.
    """
    if math.isinf(noise_scale):
        return 1.0
    return (noise_scale + base_batch) / (noise_scale + batch)


def choose_batch_size(
    settings: AutoBatch,
    measured: Sequence[StepMeasurement],
    noise_scale: float | None,
    *,
    batch: int,
    base_batch: int,
    world: int,
    max_micro_batch: int | None = None,
) -> tuple[int, str]:
    """Choose the global batch with the largest goodput that the model predicts. Returns it with a line for the log.

    A batch outside the bounds moves to the nearest bound. Otherwise it at most doubles at once (or grows to one sample
    per rank), because the model is fitted to what was measured. If only one micro-batch shape was measured, a step's
    fixed cost cannot be told from that of its rows; the batch is then doubled if that wastes little.

    `noise_scale` is in samples, or None if it is not known yet. `max_micro_batch` is the smallest of all ranks.
    """
    inside = min(max(batch, settings.least), settings.most)
    if inside != batch:
        return (inside, f"batch {batch} -> {inside}: the bounds are {settings.least} to {settings.most}")
    if noise_scale is None or not measured:
        missing = "gradient noise" if noise_scale is None else "step times"
        return (batch, f"batch {batch} stays: no {missing} measured yet")
    limit = min(settings.most, max(int(batch * _GROWTH), world))
    phi = f"noise scale {noise_scale:.4g}"
    if len({(step.rows, step.parts) for step in measured}) < 2 and limit > batch:
        worth = statistical_efficiency(noise_scale, limit, batch)
        if worth < _LEAST_EFFICIENCY:
            return (batch, f"batch {batch} stays: {limit} would train {worth:.0%} as well per sample ({phi})")
        return (limit, f"batch {batch} -> {limit}: to measure a second size; {worth:.0%} as efficient ({phi})")
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
        return (batch, f"batch {batch} stays: {why if best != batch else 'nothing is better'} ({phi})")
    faster = (best / seconds(best)) / (batch / seconds(batch))
    return (
        best,
        f"batch {batch} -> {best}: {gain:+.1%} goodput = {faster:.2f}x samples/s x {share:.2f} efficiency ({phi})",
    )


def micro_batch_shape(batch: int, world: int, max_micro_batch: int | None) -> tuple[int, int]:
    """Return the rows of a micro-batch and the number of micro-batches, on the rank that has most.

    A single rank makes at least two micro-batches, because noise cannot be measured with a single group of samples.
    """
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


# --- The tuner of a run ---


_KEPT = 32  # settings whose times are kept: older ones are of batches no longer used, and would slow the fit


class BatchSizeTuner:
    """Collects step times and decides on the batch every so often. Its saved state is the same on every rank."""

    def __init__(self, settings: AutoBatch, base_batch: int) -> None:
        self.settings = settings
        self.base_batch = base_batch
        self._steps = 0
        self._setting = (0, 0)  # world and batch to which the times belong
        self._seconds: list[float] = []  # on this rank, since the last decision or change
        self._waits: list[float] = []
        self._measured: dict[tuple[int, int, int], tuple[float, float]] = {}

    def record_wait(self, seconds: float) -> None:
        """Record how many seconds this rank waited between two steps for its next batch."""
        self._waits.append(seconds)

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
        """Record a finished step with `batch` samples on `world` ranks, and every `every_steps` steps choose the batch.

        Collective: all ranks call it after every step. `seconds` is the time of the step on this rank, or None if the
        step should not be counted. Returns the global batch from now on, the same on every rank.
        """
        if self._setting != (world, batch):
            self._setting = (world, batch)
            self._clear()
        if seconds is not None:
            self._seconds.append(seconds)
        self._steps += 1
        if self._steps % self.settings.every_steps:
            return batch
        micros = max(round(statistics.median(self._seconds) * 1e6), 1) if self._seconds else 0
        waited = round(statistics.median(self._waits) * 1e6) if self._waits else 0
        self._clear()
        everyone = exchange([micros, waited, max_micro_batch or 0], group, device)
        # While one rank waits for its loader, the others wait for it within their steps, but are not slow themselves.
        waited_s = max(waited for _, waited, _ in everyone) / 1e6
        whole_s = max(micros + waited for micros, waited, _ in everyone) / 1e6
        slowest_s = max(whole_s - waited_s, min(micros for micros, _, _ in everyone) / 1e6)
        tightest = min((most for _, _, most in everyone if most), default=None)
        chosen, reason = self._decide(tightest, noise, slowest_s, waited_s)
        logger.info("%s", reason)
        # Rounding may differ between kinds of machines, so all ranks use the first rank's decision.
        ((agreed,), *_) = exchange([chosen], group, device)
        return agreed

    def _clear(self) -> None:
        self._seconds.clear()
        self._waits.clear()

    def _decide(self, most: int | None, noise: GradientNoise, seconds: float, waited_s: float) -> tuple[int, str]:
        world, batch = self._setting
        if seconds > 0:
            setting = (world, *micro_batch_shape(batch, world, most))
            self._measured.pop(setting, None)  # so that the newest comes last
            self._measured[setting] = (seconds, waited_s)
        for old in list(self._measured)[:-_KEPT]:
            del self._measured[old]
        return choose_batch_size(
            self.settings,
            [StepMeasurement(*setting, *times) for setting, times in self._measured.items()],
            noise.scale if noise.known else None,
            batch=batch,
            base_batch=self.base_batch,
            world=world,
            max_micro_batch=most,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain numbers and lists."""
        return {"steps": self._steps, "measured": [[*key, *times] for key, times in self._measured.items()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from saved measurements, including those of other world sizes."""
        self._steps = int(state["steps"])
        self._clear()
        self._measured = {}
        for world, rows, parts, seconds, *waited_s in state["measured"]:  # no wait was saved before 0.1.0
            self._measured[int(world), int(rows), int(parts)] = float(seconds), float(waited_s[0] if waited_s else 0.0)
