"""Answers that wait for a slow training loop are weighed with the inputs, and bound what a student's process takes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
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


def test_small_answers_wait_as_before(serve: Serve) -> None:
    """What fits is asked for ahead, also top-k labels of large outputs: the bound costs nothing where it binds not."""
    endpoint = serve("echo").endpoint
    with DistillReader(["x", None], ["y"], teachers=endpoint).set_batch_generator(batches) as reader:
        epoch = reader()
        next(epoch)
        wait_until(lambda: reader.stats().rows_received >= 8 * ROWS)
        assert len(list(epoch)) == BATCHES - 1
    endpoint = serve("echo", repeat=MIB // 16).endpoint
    options = Options(memory_bytes=MIB)
    with DistillReader(["x", None], ["y"], teachers=endpoint, top_k=1000, options=options) as reader:
        run(reader.set_batch_generator(batches), 1, least=2 * ROWS * 8000, most=2 * MIB)


ANSWER = 16 * MIB
MOST_ANSWERS = 13
"""Two that wait, the loop's own, up to three copies of two that are received, and what malloc has not given back."""
STUDENT = """
import sys
from pathlib import Path
import numpy as np
from edl.distill import DistillReader, Options, Teachers
from tests.waiting import wait_until

def resident_bytes(what):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(what))

options = Options(memory_bytes=1 << 20)
with DistillReader(["x"], ["y"], teachers=Teachers(endpoints=tuple(sys.argv[1:])), options=options) as reader:
    reader.set_batch_generator(lambda: ((np.full((4, 4), number, np.float32),) for number in range(12)))
    before = resident_bytes("VmRSS")
    for number, (x, y) in enumerate(reader()):
        assert y.max() == x[0, 0] == number, "a label belongs to another input"
        # A slow loop: it goes on when two more answers wait.
        wait_until(lambda: reader.stats().rows_received >= 4 * min(12, number + 3))
    print(resident_bytes("VmHWM") - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
def test_process_grows_by_few_answers(serve: Serve) -> None:
    """What the whole process takes, with gRPC's buffers: it grew by more with each teacher."""
    endpoints = [serve("echo", repeat=ANSWER // ROWS // 16).endpoint for _ in range(4)]
    command = [sys.executable, "-c", STUDENT, *endpoints]
    student = subprocess.run(command, cwd=Path(__file__).parents[4], capture_output=True, text=True, timeout=100)
    assert student.returncode == 0, student.stderr[-4000:]
    grew = int(student.stdout)
    assert grew <= MOST_ANSWERS * ANSWER, f"the process grew by {grew / MIB:.0f} MiB, {grew / ANSWER:.1f} answers"
