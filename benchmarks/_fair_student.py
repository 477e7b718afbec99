"""A student of the `fairness` benchmark, as a `Child`: a modest one with one request at a time, or a greedy one."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks._child import WARM_UP_S, answer
from edl.distill import DistillReader

MODEST_ROWS, GREEDY_ROWS = 4, 256


def modest(endpoint: str, seconds: float) -> list[float]:
    """Return the seconds that each request takes."""
    asked, ended = threading.Semaphore(0), False

    def source() -> Iterator[tuple[Any]]:
        while True:
            asked.acquire()
            if ended:
                return
            yield (np.zeros((MODEST_ROWS, 1), np.int64),)

    times: list[float] = []
    with DistillReader(ins=["id"], predicts=["label"]) as reader:
        reader.set_fixed_teacher(endpoint)
        reader.set_batch_generator(source)
        epoch = reader()
        begun = time.monotonic()
        while (now := time.monotonic()) < begun + WARM_UP_S + seconds:
            asked.release()
            next(epoch)
            if now > begun + WARM_UP_S:
                times.append(time.monotonic() - now)
        ended = True
        asked.release()
    return times


def greedy(endpoint: str, seconds: float) -> None:
    """Keep as many requests in flight as the reader allows, each larger than a batch."""
    until = time.monotonic() + 2 * WARM_UP_S + seconds

    def source() -> Iterator[tuple[Any]]:
        while time.monotonic() < until:
            yield (np.zeros((GREEDY_ROWS, 1), np.int64),)

    with DistillReader(ins=["id"], predicts=["label"]) as reader:
        reader.set_fixed_teacher(endpoint)
        reader.set_batch_generator(source)
        for _ in reader():
            pass


def _handle(request: dict[str, Any]) -> dict[str, Any]:
    if request["kind"] == "greedy":
        greedy(request["endpoint"], request["seconds"])
        return {}
    return {"times": modest(request["endpoint"], request["seconds"])}


if __name__ == "__main__":
    answer(_handle)
