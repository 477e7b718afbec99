"""The `reader` benchmark's own side: `DistillReader` and a teacher server. Runs as a `Child`."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np

from benchmarks._child import WARM_UP_S, Window, answer
from benchmarks._load import CLASSES, DTYPES, IMAGE, ROTATION, ROWS
from edl.distill import DistillReader, Options
from edl.testing import LocalTeacher

_START_S = 240.0
"""Seconds that a teacher may take to start. Under callgrind on a busy machine, it takes minutes."""


def epoch(stack: ExitStack, endpoint: str, dtype: str, shared_memory: bool) -> Iterator[Any]:
    """Return an endless epoch of image batches with the teacher's logits."""
    batches = [np.full((ROWS, *IMAGE), number, dtype) for number in range(ROTATION)]
    reader = DistillReader(
        ins=["image"], predicts=["logits"], options=Options(shared_memory=shared_memory, memory_bytes=256 << 20)
    )
    reader.set_fixed_teacher(endpoint)
    reader.set_batch_generator(lambda: ((batch,) for batch in itertools.cycle(batches)))
    stack.callback(reader.close)
    return reader()


def measure(batches: Iterator[Any], window: Window, seconds: float) -> dict[str, float]:
    """Take batches for `seconds` and return the figures. A batch that a trainer could not use ends the benchmark."""
    now = time.perf_counter()
    begin, end = now + WARM_UP_S, now + WARM_UP_S + seconds
    opened = False
    first = None
    for number, (image, logits) in enumerate(batches):
        first = int(image[0, 0, 0, 0]) if first is None else first
        assert image[0, 0, 0, 0] == (first + number) % ROTATION
        assert logits.shape == (ROWS, CLASSES)
        assert logits[0, 0] == 0.0
        window.requests += 1
        now = time.perf_counter()
        if not opened and now >= begin:
            window.open()
            opened = True
        elif now >= end:
            window.close()
            break
    return window.figures(ROWS)


def main() -> None:
    """Start a teacher for each dtype, then measure on request."""
    with ExitStack() as stack:
        teachers = {
            dtype: stack.enter_context(
                LocalTeacher(
                    "zeros", serve={"max-batch": ROWS}, timeout_s=_START_S, classes=CLASSES, shape=IMAGE, dtype=dtype
                )
            )
            for dtype in DTYPES
        }
        epochs: dict[tuple[str, str], Iterator[Any]] = {}

        def handle(request: dict[str, Any]) -> dict[str, float]:
            dtype, way = request["dtype"], request["way"]
            teacher = teachers[dtype]
            if (way, dtype) not in epochs:
                epochs[way, dtype] = epoch(stack, teacher.endpoint, dtype, way == "shm")
            window = Window([os.getpid(), teacher.pid], counted=request.get("counted", False))
            return measure(epochs[way, dtype], window, request["seconds"])

        answer(handle)


if __name__ == "__main__":
    main()
