"""A worker's page of shared memory, written in one process and read in another."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from edl.collective import worker_status
from edl.collective.worker_status import Phase, WorkerStatusPage
from edl.errors import ProtocolError


class Clock:
    """The time by which a page counts."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(worker_status, "time", made)
    return made


@pytest.fixture
def page(tmp_path: Path) -> Iterator[WorkerStatusPage]:
    made = WorkerStatusPage.create(tmp_path / "board")
    yield made
    made.close()


def test_killed_workers_page_is_read_elsewhere(tmp_path: Path, page: WorkerStatusPage) -> None:
    child = os.fork()
    if child == 0:
        worker = WorkerStatusPage.open(tmp_path / "board")
        worker.record_worker_start(7)
        worker.enter_phase(Phase.TRAIN)
        for step in range(3):
            worker.finish_step(step, samples=32)
        worker.record_saved_step(1)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    status = page.read_status()
    assert (status.generation, status.pid, status.phase) == (7, child, Phase.TRAIN)
    assert (status.step, status.saved, status.paused, status.samples) == (2, 1, -1, 96)
    assert len(status.durations_s) == 2


def test_totals_sum_to_the_pages_age(clock: Clock, page: WorkerStatusPage) -> None:
    """Also where the beginning of a phase turns out to have been of another one."""
    page.record_worker_start(0)
    page.enter_phase(Phase.LOAD)
    clock.now_s += 1.0
    page.enter_phase(Phase.TRAIN)
    clock.now_s += 4.0
    with page.in_phase(Phase.SAVE):
        clock.now_s += 0.5
        assert page.read_status().phase is Phase.SAVE
    with page.in_phase(Phase.AGREE):
        clock.now_s += 2.0
        page.reassign_time(Phase.SAVE, 1.5)
        page.reassign_time(Phase.SAVE, -1.0)
    status = page.read_status()
    spent = {phase: seconds for phase, seconds in status.totals_s.items() if seconds}
    assert spent == {Phase.LOAD: 1.0, Phase.TRAIN: 4.0, Phase.SAVE: 2.0, Phase.AGREE: 0.5}
    assert (status.phase, status.phase_since) == (Phase.TRAIN, 107.5)
    with page.in_phase(Phase.AGREE):
        clock.now_s += 1.0
        page.reassign_time(Phase.SAVE, 100.0)
    assert page.read_status().totals_s[Phase.SAVE] == 3.0, "no more than has passed"


def test_first_of_consecutive_steps_is_known(page: WorkerStatusPage) -> None:
    page.record_worker_start(0)
    assert page.read_status().first == -1
    firsts = []
    for step in (61, 62, 64, 63, 64):
        page.finish_step(step)
        firsts.append(page.read_status().first)
    assert firsts == [61, 61, 61, 63, 63]
    page.record_worker_start(1)
    assert (page.read_status().first, page.read_status().step) == (-1, 64)
    page.finish_step(65)
    assert page.read_status().first == 65


@pytest.mark.parametrize("content", [b"", b"x" * 4096])
def test_another_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "board").write_bytes(content)
    with pytest.raises(ProtocolError, match="status page"):
        WorkerStatusPage.open(tmp_path / "board")
