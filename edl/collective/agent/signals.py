"""The signals that stop an agent: the first asks it to leave the job, a second to leave at once."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import TracebackType
from typing import Any

__all__ = ["AskedToLeaveError", "StopSignals"]

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_SIGNALS_IN_SLURM = (*_SIGNALS, signal.SIGUSR1)  # what `#SBATCH --signal=USR1@60` sends before the time limit


class AskedToLeaveError(Exception):
    """A signal asked this node to leave while it waited for something that would have taken longer."""


class StopSignals:
    """Counts the signals that arrive between `__enter__` and `__exit__`, which are for the main thread.

    The handler only counts: code in the middle of something decides itself when to act on a signal.

    Args:
        wake: called with every signal, in the main thread, wherever that is.
        slurm: whether Slurm sends the signals. It repeats SIGTERM (at the begin and at the end of a partition's
            GraceTime, and when a job is cancelled that was asked before), which says nothing of how urgent it is:
            SIGKILL follows by itself. Only SIGINT, which a person sends through `srun`, then hurries.
    """

    def __init__(self, wake: Callable[[], None], *, slurm: bool = False) -> None:
        self._wake = wake
        self.slurm = slurm
        self._numbers: list[int] = []
        self._previous_handlers: dict[int, Any] = {}

    @property
    def stopping(self) -> bool:
        """Whether this node shall leave."""
        return bool(self._numbers)

    @property
    def urgent(self) -> bool:
        """Whether it was asked a second time, and shall leave at once."""
        return any(not self.slurm or number == signal.SIGINT for number in self._numbers[1:])

    @property
    def number(self) -> int:
        """The signal that came first, which the workers get as well."""
        return self._numbers[0]

    @property
    def exit_code(self) -> int:
        """The exit code of a process that left for the last signal, as a shell gives it."""
        return 128 + self._numbers[-1]

    def raise_if_stopping(self) -> None:
        """Return if no signal came; code that waits calls this again and again.

        Raises:
            AskedToLeaveError: a signal came.
        """
        if self._numbers:
            raise AskedToLeaveError

    def __enter__(self) -> StopSignals:
        signals = _SIGNALS_IN_SLURM if self.slurm else _SIGNALS
        # What this process was started to ignore stays ignored, such as SIGHUP under nohup.
        handled = [number for number in signals if signal.getsignal(number) is not signal.SIG_IGN]
        self._previous_handlers = {number: signal.signal(number, self._record_signal) for number in handled}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)

    def _record_signal(self, number: int, frame: object) -> None:
        self._numbers.append(number)
        self._wake()
