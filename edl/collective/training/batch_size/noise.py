"""How noisy gradients are: estimates from the groups of samples that one optimizer step consists of anyway.

With G the true gradient and Σ the covariance of one sample's gradient, a mean over n samples has the expected squared
norm |G|² + tr(Σ)/n. McCandlish et al., "An Empirical Model of Large-Batch Training", 2018, appendix A.1, solve this for
two batch sizes; here it is solved for any number of groups of any sizes, as in an analysis of variance. For k groups of
n_i samples with mean gradients g_i, n samples in all with mean g,

    tr(Σ) ≈ (Σ n_i |g_i|² - n |g|²) / (k - 1)        |G|² ≈ |g|² - tr(Σ) / n

and both are unbiased. The groups are the micro-batches of all ranks before gradients are summed. Where the optimizer
divides each gradient by a scale of its own (Adam and its kin), all norms are those of gradients so divided, as in
Qiao et al., "Pollux", OSDI 2021: the plain noise of an Adam run says little about its progress.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["GradientGroups", "GradientNoise"]

_MEMORY_STEPS = 100.0


@dataclass(frozen=True)
class GradientGroups:
    """What one optimizer step says of the noise.

    Attributes:
        count: groups with at least one sample, k.
        samples: in all of them, n.
        weighted_square: Σ n_i |g_i|².
        square: |g|², of the mean over all samples.
    """

    count: int
    samples: int
    weighted_square: float
    square: float

    @property
    def usable(self) -> bool:
        """Whether they say anything: at least two groups, and finite gradients."""
        return self.count > 1 and math.isfinite(self.weighted_square) and math.isfinite(self.square)

    def estimate(self) -> tuple[float, float]:
        """(tr Σ, |G|²), unbiased; the second may be below zero."""
        variance = max(self.weighted_square - self.samples * self.square, 0.0) / (self.count - 1)
        return variance, self.square - variance / self.samples


@dataclass
class GradientNoise:
    """Averages of the estimates over recent steps; the ratio of averages, since the average of ratios is biased.

    Attributes:
        variance: tr Σ, of one sample's gradient.
        square: |G|², of the true gradient.
        steps: that were averaged over, at most the memory of 100.
    """

    variance: float = 0.0
    square: float = 0.0
    steps: float = 0.0

    def add(self, groups: GradientGroups) -> None:
        """Take in one step, if it says anything."""
        if not groups.usable:
            return
        variance, square = groups.estimate()
        self.steps = min(self.steps + 1.0, _MEMORY_STEPS)
        self.variance += (variance - self.variance) / self.steps
        self.square += (square - self.square) / self.steps

    @property
    def known(self) -> bool:
        """Whether there is any estimate."""
        return self.steps > 0

    @property
    def scale(self) -> float:
        """The noise scale tr(Σ)/|G|², in samples: batches far below it are mostly noise, far above it mostly waste.

        Infinite where no gradient can be told from the noise.
        """
        if self.square > 0:
            return max(self.variance, 0.0) / self.square
        return math.inf if self.variance > 0 else 0.0

    def gain(self, batch: int, base_batch: int) -> float:
        """How many steps with `base_batch` one with `batch` is worth: 1 without noise, batch/base_batch with only it.

        Johnson et al., "AdaScale SGD", ICML 2020, the gain ratio: r = (σ² + μ²)/(σ²/S + μ²), where
        σ² = tr(Σ)/base_batch, μ² = |G|², S = batch/base_batch.
        """
        square = max(self.square, 0.0)
        top, bottom = self.variance / base_batch + square, self.variance / batch + square
        return top / bottom if bottom > 0 else 1.0

    def state_dict(self) -> dict[str, float]:
        """Plain numbers."""
        return {"variance": self.variance, "square": self.square, "steps": self.steps}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Go on from there, whatever the batch and the world are now: the averages are of one sample's gradient."""
        self.variance, self.square, self.steps = (float(state[key]) for key in ("variance", "square", "steps"))
