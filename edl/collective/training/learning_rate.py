"""The learning rate at another global batch than the rate was chosen for: pure rules.

With a scale of S = batch / base batch, a policy says by what the rate of the user's schedule is multiplied:

| policy | factor | for |
| --- | --- | --- |
| `None` | 1 | a rate that was chosen for every batch there will be |
| `Linear` | S, after a warm-up | SGD (Goyal et al., "Accurate, Large Minibatch SGD", 2017) and LARS |
| `SquareRoot` | √S, after a warm-up if wanted | Adam and RMSprop, whose decays and epsilon follow; LAMB |
| `AdaScale` | from 1 to S, by the measured noise | SGD (Johnson et al., "AdaScale SGD", 2020) |
| a function of S | what it returns | anything else |

LARS (You et al., "Large Batch Training of Convolutional Networks", 2017) scales rates layer by layer, on top of the
linear rule with its warm-up. LAMB (You et al., "Large Batch Optimization for Deep Learning", 2020) takes the
square root rule, with a warm-up that lasts as many more epochs as the batch is larger.

Nothing here touches the optimizer's state: moments are of gradients, whose mean does not depend on the batch.

A schedule that counts steps comes to other rates at the same data when the batch changes, and to nonsense when
boundaries computed for a new batch meet a restored count of old steps. Samples mean the same for every batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from edl.collective.training.noise import GradientNoise
from edl.errors import SettingsError

__all__ = [
    "AdaScale",
    "Linear",
    "Policy",
    "RateScaling",
    "SampleSchedule",
    "SquareRoot",
    "decay_for",
    "epsilon_for",
    "needs_noise",
]


@dataclass(frozen=True)
class Linear:
    """The rate grows as the batch does; a larger factor is reached step by step over `warmup_samples` samples.

    Goyal et al. 2017, sections 2.1 and 2.2, where five epochs of warm-up go with factors up to 32. A smaller factor
    takes effect at once. PyTorch's momentum is of gradients without the rate, so that no correction (their section 3)
    is needed when it changes.

    Attributes:
        warmup_samples: over which a larger factor is reached; 0 for none.
    """

    warmup_samples: int

    def __post_init__(self) -> None:
        _check_warmup(self.warmup_samples)


@dataclass(frozen=True)
class SquareRoot:
    """The rate grows as the square root of the batch, so that the noise of a step stays the same.

    For RMSprop and Adam, Malladi et al., "On the SDEs and Scaling Rules for Adaptive Gradient Algorithms", NeurIPS
    2022 (its square root scaling rules), with the scale S: the rate times √S, 1 - S(1 - β) for every decay β, and
    epsilon divided by √S (`decay_for`, `epsilon_for`). For other optimizers, such as LAMB, the rate alone.

    Attributes:
        warmup_samples: over which a larger rate is reached step by step; a smaller rate takes effect at once.
        moments: whether decays and epsilon are scaled as well; None for PyTorch's Adam, AdamW and RMSprop, which the
            rule was derived for.
    """

    warmup_samples: int = 0
    moments: bool | None = None

    def __post_init__(self) -> None:
        _check_warmup(self.warmup_samples)


@dataclass(frozen=True)
class AdaScale:
    """The rate grows by AdaScale's gain, and so does the progress that schedules see: see `GradientNoise.gain`."""


Policy: TypeAlias = Linear | SquareRoot | AdaScale | Callable[[float], float] | None


def decay_for(decay: float, scale: float) -> float:
    """Return the decay of a moving average at `scale` times the batch; below 0 where the rule does not hold any longer.

    Malladi et al. 2022: 1 - S(1 - β), so that the average reaches back over as many samples as before.

    Args:
        decay: β at the base batch.
        scale: S.
    """
    return 1 - scale * (1 - decay)


def epsilon_for(epsilon: float, scale: float) -> float:
    """Return what is added to the root of the second moment at `scale` times the batch.

    Malladi et al. 2022: ε/√S, as that root shrinks where it is mostly noise.

    Args:
        epsilon: ε at the base batch.
        scale: S.
    """
    return epsilon / math.sqrt(scale)


def _check_warmup(samples: int) -> None:
    if samples < 0:
        raise SettingsError(f"warmup_samples={samples}: must not be negative")


def needs_noise(policy: Policy) -> bool:
    """Return whether a policy looks at the gradients' noise.

    Args:
        policy: of a trainer.
    """
    return isinstance(policy, AdaScale)


