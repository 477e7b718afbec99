"""Any PyTorch learning rate schedule, in samples in place of steps.

A schedule that counts steps comes to other rates at the same data when the batch changes, and to nonsense when
boundaries computed for a new batch meet a restored count of old steps. Samples mean the same for every batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from edl.errors import SettingsError

__all__ = ["SampleSchedule"]


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
