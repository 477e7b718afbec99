"""The signals that ask an agent to leave: the first one politely, the second at once."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import TracebackType
from typing import Any

__all__ = ["AskedToLeaveError", "StopSignals"]

_ASKING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_ASKING_IN_SLURM = (*_ASKING, signal.SIGUSR1)  # what `#SBATCH --signal=USR1@60` sends before the time limit


class AskedToLeaveError(Exception):
    """Somebody asked this node to leave while it waited for something that would have taken longer."""


class StopSignals:
    """Counts what arrives between `__enter__` and `__exit__`, which are for the main thread.

    Each is only noted: when it can be acted on is for those to know who are in the middle of something.

    Args:
        wake: called with each signal, in the main thread, wherever that is.
        slurm: Slurm sends the signals. It repeats SIGTERM (at the begin and at the end of a partition's GraceTime, and
            when a job is cancelled that was asked before), which says nothing of how urgent it is: SIGKILL follows by
            itself. Only SIGINT, which a person sends through `srun`, then hurries.
    """

    def __init__(self, wake: Callable[[], None], *, slurm: bool = False) -> None:
        self._wake = wake
        self.slurm = slurm
        self._numbers: list[int] = []
        self._before: dict[int, Any] = {}

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
        """Of a process that left for the last signal, as a shell says it."""
        return 128 + self._numbers[-1]

    def raise_if_stopping(self) -> None:
        """To be called now and then by whoever waits.

        Raises:
            AskedToLeaveError: a signal came.
        """
        if self._numbers:
            raise AskedToLeaveError

    def __enter__(self) -> StopSignals:
        asking = _ASKING_IN_SLURM if self.slurm else _ASKING
        heeded = [number for number in asking if signal.getsignal(number) is not signal.SIG_IGN]  # nohup's, for one
        self._before = {number: signal.signal(number, self._note) for number in heeded}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: object) -> None:
        self._numbers.append(number)
        self._wake()
