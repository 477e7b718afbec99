"""Answers that wait for a slow training loop are weighed with the inputs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edl.distill import DistillReader, Options, Teachers
from edl.distill.cache import SoftLabelCache
from tests.fast.distill.conftest import Start, until

MIB = 1 << 20
ROWS = 4
BATCHES = 24


def batches() -> Iterator[Any]:
    for number in range(BATCHES):
        yield np.full((ROWS, 4), number, np.float32), list(range(number * ROWS, (number + 1) * ROWS))


def run(reader: DistillReader, epochs: int = 1) -> int:
    """The most that was held while the training loop was slow: it takes a batch when nothing comes any more."""
    held = [0]

    def look() -> int:
        held[0] = max(held[0], reader.stats().bytes_held)
        return reader.stats().rows_received + reader.stats().rows_cached

    for _ in range(epochs):
        for number, (x, _, *labels) in enumerate(reader()):
            for label in labels:
                assert len(label) == ROWS
                assert (label if isinstance(label, np.ndarray) else label.values).max() == x[0, 0] == number
            seen = [-1]

            def settled(seen: list[int] = seen) -> bool:
                before, seen[0] = seen[0], look()
                return before == seen[0]

            until(settled, 20)
    assert reader.stats().bytes_held == 0, "an epoch that is over holds something"
    return held[0]


@pytest.mark.parametrize("kind", ["plain", "split", "ensemble", "cache"])
def test_waiting_answers_are_bounded(start: Start, kind: str) -> None:
    """Answers of 4 MiB, 1 MiB allowed: two at a time, and those of the batch that is waited for."""
    endpoint = start("echo", repeat=MIB // 16).endpoint  # 1 MiB a row
    services = [Teachers(endpoints=(endpoint,))] * (2 if kind == "ensemble" else 1)
    options: dict[str, Any] = {"options": Options(memory_bytes=MIB)}
    with SoftLabelCache(memory_bytes=256 * MIB) as cache:
        if kind == "cache":
            options |= {"cache": cache, "id_field": 1}
        if kind == "split":
            options |= {"teacher_batch_size": 1}
        with DistillReader(["x", None], ["y"], teachers=services, **options) as reader:
            reader.set_batch_generator(batches)
            held = run(reader, epochs=2 if kind == "cache" else 1)
    answer = ROWS * MIB * len(services)
    assert answer // ROWS <= held <= 2 * answer + MIB, f"{held / MIB:.1f} MiB of answers were held"


def test_small_answers_wait_as_before(start: Start) -> None:
    """What fits is asked for ahead: the bound costs nothing where it does not bind."""
    endpoint = start("echo").endpoint
    with DistillReader(["x", None], ["y"], teachers=endpoint) as reader:
        reader.set_batch_generator(batches)
        epoch = reader()
        next(epoch)
        until(lambda: reader.stats().rows_received >= 8 * ROWS, 20)
        assert len(list(epoch)) == BATCHES - 1


def test_top_k_is_weighed(start: Start, tmp_path: Path) -> None:
    endpoint = start("echo", repeat=MIB // 16).endpoint
    options = Options(memory_bytes=MIB)
    with DistillReader(["x", None], ["y"], teachers=endpoint, top_k=1000, options=options) as reader:
        reader.set_batch_generator(batches)
        assert run(reader) >= 2 * ROWS * 8000
