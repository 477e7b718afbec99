"""How long an optimizer step takes, as a function of the world and the micro-batch, fitted to measured steps: pure.

The model is that of Qiao et al., "Pollux", OSDI 2021, section 3.2. With m rows in each of s + 1 micro-batches on each
of W ranks, a step takes

    T = s·T_grad + (T_grad^g + T_sync^g)^(1/g)
    T_grad = a + b·m,   T_sync = 0 for W = 1, otherwise c + d·(W - 2)

where g from 1 to 10 says how far sending gradients hides behind computing them. The numbers are found by least squares
of the logarithms, as errors of times are relative.

Pollux leaves out what a rank waits for between two steps, which is its loader most of all. For R rows of a rank's share
that is L = p + q·R if the loader reads when it is asked, and max(0, L - T) if it reads ahead; which of the two, and p
and q, is what explains the measured waits best.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edl.errors import SettingsError

__all__ = ["LoaderTime", "StepMeasurement", "StepTime", "fit_loader_time", "fit_step_time"]

_GAMMAS = (1.0, 1.5, 2.0, 3.0, 5.0, 10.0)  # Pollux's range; between neighbours a predicted time differs by percents
_FARTHEST = 20.0  # of logarithms, from the start of the search: e^20 is beyond any cost, and far from overflow
_NO_WAIT = 0.02
"""Of a step: what the loop itself needs between two steps, so that a shorter wait is no loader's."""


@dataclass(frozen=True)
class StepMeasurement:
    """How long steps took in a setting.

    Attributes:
        world: the number of ranks.
        rows: of a micro-batch, on the rank that has most.
        parts: micro-batches of a step, on the rank that has most.
        seconds: of a step, on the slowest rank; the median of several.
        waited_s: between two steps, for the next batch, on the rank that waits longest.
    """

    world: int
    rows: int
    parts: int
    seconds: float
    waited_s: float = 0.0

    @property
    def share(self) -> int:
        """Rows of a step on the rank that has most."""
        return self.rows * self.parts


@dataclass(frozen=True)
class StepTime:
    """The fitted model of the formula.

    Attributes:
        fixed_s: a, in seconds.
        row_s: b, in seconds.
        sync_s: c, in seconds.
        rank_s: d, in seconds.
        gamma: g.
    """

    fixed_s: float
    row_s: float
    sync_s: float = 0.0
    rank_s: float = 0.0
    gamma: float = 1.0

    def seconds(self, world: int, rows: float, parts: int) -> float:
        """Return the seconds of an optimizer step.

        Args:
            world: the number of ranks.
            rows: of a micro-batch.
            parts: micro-batches of a rank.
        """
        table = np.array([[world], [rows], [parts], [0.0]], dtype=np.float64)
        return float(_times(table, [self.fixed_s, self.row_s, self.sync_s, self.rank_s], self.gamma)[0])


@dataclass(frozen=True)
class LoaderTime:
    """How long a rank's loader needs for its share of a batch, in seconds: p and q of the formula.

    Attributes:
        fixed_s: p.
        row_s: q.
        ahead: it reads while a step computes.
    """

    fixed_s: float = 0.0
    row_s: float = 0.0
    ahead: bool = False

    def waited_s(self, share: float, step_s: float) -> float:
        """Return the wait for a batch, in seconds.

        Args:
            share: rows of the rank's share.
            step_s: seconds of a step.
        """
        needed_s = self.fixed_s + self.row_s * share
        return max(0.0, needed_s - step_s) if self.ahead else needed_s


def fit_loader_time(measured: Sequence[StepMeasurement]) -> LoaderTime:
    """Find the loader that explains the measured waits best. From a single share, all rows cost the same.

    Where several explain them as well, the loader that promises least for larger batches is taken.

    Args:
        measured: steps, in several settings.
    """
    if not measured:
        return LoaderTime()
    found: list[tuple[float, float, LoaderTime]] = []
    largest = max(measured, key=lambda step: step.share)
    for ahead in (False, True):
        # A loader that reads ahead and is not waited for needs at most a step: that says nothing more.
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
    """Return lines through points of (rows, seconds), by least squares and through the origin, not below 0."""
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
    """Find the model that explains the measured times best; what they do not tell is taken to cost nothing.

    Args:
        measured: steps, in several settings.

    Raises:
        SettingsError: there is no measurement.
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
    """Return where to search from: most of the shortest micro-batch is spent on its rows, or little of it."""
    _, rows, parts, seconds = table
    shortest = float((seconds / parts).min())
    return [
        np.log([fixed * shortest, (1 - fixed) * shortest / rows.max(), fixed * shortest, 0.1 * shortest])
        for fixed in (0.1, 0.7)
    ]


def _search(
    table: npt.NDArray[np.float64], gamma: float, start: npt.NDArray[np.float64], free: npt.NDArray[np.bool_]
) -> tuple[float, StepTime]:
    """Minimize by Levenberg and Marquardt's method over logarithms of the free numbers, which keeps them above zero."""

    def numbers(logs: npt.NDArray[np.float64]) -> list[float]:
        # What costs nothing would otherwise run away to minus infinity, where the slopes vanish.
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
    """Return `StepTime.seconds` of every column of (world, rows, parts, ...), shape (4, steps)."""
    world, rows, parts, _ = table
    fixed_s, row_s, sync_s, rank_s = numbers
    grad = fixed_s + row_s * rows
    sync = np.where(world > 1, sync_s + rank_s * (world - 2), 0.0)
    longer, shorter = np.maximum(grad, sync), np.minimum(grad, sync)
    # Scaled by the longer one, so that the tenth power of a millisecond does not vanish.
    together = longer * (1 + (shorter / longer) ** gamma) ** (1 / gamma)
    times: npt.NDArray[np.float64] = (parts - 1) * grad + together
    return times
