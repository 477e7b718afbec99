"""The automatic batch of a run: measures its steps, asks `objective` for the best batch, and logs the decision."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from edl.collective.ranks import exchange
from edl.collective.training.batch_size.noise import GradientNoise
from edl.collective.training.batch_size.objective import (
    AutoBatch,
    BatchSizeDecision,
    choose_batch_size,
    micro_batch_shape,
)
from edl.collective.training.batch_size.step_time import StepMeasurement

__all__ = ["BatchSizeTuner", "RunState"]

logger = logging.getLogger("edl.collective")

_KEPT = 32  # settings whose times are kept: the oldest are of batches long left behind, and a fit takes longer


@dataclass(frozen=True)
class RunState:
    """A run at a step.

    Attributes:
        world: the number of ranks.
        batch: samples of a step.
        max_micro_batch: samples that fit into this rank's memory, None for no limit.
        noise: of the gradients.
    """

    world: int
    batch: int
    max_micro_batch: int | None
    noise: GradientNoise


class BatchSizeTuner:
    """Collects step times between two decisions. All that is saved is the same on every rank.

    Args:
        settings: the bounds.
        base_batch: samples of a step that the learning rate was chosen for.
    """

    def __init__(self, settings: AutoBatch, base_batch: int) -> None:
        self.settings = settings
        self.base_batch = base_batch
        self._steps = 0
        self._setting = (0, 0)  # world and batch that the times are of
        self._seconds: list[float] = []  # of this rank, since the last decision or change
        self._waits: list[float] = []
        self._measured: dict[tuple[int, int, int], tuple[float, float]] = {}

    def record_wait(self, seconds: float) -> None:
        """Record how long this rank waited between two steps, for its next batch.

        Args:
            seconds: of the wait.
        """
        self._waits.append(seconds)

    def record_step(
        self, now: RunState, seconds: float | None, group: dist.ProcessGroup | None, device: torch.device
    ) -> int:
        """Record a finished step, and now and then decide on the batch.

        A collective: all ranks call it after every step.

        Args:
            now: the run at this step.
            seconds: that the step took on this rank, None if that is not to be counted.
            group: the process group of the ranks.
            device: from which the group's backend can send.

        Returns:
            The global batch from now on, the same on every rank.
        """
        if self._setting != (now.world, now.batch):
            self._setting = (now.world, now.batch)
            self._clear()
        if seconds is not None:
            self._seconds.append(seconds)
        self._steps += 1
        if self._steps % self.settings.every_steps:
            return now.batch
        micros = max(round(statistics.median(self._seconds) * 1e6), 1) if self._seconds else 0
        waited = round(statistics.median(self._waits) * 1e6) if self._waits else 0
        self._clear()
        everyone = exchange([micros, waited, now.max_micro_batch or 0], group, device)
        # A rank that waits for its loader has the others wait for it in their steps: those are not slow.
        waited_s = max(waited for _, waited, _ in everyone) / 1e6
        whole_s = max(micros + waited for micros, waited, _ in everyone) / 1e6
        slowest_s = max(whole_s - waited_s, min(micros for micros, _, _ in everyone) / 1e6)
        tightest = min((most for _, _, most in everyone if most), default=None)
        decision = self._decide(replace(now, max_micro_batch=tightest), slowest_s, waited_s)
        logger.info("%s", decision.reason)
        # Rounding may differ between kinds of machines: what the first rank decides holds for all.
        (batch,) = exchange([decision.batch], group, device)[0]
        return batch

    def _clear(self) -> None:
        self._seconds.clear()
        self._waits.clear()

    def _decide(self, now: RunState, seconds: float, waited_s: float) -> BatchSizeDecision:
        if seconds > 0:
            setting = (now.world, *micro_batch_shape(now.batch, now.world, now.max_micro_batch))
            self._measured.pop(setting, None)  # the newest last
            self._measured[setting] = (seconds, waited_s)
        for old in list(self._measured)[:-_KEPT]:
            del self._measured[old]
        return choose_batch_size(
            self.settings,
            [StepMeasurement(*setting, *times) for setting, times in self._measured.items()],
            now.noise.scale if now.noise.known else None,
            batch=now.batch,
            base_batch=self.base_batch,
            world=now.world,
            max_micro_batch=now.max_micro_batch,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return plain numbers."""
        return {"steps": self._steps, "measured": [[*key, *times] for key, times in self._measured.items()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with saved measurements, also of other worlds.

        Args:
            state: as `state_dict` returned it.
        """
        self._steps = int(state["steps"])
        self._clear()
        self._measured = {}
        for world, rows, parts, seconds, *waited_s in state["measured"]:  # before 0.1.0 without the wait
            self._measured[int(world), int(rows), int(parts)] = float(seconds), float(waited_s[0] if waited_s else 0.0)
