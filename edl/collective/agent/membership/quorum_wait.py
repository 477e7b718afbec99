"""What is said while too few nodes are there for a job to run: how many are missing, and until when it waits."""

from __future__ import annotations

from typing import Final

__all__ = ["QuorumWait"]

_AGAIN_S: Final = 60.0


class QuorumWait:
    """One wait after another, each until enough nodes are there. Without a clock: `now_s` is the caller's.

    Args:
        wanted: nodes.
        limit_s: for how long they are waited for.
    """

    def __init__(self, wanted: int, limit_s: float) -> None:
        self._wanted = wanted
        self._limit_s = limit_s
        self._since: float | None = None
        self._said: tuple[int, float] | None = None

    def waited_s(self, now_s: float) -> float:
        """For how long this wait has lasted."""
        return now_s - self._since if self._since is not None else 0.0

    def end_wait(self) -> None:
        """Enough nodes are there, or the job runs: the next wait is another one."""
        self._since = self._said = None

    def record_nodes(self, here: int, now_s: float) -> str:
        """The job waits for nodes, of which `here` are there. Returns what to say now, empty for nothing."""
        if here >= self._wanted:
            self.end_wait()
            return ""
        if self._since is None:
            self._since = now_s
        before, at = self._said or (-1, now_s)
        if here == before and now_s - at < _AGAIN_S:
            return ""
        self._said = here, now_s
        left_s = max(0.0, self._limit_s - self.waited_s(now_s))
        if here == before:
            return f"still {here} of at least {self._wanted} nodes: waiting {left_s:.0f} s more"
        are = "node is" if self._wanted == 1 else "nodes are"
        return (
            f"{here} of at least {self._wanted} {are} here: waiting up to {left_s:.0f} s for more "
            "(--rdzv-conf join_timeout=SECONDS)"
        )
