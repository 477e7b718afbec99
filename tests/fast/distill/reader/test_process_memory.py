"""What a student's whole process takes, not only what it counts: gRPC's buffers, and memory that was freed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.fast.distill.conftest import Start
from tests.fast.distill.reader.memory_student import ROWS

MIB = 1 << 20
ANSWER = 32 * MIB
MOST_ANSWERS = 13
"""Two that wait, the loop's own, up to three copies of two that are received, and what malloc has not given back."""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
def test_process_grows_by_few_answers(start: Start) -> None:
    """Four quick teachers, a slow loop, 1 MiB allowed: it grew by more than a GiB, and by more with each teacher."""
    repeat = ANSWER // ROWS // 16
    teachers = [start("echo", repeat=repeat, wait=False) for _ in range(4)]
    for teacher in teachers:
        teacher.wait_ready()
    student = subprocess.run(
        [sys.executable, "-m", "tests.fast.distill.reader.memory_student", *(t.endpoint for t in teachers)],
        cwd=Path(__file__).parents[4],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert student.returncode == 0, student.stderr[-4000:]
    grew = int(student.stdout)
    assert grew <= MOST_ANSWERS * ANSWER, f"the process grew by {grew / MIB:.0f} MiB, {grew / ANSWER:.1f} answers"
