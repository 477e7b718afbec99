"""The output of workers that goes to files, and is copied from there to the console: torchrun's `--tee`."""

from __future__ import annotations

import sys
from typing import Any

from torch.distributed.elastic.multiprocessing.tail_log import TailLog

__all__ = ["LogTee"]


class LogTee:
    """Copies what workers write into their files, a generation at a time.

    Args:
        role: begins every line, together with the rank.
    """

    def __init__(self, role: str) -> None:
        self._role = role
        self._tails: list[Any] = []

    def follow_logs(self, logs: Any, first_rank: int) -> None:
        """Copy to the console what the workers write from now on, until `stop`.

        Args:
            logs: torch's `LogsDest`, which names the files by local rank.
            first_rank: of this node.
        """
        for name, files, stream in (("stdout", logs.tee_stdouts, sys.stdout), ("stderr", logs.tee_stderrs, sys.stderr)):
            if files:
                prefixes = {rank: f"[{self._role}{first_rank + rank}]:" for rank in files}
                self._tails.append(TailLog(name, files, stream, log_line_prefixes=prefixes).start())

    def stop(self) -> None:
        """Copy what is left in the files, and no more."""
        for tail in self._tails:
            tail.stop()
        self._tails.clear()
