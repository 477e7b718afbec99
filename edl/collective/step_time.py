"""How long an optimizer step takes, as a function of the world and the micro-batch, fitted to measured steps: pure.

The model is that of Qiao et al., "Pollux", OSDI 2021, section 3.2. With m rows in each of s + 1 micro-batches on each
of W ranks, a step takes

    T = s·T_grad + (T_grad^g + T_sync^g)^(1/g)
    T_grad = a + b·m,   T_sync = 0 for W = 1, otherwise c + d·(W - 2)

where g from 1 to 10 says how far sending gradients hides behind computing them. The numbers are found by least squares
of the logarithms, as errors of times are relative.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edl.errors import SettingsError

__all__ = ["Measured", "StepTime", "fit"]

_GAMMAS = (1.0, 1.5, 2.0, 3.0, 5.0, 10.0)


@dataclass(frozen=True)
class Measured:
    """How long steps took in one setting.

    Attributes:
        world: ranks.
        rows: of a micro-batch, on the rank that has most.
        parts: micro-batches of a step, on the rank that has most.
        seconds: of a step, on the slowest rank; the median of several.
    """

    world: int
    rows: int
    parts: int
    seconds: float


@dataclass(frozen=True)
class StepTime:
    """The fitted model: a, b, c, d and g of the formula, the first four in seconds."""

    fixed_s: float
    row_s: float
    sync_s: float = 0.0
    rank_s: float = 0.0
    gamma: float = 1.0

    def seconds(self, world: int, rows: float, parts: int) -> float:
        """Of one optimizer step, in which each of `world` ranks computes `parts` micro-batches of `rows` rows."""
        grad = self.fixed_s + self.row_s * rows
        sync = self.sync_s + self.rank_s * (world - 2) if world > 1 else 0.0
        longer, shorter = max(grad, sync), min(grad, sync)
        if longer <= 0:
            return 0.0
        # Scaled by the longer one, so that a power of 10 of milliseconds does not vanish.
        together: float = longer * (1 + (shorter / longer) ** self.gamma) ** (1 / self.gamma)
        return (parts - 1) * grad + together


def fit(measured: Sequence[Measured]) -> StepTime:
    """The model that explains the measured times best; what they say nothing about is taken to cost nothing.

    Raises:
        SettingsError: there is no measurement.
    """
    if not measured:
        raise SettingsError("no step was measured yet")
    rows = sorted({one.rows for one in measured})
    worlds = {one.world for one in measured if one.world > 1}
    free = [len(rows) > 1 or len({one.parts for one in measured}) > 1, True, bool(worlds), len(worlds) > 1]
    gammas = _GAMMAS if worlds else (1.0,)
    fits = [_fit_times(measured, gamma, np.array(free)) for gamma in gammas]
    return min(fits, key=lambda model: float(np.square(_errors(model, measured)).sum()))


def _fit_times(measured: Sequence[Measured], gamma: float, free: npt.NDArray[np.bool_]) -> StepTime:
    """Levenberg and Marquardt's method over the logarithms of the free numbers, which keeps them above zero."""
    shortest = min(one.seconds / one.parts for one in measured)
    most = max(one.rows for one in measured)
    best: tuple[float, StepTime] | None = None
    for portion in (0.1, 0.5, 0.9):  # of the shortest step that is not spent on rows
        start = np.array([portion * shortest, (1 - portion) * shortest / most, portion * shortest, 0.1 * shortest])
        logs = np.log(start[free])
        damping, error = 1e-2, math.inf
        for _ in range(60):
            model = _model(logs, free, gamma)
            errors = _errors(model, measured)
            error = float(errors @ errors)
            if error < 1e-18 or damping > 1e9:
                break
            slopes = np.stack(
                [
                    (_errors(_model(logs + nudge, free, gamma), measured) - errors) / 1e-6
                    for nudge in _nudges(len(logs))
                ],
                axis=1,
            )
            square = slopes.T @ slopes
            move = np.linalg.solve(
                square + damping * (np.eye(len(logs)) + np.diag(np.diag(square))), -slopes.T @ errors
            )
            there = logs + np.clip(move, -2.0, 2.0)
            found = _errors(_model(there, free, gamma), measured)
            if float(found @ found) < error:
                logs, damping = there, damping * 0.3
            else:
                damping *= 4.0
        if best is None or error < best[0]:
            best = (error, _model(logs, free, gamma))
    assert best is not None
    return best[1]


def _nudges(count: int) -> npt.NDArray[np.float64]:
    return np.eye(count) * 1e-6


def _model(logs: npt.NDArray[np.float64], free: npt.NDArray[np.bool_], gamma: float) -> StepTime:
    numbers = np.zeros(4)
    numbers[free] = np.exp(logs)
    fixed_s, row_s, sync_s, rank_s = numbers.tolist()
    return StepTime(fixed_s, row_s, sync_s, rank_s, gamma)


def _errors(model: StepTime, measured: Sequence[Measured]) -> npt.NDArray[np.float64]:
    return np.array([math.log(model.seconds(one.world, one.rows, one.parts) / one.seconds) for one in measured])
