"""Large messages come and go without a page fault for each of their pages, and metrics tell what happened."""

from __future__ import annotations

import platform
from pathlib import Path

import numpy as np
import pytest

from tests.fast.serving.conftest import Connect, StartProcess, request_bytes

PAGES = 32 * 3 * 224 * 224 // 4096
"""Of one request's image batch."""


def faults(pid: int) -> int:
    """Page faults so far that needed no disk: minflt of proc(5)."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[7])


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be told to keep freed memory")
@pytest.mark.parametrize("rows", [32, 16], ids=["whole", "merged"])
def test_megabytes_cost_few_page_faults(process: StartProcess, connect: Connect, rows: int) -> None:
    """A request of megabytes costs few page faults."""
    server = process("Images", max_batch_rows=32, metrics_port=0)
    client = connect(server.target)
    data = request_bytes({"image": np.ones((rows, 3, 224, 224), np.uint8)})
    pid = server.popen.pid

    def batch() -> None:
        for call in [client.infer_bytes.future(data, timeout=30) for _ in range(32 // rows)]:
            call.result()

    for _ in range(10):
        batch()
    before = faults(pid)
    for _ in range(30):
        batch()
    assert (faults(pid) - before) / 30 < PAGES / 4


def test_metrics_over_http(process: StartProcess, connect: Connect) -> None:
    server = process("Moody", max_batch_rows=8, metrics_port=0)
    client = connect(server.target)
    client.infer(np.zeros((3, 4), np.float32))
    assert client.start(np.ones((1, 4), np.float32)).exception() is not None
    assert client.start(np.full((1, 4), 2, np.float32)).exception() is not None
    assert client.infer_bytes.future(b"\xff").exception() is not None
    found = set(server.metrics().splitlines())
    assert {
        'edl_teacher_requests_total{model="m",outcome="ok"} 1.0',
        'edl_teacher_requests_total{model="m",outcome="internal"} 2.0',
        'edl_teacher_requests_total{model="m",outcome="invalid_argument"} 1.0',
        'edl_teacher_model_faults_total{kind="exception",model="m"} 1.0',
        'edl_teacher_model_faults_total{kind="nan",model="m"} 1.0',
        'edl_teacher_model_faults_total{kind="output",model="m"} 0.0',
        'edl_teacher_rows_total{model="m"} 5.0',
        'edl_teacher_batch_rows_bucket{le="4.0",model="m"} 3.0',
        'edl_teacher_batch_rows_count{model="m"} 3.0',
        'edl_teacher_queue_seconds_count{model="m"} 3.0',
        'edl_teacher_compute_seconds_count{model="m"} 3.0',
        'edl_teacher_queue_rows{model="m"} 0.0',
    } <= found
    assert any(line.startswith('edl_teacher_in_flight{model="m"}') for line in found)
