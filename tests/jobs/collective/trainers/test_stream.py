"""A stream of each rank's own under `edl run`: a worker is killed, and every rank reads what it would have read."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.jobs.collective.trainers.killed_job import run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_stream_goes_on_at_its_place(tmp_path: Path) -> None:
    pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")
    whole = run("train_stream.py", tmp_path / "whole", -1)
    killed = run("train_stream.py", tmp_path / "killed", 13)  # in the second epoch
    for rank in (0, 1):
        name = f"read-{rank}.json"
        assert (killed / name).read_text() == (whole / name).read_text(), f"rank {rank} read something else"
