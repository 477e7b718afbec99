"""Answers that wait for a slow training loop are weighed with the inputs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from edl.distill import DistillReader, Options, Teachers
from edl.distill.cache import SoftLabelCache
from tests.fast.distill.conftest import Serve
from tests.waiting import wait_until

MIB = 1 << 20
ROWS = 4
BATCHES = 10


def batches() -> Iterator[Any]:
    for number in range(BATCHES):
        yield np.full((ROWS, 4), number, np.float32), list(range(number * ROWS, (number + 1) * ROWS))


def run(reader: DistillReader, epochs: int, least: int, most: int) -> None:
    """Read with a loop that takes a batch when as much is held as may be, and no more ever is."""
    held = 0

    def fill(left: int) -> bool:
        nonlocal held
        held = max(held, reader.stats().bytes_held)
        return held >= least or not left

    for _ in range(epochs):
        for number, (x, _, *labels) in enumerate(reader()):
            for label in labels:
                assert len(label) == ROWS
                assert (label if isinstance(label, np.ndarray) else label.values).max() == x[0, 0] == number
            wait_until(lambda left=BATCHES - 1 - number: fill(left))  # type: ignore[misc]
    assert least <= held <= most, f"{held / MIB:.1f} MiB of answers were held"
    assert reader.stats().bytes_held == 0, "an epoch that is over holds something"


@pytest.mark.parametrize("kind", ["plain", "split", "ensemble", "cache"])
def test_waiting_answers_are_bounded(serve: Serve, kind: str) -> None:
    """Answers of 4 MiB, 1 MiB allowed: two at a time, and those of the batch that is waited for."""
    services = [Teachers(endpoints=(serve("echo", repeat=MIB // 16).endpoint,))] * (2 if kind == "ensemble" else 1)
    options: dict[str, Any] = {"options": Options(memory_bytes=MIB)}
    with SoftLabelCache(memory_bytes=256 * MIB) as cache:
        if kind == "cache":
            options |= {"cache": cache, "id_field": 1}
        if kind == "split":
            options |= {"teacher_batch_size": 1}
        with DistillReader(["x", None], ["y"], teachers=services, **options) as reader:
            answer = ROWS * MIB * len(services)
            reader.set_batch_generator(batches)
            run(reader, 2 if kind == "cache" else 1, least=answer // ROWS, most=2 * answer + MIB)
