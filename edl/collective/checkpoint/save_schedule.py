"""When to save: pure arithmetic on measured durations."""

from __future__ import annotations

import math
from dataclasses import dataclass

from edl.errors import SettingsError

__all__ = ["SaveSchedule"]


@dataclass
class SaveSchedule:
    """Counts steps to the next save. All ranks of a world must be told the same, or they save different steps.

    Exactly one of the three says how often.

    Attributes:
        overhead: the share of the time that saving may cost at most.
        interval_s: seconds between two saves.
        interval_steps: steps between two saves.
        next_step: the step after which to save next; None for the one that is finished next.
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
        """Whether to save after `step`."""
        return self.next_step is None or step >= self.next_step

    def propose_steps(self, step_s: float, save_s: float) -> int:
        """How many steps this rank would let pass until the next save.

        Args:
            step_s: what a step takes, without saving.
            save_s: what the last save took. The first one does not count: it pays for the memory's pages.
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
        """A save was made after `step`, and all ranks agreed on the next one `steps` later."""
        self._warm = True
        self.next_step = step + steps

    def restart(self) -> None:
        """Begin anew, in another world or with a restored state: save after the next step."""
        self.next_step, self._warm = None, False


_MOST_STEPS = 1 << 30


def _steps(wanted: float) -> int:
    return max(1, math.ceil(min(wanted, _MOST_STEPS)))
