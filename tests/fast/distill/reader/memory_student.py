"""A student with a slow training loop and large answers, which prints by how many bytes its process grew at most."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from edl.distill import DistillReader, Options, Teachers

ROWS = 4
BATCHES = 12
QUIET_S = 0.3
"""The loop takes a batch when nothing has come for so long: quick teachers have sent all that they may by then."""


def batches() -> Iterator[Any]:
    for number in range(BATCHES):
        yield (np.full((ROWS, 4), number, np.float32),)


def resident_bytes(what: str) -> int:
    """A line of /proc/self/status: VmRSS is what is resident now, VmHWM the most that was."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(what))


def main() -> None:
    teachers = Teachers(endpoints=tuple(sys.argv[1:]))
    with DistillReader(["x"], ["y"], teachers=teachers, options=Options(memory_bytes=1 << 20)) as reader:
        reader.set_batch_generator(batches)
        before = resident_bytes("VmRSS")
        for number, (x, y) in enumerate(reader()):
            assert y.max() == x[0, 0] == number, "a label belongs to another input"
            received, since = -1, time.monotonic()
            while time.monotonic() < since + QUIET_S:
                if (now := reader.stats().rows_received) != received:
                    received, since = now, time.monotonic()
                time.sleep(0.02)
        print(resident_bytes("VmHWM") - before)


if __name__ == "__main__":
    main()
