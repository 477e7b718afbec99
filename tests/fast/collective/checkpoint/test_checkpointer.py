"""When a `Checkpointer` saves, what it tells the agent, how it pauses, and that it needs a process group."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from edl.collective.agent.health.failures import ExitCause, find_exit_cause
from edl.collective.checkpoint.checkpointer import Checkpointer
from edl.collective.checkpoint.memory.slots import SlotPair, find_slots
from edl.collective.checkpoint.state.state import State
from edl.collective.ranks import exchange, rank_of, world_of
from edl.collective.worker_status import Phase, WorkerStatusPage
from edl.errors import ClosedError, SettingsError, TemporaryError
from tests.waiting import wait_until


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[WorkerStatusPage]:
    board = WorkerStatusPage.create(tmp_path / "board")
    yield board
    board.close()


def worker(tmp_path: Path, state: State, **settings: float) -> Checkpointer:
    board = WorkerStatusPage.open(tmp_path / "board")
    board.record_worker_start(1)
    return Checkpointer(state, board=board, slots=SlotPair(tmp_path / "slots"), **settings)  # type: ignore[arg-type]


def steps(tmp_path: Path) -> list[int]:
    return [found.header.step for found in find_slots(tmp_path / "slots")]


def test_steps_are_reported_and_some_saved(tmp_path: Path, agent: WorkerStatusPage) -> None:
    state = State(epoch=0)
    with worker(tmp_path, state, interval_steps=3) as checkpointer:
        assert checkpointer.restore() == -1
        saved = [step for step in range(8) if checkpointer.save(step, samples=4)]
        assert saved == [0, 3, 6]
        status = agent.read_status()
        assert (status.step, status.saved, status.samples, status.phase) == (7, 6, 32, Phase.TRAIN)
        assert checkpointer.save(8, force=True)
        assert steps(tmp_path) == [8, 6]


def test_lost_steps_are_rolled_back(tmp_path: Path, agent: WorkerStatusPage) -> None:
    with worker(tmp_path, State(epoch=0), interval_steps=4) as checkpointer:
        for step in range(7):
            checkpointer.save(step)
        checkpointer.close()  # as when it is killed: the end of the block would save the last step
    state = State(epoch=9)
    with worker(tmp_path, state, interval_steps=4) as checkpointer:
        assert checkpointer.restore() == 4
        assert state.epoch == 0
        phases = []
        for step in (5, 6, 7):
            phases.append(agent.read_status().phase)
            checkpointer.save(step)
        assert phases == [Phase.ROLLBACK, Phase.ROLLBACK, Phase.TRAIN]


def test_pause_saves_and_waits(tmp_path: Path, agent: WorkerStatusPage) -> None:
    agent.request_pause(2)
    with worker(tmp_path, State(epoch=0), interval_steps=100) as checkpointer:
        checkpointer.save(1)
        training = threading.Thread(target=checkpointer.save, args=(2,))
        training.start()
        wait_until(lambda: agent.read_status().paused == 2, "it pauses")
        assert (steps(tmp_path)[0], agent.read_status().phase, training.is_alive()) == (2, Phase.PAUSE, True)
        agent.request_pause(None)
        training.join()
        assert agent.read_status().phase is Phase.TRAIN


def test_nobody_is_waited_for_for_ever(
    tmp_path: Path, agent: WorkerStatusPage, caplog: pytest.LogCaptureFixture
) -> None:
    agent.request_pause(0)
    with worker(tmp_path, State(epoch=0), pause_s=0.01) as checkpointer:
        checkpointer.save(0)
    assert "nobody came" in caplog.text
    assert agent.read_status().phase is Phase.TRAIN


def test_another_world_saves_at_once(tmp_path: Path, agent: WorkerStatusPage) -> None:
    with worker(tmp_path, State(epoch=0), interval_steps=50) as checkpointer:
        assert [step for step in range(3) if checkpointer.save(step)] == [0]
        checkpointer.change_generation(7)
        assert checkpointer.save(3)
    assert find_slots(tmp_path / "slots")[0].header.generation == 7


def test_closed_or_contradictory_is_refused(tmp_path: Path, agent: WorkerStatusPage) -> None:
    with pytest.raises(SettingsError, match="exactly one"):
        worker(tmp_path, State(), interval_steps=3, interval_s=2.0)
    checkpointer = worker(tmp_path, State())
    checkpointer.close()
    checkpointer.close()
    with pytest.raises(ClosedError):
        checkpointer.save(0)


def test_block_end_saves_the_last_step(tmp_path: Path, agent: WorkerStatusPage) -> None:
    with worker(tmp_path, State(epoch=0), interval_steps=4) as checkpointer:
        for step in range(7):
            checkpointer.save(step)
        assert steps(tmp_path) == [4, 0]
    assert steps(tmp_path) == [6, 4]
    assert agent.read_status().saved == 6
    state = State(epoch=9)
    with worker(tmp_path, state, interval_steps=4) as checkpointer:
        assert checkpointer.restore() == 6
    assert steps(tmp_path) == [6, 4], "nothing new was finished"


def test_failed_block_saves_nothing(tmp_path: Path, agent: WorkerStatusPage) -> None:
    """The state may be half of a step."""
    with contextlib.suppress(ZeroDivisionError), worker(tmp_path, State(epoch=0), interval_steps=4) as checkpointer:
        for step in range(7):
            checkpointer.save(step)
        _ = 1 / 0
    assert steps(tmp_path) == [4, 0]


def test_silent_agent_is_not_waited_for(tmp_path: Path, agent: WorkerStatusPage) -> None:
    with worker(tmp_path, State(epoch=0), agent_s=0.3) as checkpointer:
        agent.record_agent_heartbeat(0.001)  # when the machine was started
        with pytest.raises(TemporaryError, match="agent of this node was silent") as raised:
            checkpointer.save(0)
        assert find_exit_cause(1, f"edl.errors.TemporaryError: {raised.value}") is ExitCause.PEER_LOST, (
            "no error of the script's"
        )


@pytest.fixture
def checkpointer() -> Iterator[Checkpointer]:
    with Checkpointer(State(step=-1)) as made:
        yield made


def test_alone_there_is_one_rank() -> None:
    assert (rank_of(None), world_of(None)) == (0, 1)
    assert exchange([3, 4], None, torch.device("cpu")) == [[3, 4]]


def test_restore_before_the_group_is_refused(checkpointer: Checkpointer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SettingsError, match=r"one of 2 workers.*call init_process_group\(\)"):
        checkpointer.restore()
    with pytest.raises(SettingsError, match=r"call init_process_group\(\)"):
        checkpointer.save(0, force=True)
    monkeypatch.setenv("PADDLE_TRAINERS_NUM", "2")
    with pytest.raises(SettingsError, match=r"import Checkpointer and PaddleState from edl\.collective\.paddle, not"):
        checkpointer.restore()
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert checkpointer.restore() == -1
