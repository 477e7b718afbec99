"""Gradient noise, estimated from the groups of samples that an optimizer step has anyway.

With G the true gradient and Σ the covariance of one sample's gradient, a mean over n samples has the expected squared
norm |G|² + tr(Σ)/n. McCandlish et al., "An Empirical Model of Large-Batch Training", 2018, appendix A.1, solve this for
two batch sizes. Here it is solved for any number of groups of any sizes, as in an analysis of variance. For k groups of
n_i samples with mean gradients g_i, n samples in all with mean g,

    tr(Σ) ≈ (Σ n_i |g_i|² - n |g|²) / (k - 1)        |G|² ≈ |g|² - tr(Σ) / n

and both estimates are unbiased. The groups are the micro-batches of all ranks before gradients are summed. If the
optimizer divides each gradient by a scale of its own (Adam and its relatives), all norms are those of the divided
gradients, as in Qiao et al., "Pollux", OSDI 2021: the plain noise of an Adam run says little about its progress.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["GradientGroups", "GradientNoise"]


_MEMORY_STEPS = 100.0  # fewer steps give too noisy an estimate; the noise itself changes only over epochs


@dataclass(frozen=True)
class GradientGroups:
    """Squared norms of the gradients in an optimizer step.

    Attributes:
        count: Groups with at least one sample, k.
        samples: Samples in all groups, n.
        weighted_square: Σ n_i |g_i|².
        square: |g|², for the mean over all samples.
    """

    count: int
    samples: int
    weighted_square: float
    square: float

    @property
    def usable(self) -> bool:
        """Whether they allow an estimate: there are at least two groups, and the gradients are finite."""
        return self.count > 1 and math.isfinite(self.weighted_square) and math.isfinite(self.square)

    def estimate(self) -> tuple[float, float]:
        """Return unbiased estimates of tr Σ and |G|²; the second may be below zero."""
        variance = max(self.weighted_square - self.samples * self.square, 0.0) / (self.count - 1)
        return variance, self.square - variance / self.samples


@dataclass
class GradientNoise:
    """Averages of the estimates over recent steps. Uses the ratio of averages, since the average of ratios is biased.

    Attributes:
        variance: tr Σ, for a single sample's gradient.
        square: |G|², for the true gradient.
        steps: Steps that the averages cover, at most 100.
    """

    variance: float = 0.0
    square: float = 0.0
    steps: float = 0.0

    def add_step(self, groups: GradientGroups) -> None:
        """Add a step to the averages if it allows an estimate."""
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
        """The noise scale tr(Σ)/|G|², in samples: far smaller batches are mostly noise, far larger ones mostly waste.

        Infinite if the gradient cannot be told from the noise.
        """
        if self.square > 0:
            return max(self.variance, 0.0) / self.square
        return math.inf if self.variance > 0 else 0.0

    def gain(self, batch: int, base_batch: int) -> float:
        """Return how many steps with the base batch one step with `batch` samples is worth.

        The gain is 1 without noise and batch/base_batch with nothing but noise. It is the gain ratio of Johnson et al.,
        "AdaScale SGD", ICML 2020: r = (σ² + μ²)/(σ²/S + μ²), where σ² = tr(Σ)/base_batch, μ² = |G|² and
        S = batch/base_batch.
        """
        square = max(self.square, 0.0)
        top, bottom = self.variance / base_batch + square, self.variance / batch + square
        return top / bottom if bottom > 0 else 1.0

    def state_dict(self) -> dict[str, float]:
        """Return the state as plain numbers."""
        return {"variance": self.variance, "square": self.square, "steps": self.steps}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Resume from saved averages. They describe a single sample's gradient, so any batch and world size will do."""
        self.variance = float(state["variance"])
        self.square = float(state["square"])
        self.steps = float(state["steps"])
