"""A worker's page of shared memory, written in one process and read in another."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from edl.collective.worker_status import Board, Phase
from edl.errors import ProtocolError


def test_written_page_is_read_elsewhere(tmp_path: Path) -> None:
    """What a worker writes is read through another mapping."""
    mine = Board.create(tmp_path / "board")
    theirs = Board.open(tmp_path / "board")
    theirs.begin(7)
    theirs.enter(Phase.TRAIN)
    for step in range(3):
        theirs.finish_step(step, samples=32)
    theirs.saved(1)
    reading = mine.read()
    assert (reading.generation, reading.pid, reading.phase) == (7, os.getpid(), Phase.TRAIN)
    assert (reading.step, reading.saved, reading.paused, reading.samples) == (2, 1, -1, 96)
    assert len(reading.durations_s) == 2


def test_totals_sum_to_the_pages_age(tmp_path: Path) -> None:
    """The totals sum to the time since the page was made."""
    begin = time.monotonic()
    board = Board.create(tmp_path / "board")
    created = time.monotonic()
    board.begin(0)
    board.enter(Phase.LOAD)
    board.enter(Phase.TRAIN)
    with board.phase(Phase.SAVE):
        assert board.read().phase is Phase.SAVE
    earliest = time.monotonic()
    total = sum(board.read().totals_s.values())
    assert earliest - created <= total <= time.monotonic() - begin
    assert board.read().phase is Phase.TRAIN


def test_first_of_consecutive_steps_is_known(tmp_path: Path) -> None:
    """The first of the steps that follow one another is known."""
    board = Board.create(tmp_path / "board")
    board.begin(0)
    assert board.read().first == -1
    firsts = []
    for step in (61, 62, 64, 63, 64):
        board.finish_step(step)
        firsts.append(board.read().first)
    assert firsts == [61, 61, 61, 63, 63]
    board.begin(1)
    assert (board.read().first, board.read().step) == (-1, 64)
    board.finish_step(65)
    assert board.read().first == 65
    board.close()


def test_phase_can_be_renamed_later(tmp_path: Path) -> None:
    """The beginning of a phase can turn out to have been of another one."""
    board = Board.create(tmp_path / "board")
    began = time.monotonic()
    with board.phase(Phase.AGREE):
        entered = time.monotonic()
        while time.monotonic() - began < 0.02:
            pass
        board.count_as(Phase.SAVE, 0.015)
        board.count_as(Phase.SAVE, -1.0)
        inside_s = time.monotonic() - entered
    passed_s = time.monotonic() - began
    totals = board.read().totals_s
    assert totals[Phase.SAVE] == pytest.approx(0.015)
    assert inside_s - 0.0151 <= totals[Phase.AGREE] <= passed_s - 0.0149
    with board.phase(Phase.AGREE):
        board.count_as(Phase.SAVE, 100.0)
    assert board.read().totals_s[Phase.SAVE] < 1.0, "no more than has passed"
    board.close()


def test_a_killed_workers_page_still_counts(tmp_path: Path) -> None:
    board = Board.create(tmp_path / "board")
    child = os.fork()
    if child == 0:
        worker = Board.open(tmp_path / "board")
        worker.begin(3)
        worker.enter(Phase.TRAIN)
        worker.finish_step(11)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    reading = board.read()
    assert (reading.pid, reading.step, reading.phase) == (child, 11, Phase.TRAIN)


def test_a_pause_is_wanted_from_its_step_on(tmp_path: Path) -> None:
    agent = Board.create(tmp_path / "board")
    worker = Board.open(tmp_path / "board")
    assert not worker.pause_wanted(0)
    agent.ask_pause(5)
    assert [worker.pause_wanted(step) for step in (4, 5, 6)] == [False, True, True]
    worker.pause(6)
    assert (agent.read().paused, agent.read().phase) == (6, Phase.PAUSE)
    agent.ask_pause(None)
    assert not worker.pause_wanted(6)
    worker.begin(1)
    assert agent.read().paused == -1


def test_page_without_agent_is_private() -> None:
    """Without an agent the page is private."""
    board = Board.from_env()
    board.finish_step(0)
    assert board.read().step == 0
    assert not board.pause_wanted(0)


@pytest.mark.parametrize("content", [b"", b"x" * 4096])
def test_another_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "board").write_bytes(content)
    with pytest.raises(ProtocolError, match="board"):
        Board.open(tmp_path / "board")
