"""When to save: pure arithmetic on measured durations."""

from __future__ import annotations

import math
from dataclasses import dataclass

from edl.errors import SettingsError

__all__ = ["SaveSchedule"]


@dataclass
class SaveSchedule:
    """Counts steps to the next save. All ranks of a world must agree on the next step, or they save different steps.

    Exactly one of `overhead`, `interval_s` and `interval_steps` is given.

    Attributes:
        overhead: the share of the time that saving may cost at most.
        interval_s: seconds between two saves.
        interval_steps: steps between two saves.
        next_step: the step after which to save next; None for the step that is finished next.

    Raises:
        SettingsError: none or several of the three are given, or not above 0.
    """

    overhead: float | None = None
    interval_s: float | None = None
    interval_steps: int | None = None
    next_step: int | None = None
    _warm: bool = False

    def __post_init__(self) -> None:
        rates = [rate for rate in (self.overhead, self.interval_s, self.interval_steps) if rate is not None]
        if len(rates) != 1 or not 0 < rates[0] < math.inf:
            raise SettingsError(
                f"overhead={self.overhead}, interval_s={self.interval_s}, interval_steps={self.interval_steps}: "
                "give exactly one of them, above 0"
            )

    def is_due(self, step: int) -> bool:
        """Return whether to save after `step`."""
        return self.next_step is None or step >= self.next_step

    def propose_steps(self, step_s: float, save_s: float) -> int:
        """Return how many steps this rank would let pass until the next save.

        Args:
            step_s: seconds that a step takes, without saving.
            save_s: seconds that the last save took. The first does not count: it pays for the memory's pages.
        """
        if self.interval_steps is not None:
            return self.interval_steps
        if self.interval_s is not None:
            return _steps(self.interval_s / step_s if step_s > 0 else math.inf)
        assert self.overhead is not None
        if not self._warm:
            return 1
        return _steps(save_s * (1 - self.overhead) / (self.overhead * step_s) if step_s > 0 else 1)

    def set_next_save(self, step: int, steps: int) -> None:
        """Plan the next save `steps` after `step`, as all ranks agreed after the save of `step`."""
        self._warm = True
        self.next_step = step + steps

    def restart(self) -> None:
        """Begin anew, in another world or with a restored state: save after the next step."""
        self.next_step = None
        self._warm = False


_MOST_STEPS = 1 << 30  # ranks agree on an int64, and infinity is none; no job has so many steps


def _steps(wanted: float) -> int:
    return max(1, math.ceil(min(wanted, _MOST_STEPS)))
