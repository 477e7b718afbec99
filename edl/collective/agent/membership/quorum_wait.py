"""The wait for enough nodes: how many are missing, for how long yet, and when a person is told."""

from __future__ import annotations

from typing import Final

__all__ = ["QuorumWait"]

_REPEAT_S: Final = 60.0
"""Between two messages that say the same: oftener they would fill the log, and a person looks about once a minute."""


class QuorumWait:
    """Measures waits for enough nodes, one after another. Reads no clock.

    Args:
        min_nodes: how many nodes end a wait.
        timeout_s: for how long they are waited for, in seconds, as messages say it.
    """

    def __init__(self, min_nodes: int, timeout_s: float) -> None:
        self._min_nodes = min_nodes
        self._timeout_s = timeout_s
        self._began_at: float | None = None
        self._reported: tuple[int, float] | None = None  # nodes, and when

    def waited_s(self, now_s: float) -> float:
        """Return for how many seconds this wait has lasted, 0 without a wait."""
        return now_s - self._began_at if self._began_at is not None else 0.0

    def end_wait(self) -> None:
        """End this wait: enough nodes are present, or the job runs. The next shortage begins another wait."""
        self._began_at = None
        self._reported = None

    def record_nodes(self, present: int, now_s: float) -> str:
        """Record how many nodes are present while the job waits.

        Args:
            present: how many.
            now_s: the time now, in seconds of the clock that all calls use.

        Returns:
            A message for a person, empty where there is nothing new.
        """
        if present >= self._min_nodes:
            self.end_wait()
            return ""
        if self._began_at is None:
            self._began_at = now_s
        reported, at_s = self._reported or (-1, now_s)
        if present == reported and now_s - at_s < _REPEAT_S:
            return ""
        self._reported = present, now_s
        left_s = max(0.0, self._timeout_s - self.waited_s(now_s))
        if present == reported:
            return f"still {present} of at least {self._min_nodes} nodes: waiting {left_s:.0f} s more"
        are = "node is" if self._min_nodes == 1 else "nodes are"
        return (
            f"{present} of at least {self._min_nodes} {are} here: waiting up to {left_s:.0f} s for more "
            "(--rdzv-conf join_timeout=SECONDS)"
        )