class RateScaling:
    """The rate's factor and the progress of a training run.

    Args:
        policy: of the run.
        base_batch: samples of a step that the rate was chosen for.
        batch: samples of a step at the beginning.

    Attributes:
        batch: samples of a step now.
        samples: trained so far.
        progress: what schedules are a function of, in samples at the base batch: the samples trained or, with
            `AdaScale`, its scale-invariant steps times the base batch.
    """

    def __init__(self, policy: Policy, base_batch: int, batch: int) -> None:
        if base_batch < 1 or batch < 1:
            raise SettingsError(f"base_batch={base_batch}, global_batch={batch}: both must be at least 1")
        self.policy = policy
        self.base_batch = base_batch
        self.batch = batch
        self.samples = 0
        self.progress = 0.0
        self._from = 1.0  # the factor at which a warm-up begins
        self._since = 0  # samples trained when it began

    def set_batch(self, batch: int, noise: GradientNoise) -> None:
        """Use another global batch from the next step on.

        Args:
            batch: samples of a step.
            noise: of the gradients until now.
        """
        if batch != self.batch:
            self._from = self.factor(noise)
            self._since = self.samples
            self.batch = batch

    @property
    def scale(self) -> float:
        """S: the batch divided by the base batch."""
        return self.batch / self.base_batch

    def factor(self, noise: GradientNoise) -> float:
        """Return the factor of the next step's learning rate.

        Args:
            noise: of the gradients until now.

        Raises:
            SettingsError: the user's function returned something that is not a positive number.
        """
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
        """Count a finished step.

        Args:
            samples: of the step; the last step of an epoch may have fewer than the global batch.
            noise: of the gradients until now.
        """
        worth = self.base_batch / self.batch * self._gain(noise) if isinstance(self.policy, AdaScale) else 1.0
        self.samples += samples
        self.progress += worth * samples

    def _warmed(self, target: float, over: int) -> float:
        done = (self.samples - self._since) / over if over else 1.0
        if target <= self._from or done >= 1:
            return target
        return self._from + (target - self._from) * done

    def _gain(self, noise: GradientNoise) -> float:
        if not noise.known:  # the careful end of what it can be
            return min(1.0, self.batch / self.base_batch)
        return noise.gain(self.batch, self.base_batch)

    def state_dict(self) -> dict[str, float]:
        """Return plain numbers."""
        return {
            "batch": self.batch,
            "samples": self.samples,
            "progress": self.progress,
            "from": self._from,
            "since": self._since,
        }

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Go on from a saved state. The policy and the base batch are the user's, not the state's.

        Args:
            state: as `state_dict` returned it.
        """
        self.batch = int(state["batch"])
        self.samples = int(state["samples"])
        self.progress = float(state["progress"])
        self._from = float(state["from"])
        self._since = int(state["since"])


# --- Any PyTorch learning rate schedule, in samples in place of steps ---


class SampleSchedule:
    """Steps a scheduler once for every `samples_per_step` samples of progress.

    ::

        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)   # steps of 256 samples
        trainer = ElasticTrainer(..., schedule=SampleSchedule(cosine, samples_per_step=256))

    So a schedule that was written for a fixed batch goes on unchanged, with that batch as `samples_per_step`. Progress
    is that of `edl.collective.training.learning_rate.RateScaling`: the samples trained, or AdaScale's.

    Args:
        scheduler: that `step()` moves on, and whose `state_dict` has all of its state.
        samples_per_step: how many samples it takes for a step.

    Raises:
        SettingsError: `samples_per_step` is not above 0, or the scheduler counts no steps.
    """

    def __init__(self, scheduler: LRScheduler, samples_per_step: float) -> None:
        if not samples_per_step > 0:
            raise SettingsError(f"samples_per_step={samples_per_step}: must be above 0")
        if isinstance(scheduler, ReduceLROnPlateau):
            raise SettingsError(
                "ReduceLROnPlateau counts evaluations, not steps, so it needs no SampleSchedule: have an Evaluator "
                "call its step(metric), Evaluator(..., on_result=plateau.step), and give both to the State"
            )
        self.scheduler = scheduler
        self.samples_per_step = samples_per_step
        self._stepped_at = 0.0

    def move_to(self, progress: float) -> None:
        """Step the scheduler up to a progress; never back.

        Args:
            progress: samples, see `RateScaling.progress`.
        """
        # Progress is a sum of many fractions with AdaScale: a step must not wait for the last bit of one.
        while progress - self._stepped_at >= self.samples_per_step * (1 - 1e-9):
            self.scheduler.step()
            self._stepped_at += self.samples_per_step

    def state_dict(self) -> dict[str, Any]:
        """Return the scheduler's state, and after how many samples its last step was."""
        return {"stepped_at": self._stepped_at, "scheduler": self.scheduler.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state; another `samples_per_step` holds from then on, not for what was.

        Args:
            state: as `state_dict` returned it.
        """
        self._stepped_at = float(state["stepped_at"])
        self.scheduler.load_state_dict(dict(state["scheduler"]))
