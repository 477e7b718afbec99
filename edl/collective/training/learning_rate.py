"""Rules that adapt a learning rate to a global batch other than the one that it was chosen for.

For the scale S = batch / base batch, a policy gives the factor by which the rate from your schedule is multiplied:

| policy | factor | for |
| --- | --- | --- |
| `None` | 1 | a rate that suits every batch of the run |
| `Linear` | S, after a warm-up | SGD (Goyal et al., "Accurate, Large Minibatch SGD", 2017) and LARS |
| `SquareRoot` | √S, after an optional warm-up | Adam and RMSprop, whose decays and epsilon are scaled too; LAMB |
| `AdaScale` | from 1 to S, by the measured noise | SGD (Johnson et al., "AdaScale SGD", 2020) |
| a function of S | its return value | anything else |

The rules do not change the optimizer's state: its moments describe gradients, whose mean does not depend on the batch.
Schedules here count samples instead of steps, because a sample means the same progress at every batch size, and a step
does not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from edl.collective.training.gradients import GradientNoise
from edl.errors import SettingsError


@dataclass(frozen=True)
class Linear:
    """Scale the learning rate linearly with the batch, with a warm-up to larger factors.

    Follows sections 2.1 and 2.2 of Goyal et al. 2017, who use five epochs of warm-up for factors up to 32. If the
    factor becomes smaller, it takes effect at once.

    Attributes:
        warmup_samples: Samples over which the factor grows to a larger value; 0 for no warm-up.
    """

    warmup_samples: int

    def __post_init__(self) -> None:
        _check_warmup(self.warmup_samples)


@dataclass(frozen=True)
class SquareRoot:
    """Scale the learning rate with the square root of the batch, which keeps the noise of a step the same.

    For RMSprop and Adam, every decay β becomes 1 - S(1 - β), and epsilon is divided by √S (Malladi et al., "On the SDEs
    and Scaling Rules for Adaptive Gradient Algorithms", NeurIPS 2022).

    Attributes:
        warmup_samples: Samples over which the rate grows to a larger value; 0 for no warm-up.
        moments: Whether decays and epsilon are scaled as well. None scales them for PyTorch's Adam, AdamW and RMSprop.
    """

    warmup_samples: int = 0
    moments: bool | None = None

    def __post_init__(self) -> None:
        _check_warmup(self.warmup_samples)


@dataclass(frozen=True)
class AdaScale:
    """Scale the learning rate, and the progress that schedules see, by AdaScale's gain: see `GradientNoise.gain`."""


Policy: TypeAlias = Linear | SquareRoot | AdaScale | Callable[[float], float] | None


def _check_warmup(samples: int) -> None:
    if samples < 0:
        raise SettingsError(f"warmup_samples={samples}: must not be negative")


class RateScaling:
    """Learning rate factor, and progress in samples: those trained or, for `AdaScale`, each gain times `base_batch`."""

    def __init__(self, policy: Policy, base_batch: int, batch: int) -> None:
        if base_batch < 1 or batch < 1:
            raise SettingsError(f"base_batch={base_batch}, global_batch={batch}: both must be at least 1")
        self.policy = policy
        self.base_batch = base_batch
        self.batch = batch
        self.samples = 0
        self.progress = 0.0
        self._from = 1.0  # the factor at the start of the warm-up
        self._since = 0  # samples trained at the start of the warm-up

    def set_batch(self, batch: int, noise: GradientNoise) -> None:
        if batch != self.batch:
            self._from = self.factor(noise)
            self._since = self.samples
            self.batch = batch

    @property
    def scale(self) -> float:
        return self.batch / self.base_batch

    def factor(self, noise: GradientNoise) -> float:
        scale = self.scale
        if self.policy is None:
            return 1.0
        if isinstance(self.policy, Linear):
            return self._warmed(scale, self.policy.warmup_samples)
        if isinstance(self.policy, SquareRoot):
            return self._warmed(math.sqrt(scale), self.policy.warmup_samples)
        if isinstance(self.policy, AdaScale):
            return self._gain(noise)
        factor = self.policy(scale)
        if not (math.isfinite(factor) and factor > 0):
            raise SettingsError(f"the policy returned {factor!r} for a scale of {scale:g}: must be a positive number")
        return float(factor)

    def count_step(self, samples: int, noise: GradientNoise) -> None:
        """Count a finished step of `samples` samples; an epoch's last step may have fewer than the global batch."""
        worth = self.base_batch / self.batch * self._gain(noise) if isinstance(self.policy, AdaScale) else 1.0
        self.samples += samples
        self.progress += worth * samples

    def _warmed(self, target: float, over: int) -> float:
        done = (self.samples - self._since) / over if over else 1.0
        if target <= self._from or done >= 1:
            return target
        return self._from + (target - self._from) * done

    def _gain(self, noise: GradientNoise) -> float:
        if not noise.known:  # the most cautious value that the gain can have
            return min(1.0, self.batch / self.base_batch)
        return noise.gain(self.batch, self.base_batch)

    def state_dict(self) -> dict[str, float]:
        return {
            "batch": self.batch,
            "samples": self.samples,
            "progress": self.progress,
            "from": self._from,
            "since": self._since,
        }

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self.batch = int(state["batch"])
        self.samples = int(state["samples"])
        self.progress = float(state["progress"])
        self._from = float(state["from"])
        self._since = int(state["since"])


class SampleSchedule:
    """Step a PyTorch scheduler once for every `samples_per_step` samples of progress.

    A schedule written for a fixed batch works unchanged with that batch as `samples_per_step`. Progress is
    `edl.collective.training.learning_rate.RateScaling.progress`: the samples trained, or AdaScale's equivalent.

    Args:
        scheduler: The PyTorch scheduler that `step()` advances, and whose `state_dict` contains all of its state.
        samples_per_step: Samples of progress for each step of the scheduler.

    Raises:
        SettingsError: `samples_per_step` is not above 0, or the scheduler is a `ReduceLROnPlateau`.
    """

    def __init__(self, scheduler: LRScheduler, samples_per_step: float) -> None:
        if not samples_per_step > 0:
            raise SettingsError(f"samples_per_step={samples_per_step}: must be above 0")
        if isinstance(scheduler, ReduceLROnPlateau):
            raise SettingsError(
                "ReduceLROnPlateau counts evaluations, not steps, so it needs no SampleSchedule: create an "
                "Evaluator with on_result=plateau.step, and pass both to the State"
            )
        self.scheduler = scheduler
        self.samples_per_step = samples_per_step
        self._stepped_at = 0.0

    def move_to(self, progress: float) -> None:
        """Step the scheduler until it has caught up with `progress`; it never steps back.

        Args:
            progress: The progress to reach, in samples; see `RateScaling.progress`.
        """
        # With AdaScale, progress is a sum of many fractions: a rounding error must not delay a step.
        while progress - self._stepped_at >= self.samples_per_step * (1 - 1e-9):
            self.scheduler.step()
            self._stepped_at += self.samples_per_step

    def state_dict(self) -> dict[str, Any]:
        """Return the scheduler's state, and the progress in samples at its last step."""
        return {"stepped_at": self._stepped_at, "scheduler": self.scheduler.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a saved state. A new `samples_per_step` applies from here on, not to earlier steps.

        Args:
            state: A state that `state_dict` returned.
        """
        self._stepped_at = float(state["stepped_at"])
        self.scheduler.load_state_dict(dict(state["scheduler"]))
