"""A job's throughput by its number of workers: T(n) = n / (a + b n), fitted to what the job itself has shown.

A step of n workers takes a + b n seconds for n samples' worth of work, in units of a sample a worker: `a` is what a
worker does alone, `b` what every further worker adds to all (synchronisation). So n / T is a straight line in n, and
weighted least squares on n / T = a + b n has a closed solution. `a` and `b` are at least 0: with b = 0 throughput grows
in proportion to n, with a = 0 it does not grow at all, and it is concave between, which
`edl.master.scaling.arbitration` relies on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

__all__ = ["SizeRecord", "ThroughputHistory", "ThroughputModel", "fit_throughput"]

_FORGOTTEN: Final = 1e-3
"""A size whose weight fell below this is no longer known: ten half-lives after a single sample. Kept longer, a rate of
another epoch, data set or machine would still bend the line where only two sizes are known."""


@dataclass(frozen=True)
class ThroughputModel:
    """T(n) = n / (a + b n).

    Attributes:
        a: seconds a sample that a worker needs alone.
        b: seconds a sample that each worker adds to all.
    """

    a: float
    b: float

    def __post_init__(self) -> None:
        if not (self.a >= 0 and self.b >= 0 and 0 < self.a + self.b < math.inf):
            raise ValueError(f"a and b are at least 0, finite and not both 0; these are {self.a} and {self.b}")

    def predict_rate(self, workers: float) -> float:
        """Return T(n), in samples a second.

        Args:
            workers: n, above 0.
        """
        return workers / (self.a + self.b * workers)

    def compute_efficiency(self, workers: float) -> float:
        """Return T(n) / (n T(1)): 1 where a worker does as much beside n - 1 others as alone.

        Args:
            workers: n, above 0.
        """
        return (self.a + self.b) / (self.a + self.b * workers)


@dataclass(frozen=True)
class SizeRecord:
    """What is remembered of a job's runs with one number of workers.

    Attributes:
        mean: weighted mean of n / T, in seconds a sample and worker.
        weight: the sum of its samples' weights, as of `at_s`.
        samples: how many samples there were in a row since the job came to this size.
        at_s: when the last was taken, in seconds of the caller's clock.
    """

    mean: float
    weight: float
    samples: int
    at_s: float


@dataclass(frozen=True)
class ThroughputHistory:
    """A job's rates by its number of workers, with weights that halve every `half_life_s`. As large as there are sizes.

    Attributes:
        half_life_s: after so many seconds a sample counts half.
        sizes: number of workers -> what is remembered.
    """

    half_life_s: float = 3600.0
    sizes: Mapping[int, SizeRecord] = field(default_factory=lambda: MappingProxyType({}))

    def record_rate(self, workers: int, rate: float, now_s: float) -> ThroughputHistory:
        """Return the history with one more sample; unchanged by a rate that says nothing of T: 0, or not finite.

        Args:
            workers: n, with which the rate was measured.
            rate: samples (or steps of a fixed batch) a second of the whole job, without its pauses.
            now_s: when, in seconds; a time before the last sample's counts as that one.
        """
        if workers < 1 or not (0 < rate < math.inf) or not math.isfinite(now_s):
            return self
        mean = workers / rate
        if not 0 < mean < math.inf:
            return self
        latest_s = max([now_s, *(record.at_s for record in self.sizes.values())])
        sizes = {
            size: record if size == workers else SizeRecord(record.mean, record.weight, 0, record.at_s)
            for size, record in self.sizes.items()
            if self.weigh(record, latest_s) >= _FORGOTTEN or size == workers
        }
        before = sizes.get(workers)
        old = self.weigh(before, latest_s) if before else 0.0
        # The mean of two numbers in this form lies between them whatever the rounding, which a sum's quotient need not.
        merged = mean if before is None else before.mean + (mean - before.mean) / (old + 1.0)
        sizes[workers] = SizeRecord(merged, old + 1.0, (before.samples if before else 0) + 1, latest_s)
        return ThroughputHistory(self.half_life_s, MappingProxyType(sizes))

    def weigh(self, record: SizeRecord, now_s: float) -> float:
        """Return what a size's samples weigh now.

        Args:
            record: of the size.
            now_s: in seconds of the caller's clock.
        """
        return float(record.weight * 0.5 ** (max(0.0, now_s - record.at_s) / self.half_life_s))

    def list_known_sizes(self, now_s: float) -> list[int]:
        """Return the numbers of workers that are not forgotten, ascending.

        Args:
            now_s: in seconds of the caller's clock.
        """
        return sorted(size for size, record in self.sizes.items() if self.weigh(record, now_s) >= _FORGOTTEN)


def fit_throughput(history: ThroughputHistory, now_s: float) -> ThroughputModel | None:
    """Fit a and b by weighted least squares on n / T = a + b n, with a and b at least 0.

    Args:
        history: the job's own.
        now_s: to which the weights are brought, in seconds.

    Returns:
        The model; None without any sample. Of a job that ran with one size only, b is 0: the most hopeful line through
        that size, as Pollux's prior for what was not tried (OSDI 2021, section 4.1, "Prior-driven exploration").
    """
    sizes = history.list_known_sizes(now_s)
    if not sizes:
        return None
    records = {size: history.sizes[size] for size in sizes}
    weights = {size: history.weigh(record, now_s) for size, record in records.items()}
    total = math.fsum(weights.values())
    center = math.fsum(weights[size] * size for size in sizes) / total
    level = math.fsum(weights[size] * records[size].mean for size in sizes) / total
    spread = math.fsum(weights[size] * (size - center) ** 2 for size in sizes)
    slope = math.fsum(weights[size] * (size - center) * (records[size].mean - level) for size in sizes)
    b = slope / spread if len(sizes) > 1 else 0.0
    a = level - b * center
    if b <= 0:  # on the border of what is allowed, the best is the best line without b
        return ThroughputModel(level, 0.0)
    if a <= 0:
        squares = math.fsum(weights[size] * size**2 for size in sizes)
        return ThroughputModel(0.0, math.fsum(weights[size] * size * records[size].mean for size in sizes) / squares)
    return ThroughputModel(a, b)
