"""The automatic batch of one run: measures its steps, asks `edl.collective.goodput`, and says what was decided."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Mapping
from typing import Any

from edl.collective.goodput import AutoBatch, Decision, choose, shape
from edl.collective.noise import Noise
from edl.collective.step_time import Measured

__all__ = ["Tuner"]

logger = logging.getLogger("edl.collective")

_KEPT = 32


class Tuner:
    """Collects step times between two decisions. Everything saved is the same on every rank."""

    def __init__(self, settings: AutoBatch, base_batch: int) -> None:
        self.settings, self.base_batch = settings, base_batch
        self._steps = 0
        self._setting = (0, 0)  # world and batch that the times are of
        self._seconds: list[float] = []  # of this rank, since the last decision or change
        self._measured: dict[tuple[int, int, int], float] = {}

    def measure(self, world: int, batch: int, seconds: float) -> None:
        """A step of `batch` samples over `world` ranks took so long on this one."""
        if self._setting != (world, batch):
            self._setting = (world, batch)
            self._seconds.clear()
        self._seconds.append(seconds)

    def due(self) -> bool:
        """One more step is finished. Whether it is time to decide, on all ranks alike."""
        self._steps += 1
        return self._steps % self.settings.every_steps == 0

    def typical_us(self) -> int:
        """Microseconds that a step takes on this rank, 0 if none was measured since the last decision or change."""
        return max(round(statistics.median(self._seconds) * 1e6), 1) if self._seconds else 0

    def decide(self, world: int, batch: int, seconds: float, max_micro_batch: int | None, noise: Noise) -> Decision:
        """Choose the batch.

        Args:
            world, batch: of now.
            seconds: `typical_us` of the slowest rank in seconds; 0 if no rank measured anything.
            max_micro_batch: the smallest of all ranks'.
        """
        self._seconds.clear()
        if seconds > 0:
            key = (world, *shape(batch, world, max_micro_batch))
            self._measured.pop(key, None)
            self._measured[key] = seconds
        for old in list(self._measured)[:-_KEPT]:
            del self._measured[old]
        decision = choose(
            self.settings,
            [Measured(*setting, one) for setting, one in self._measured.items()],
            noise.scale if noise.known else None,
            batch=batch,
            base_batch=self.base_batch,
            world=world,
            max_micro_batch=max_micro_batch,
        )
        logger.info("%s", decision.reason)
        return decision

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers."""
        return {"steps": self._steps, "measured": [[*key, seconds] for key, seconds in self._measured.items()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there; what was measured in other worlds goes on counting."""
        self._steps = int(state["steps"])
        self._seconds.clear()
        self._measured = {
            (int(world), int(rows), int(parts)): float(seconds) for world, rows, parts, seconds in state["measured"]
        }
