"""Ends what a test cluster of Slurm started, also where the tests themselves were killed.

    python -m tests.slurm_guard SLURM_CONF

waits until its standard input ends, which it does at the latest with the process that opened it. Then it kills every
process that has this configuration in its environment: the daemons, the steps, and what they run.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

KILLING_S = 20.0


def processes_of(conf: str) -> list[int]:
    """All processes but this one whose environment names the configuration."""
    mark = f"SLURM_CONF={conf}".encode()
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                if mark in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
            except OSError:
                continue  # it has ended, or is another user's
    return found


def main() -> None:
    """Wait, then kill until nothing is left."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    deadline = time.monotonic() + KILLING_S
    while (left := processes_of(sys.argv[1])) and time.monotonic() < deadline:
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        time.sleep(0.05)


if __name__ == "__main__":
    main()
