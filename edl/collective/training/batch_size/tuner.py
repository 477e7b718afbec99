"""The automatic batch of one run: measures its steps, asks `goodput`, and says what was decided."""

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

_KEPT = 32


@dataclass(frozen=True)
class RunState:
    """The run as it is: ranks, their global batch, what fits into this rank's memory, the gradients' noise."""

    world: int
    batch: int
    max_micro_batch: int | None
    noise: GradientNoise


class BatchSizeTuner:
    """Collects step times between two decisions. Everything saved is the same on every rank."""

    def __init__(self, settings: AutoBatch, base_batch: int) -> None:
        self.settings, self.base_batch = settings, base_batch
        self._steps = 0
        self._setting = (0, 0)  # world and batch that the times are of
        self._seconds: list[float] = []  # of this rank, since the last decision or change
        self._waits: list[float] = []
        self._measured: dict[tuple[int, int, int], tuple[float, float]] = {}

    def waited(self, seconds: float) -> None:
        """Take in how long this rank waited between two steps, for its next batch."""
        self._waits.append(seconds)

    def stepped(
        self, now: RunState, seconds: float | None, group: dist.ProcessGroup | None, device: torch.device
    ) -> int:
        """One more step is finished; it took `seconds` on this rank, None if that is not to be counted.

        Every rank must call it after every step. Now and then they tell each other what they measured.

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
        """Plain numbers."""
        return {"steps": self._steps, "measured": [[*key, *times] for key, times in self._measured.items()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there; what was measured in other worlds goes on counting."""
        self._steps = int(state["steps"])
        self._clear()
        self._measured = {}
        for world, rows, parts, seconds, *waited_s in state["measured"]:  # before 0.1.0 without the wait
            self._measured[int(world), int(rows), int(parts)] = float(seconds), float(waited_s[0] if waited_s else 0.0)
