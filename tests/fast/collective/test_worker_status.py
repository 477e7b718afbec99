"""A worker's page of shared memory, written in one process and read in another."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from edl.collective.worker_status import Phase, WorkerStatusPage
from edl.errors import ProtocolError


def test_written_page_is_read_elsewhere(tmp_path: Path) -> None:
    """What a worker writes is read through another mapping."""
    mine = WorkerStatusPage.create(tmp_path / "board")
    theirs = WorkerStatusPage.open(tmp_path / "board")
    theirs.record_worker_start(7)
    theirs.enter_phase(Phase.TRAIN)
    for step in range(3):
        theirs.finish_step(step, samples=32)
    theirs.record_saved_step(1)
    status = mine.read_status()
    assert (status.generation, status.pid, status.phase) == (7, os.getpid(), Phase.TRAIN)
    assert (status.step, status.saved, status.paused, status.samples) == (2, 1, -1, 96)
    assert len(status.durations_s) == 2


def test_totals_sum_to_the_pages_age(tmp_path: Path) -> None:
    """The totals sum to the time since the page was made."""
    begin = time.monotonic()
    page = WorkerStatusPage.create(tmp_path / "board")
    created = time.monotonic()
    page.record_worker_start(0)
    page.enter_phase(Phase.LOAD)
    page.enter_phase(Phase.TRAIN)
    with page.in_phase(Phase.SAVE):
        assert page.read_status().phase is Phase.SAVE
    earliest = time.monotonic()
    total = sum(page.read_status().totals_s.values())
    assert earliest - created <= total <= time.monotonic() - begin
    assert page.read_status().phase is Phase.TRAIN


def test_first_of_consecutive_steps_is_known(tmp_path: Path) -> None:
    """The first of the steps that follow one another is known."""
    page = WorkerStatusPage.create(tmp_path / "board")
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
    page.close()


def test_phase_can_be_renamed_later(tmp_path: Path) -> None:
    """The beginning of a phase can turn out to have been of another one."""
    page = WorkerStatusPage.create(tmp_path / "board")
    began = time.monotonic()
    with page.in_phase(Phase.AGREE):
        entered = time.monotonic()
        while time.monotonic() - began < 0.02:
            pass
        page.reassign_time(Phase.SAVE, 0.015)
        page.reassign_time(Phase.SAVE, -1.0)
        inside_s = time.monotonic() - entered
    passed_s = time.monotonic() - began
    totals = page.read_status().totals_s
    assert totals[Phase.SAVE] == pytest.approx(0.015)
    assert inside_s - 0.0151 <= totals[Phase.AGREE] <= passed_s - 0.0149
    with page.in_phase(Phase.AGREE):
        page.reassign_time(Phase.SAVE, 100.0)
    passed_s = time.monotonic() - began
    assert page.read_status().totals_s[Phase.SAVE] <= passed_s, "no more than has passed"
    page.close()


def test_a_killed_workers_page_still_counts(tmp_path: Path) -> None:
    page = WorkerStatusPage.create(tmp_path / "board")
    child = os.fork()
    if child == 0:
        worker = WorkerStatusPage.open(tmp_path / "board")
        worker.record_worker_start(3)
        worker.enter_phase(Phase.TRAIN)
        worker.finish_step(11)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    status = page.read_status()
    assert (status.pid, status.step, status.phase) == (child, 11, Phase.TRAIN)


def test_a_pause_is_wanted_from_its_step_on(tmp_path: Path) -> None:
    agent = WorkerStatusPage.create(tmp_path / "board")
    worker = WorkerStatusPage.open(tmp_path / "board")
    assert not worker.is_pause_requested(0)
    agent.request_pause(5)
    assert [worker.is_pause_requested(step) for step in (4, 5, 6)] == [False, True, True]
    worker.record_pause(6)
    assert (agent.read_status().paused, agent.read_status().phase) == (6, Phase.PAUSE)
    agent.request_pause(None)
    assert not worker.is_pause_requested(6)
    worker.record_worker_start(1)
    assert agent.read_status().paused == -1


def test_page_without_agent_is_private() -> None:
    """Without an agent the page is private."""
    page = WorkerStatusPage.from_env()
    page.finish_step(0)
    assert page.read_status().step == 0
    assert not page.is_pause_requested(0)


@pytest.mark.parametrize("content", [b"", b"x" * 4096])
def test_another_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "board").write_bytes(content)
    with pytest.raises(ProtocolError, match="status page"):
        WorkerStatusPage.open(tmp_path / "board")
