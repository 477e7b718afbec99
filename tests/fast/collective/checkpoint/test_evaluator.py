"""Evaluations that are lost to no restart and recorded once, and work that is announced."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from edl.collective.checkpoint import evaluator as evaluator_module
from edl.collective.checkpoint.checkpointer import Checkpointer
from edl.collective.checkpoint.evaluator import Evaluator, agree_on_pending
from edl.collective.checkpoint.memory.slots import SlotPair
from edl.collective.checkpoint.state.state import State
from edl.collective.worker_status import Phase, WorkerStatusPage
from edl.errors import ProtocolError, SettingsError


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[WorkerStatusPage]:
    board = WorkerStatusPage.create(tmp_path / "board")
    yield board
    board.close()


class Killed(BaseException):
    """The worker is no more: nothing of the block's end happens."""


def train(tmp_path: Path, function: Callable[[State], Any], *, kill_at: int = -1) -> Evaluator:
    """A run of ten steps, from where the last one was; evaluates after steps 3 and 7."""
    state = State(count=0)
    evaluator = state.evaluator = Evaluator(lambda: function(state), limit_s=60.0)
    board = WorkerStatusPage.open(tmp_path / "board")
    board.record_worker_start(1)
    checkpointer = Checkpointer(state, board=board, slots=SlotPair(tmp_path / "slots"), interval_steps=1)
    for step in range(checkpointer.restore() + 1, 10):
        if step == kill_at:
            raise Killed
        state.count += 1
        checkpointer.save(step)
        if step in (3, 7):
            checkpointer.evaluate(evaluator)
    return evaluator


def test_the_agent_sees_what_is_done(tmp_path: Path, agent: WorkerStatusPage) -> None:
    seen = []
    train(tmp_path, lambda state: seen.append(agent.read_status()))
    assert [(one.phase, one.busy_with, one.busy_limit_s) for one in seen] == [(Phase.BUSY, "evaluation", 60.0)] * 2
    assert agent.read_status().phase is Phase.TRAIN


def test_anything_else_is_announced_as_well(tmp_path: Path, agent: WorkerStatusPage) -> None:
    board = WorkerStatusPage.open(tmp_path / "board")
    with Checkpointer(State(), board=board, slots=SlotPair(tmp_path / "slots")) as checkpointer:
        with checkpointer.busy("preparing " + "ä" * 99, limit_s=5.0), checkpointer.busy("inner", limit_s=3.0):
            assert (agent.read_status().busy_with, agent.read_status().busy_limit_s) == ("inner", 3.0)
        with checkpointer.busy("preparing " + "ä" * 99, limit_s=5.0):
            status = agent.read_status()
            assert (status.phase, status.busy_limit_s) == (Phase.BUSY, 5.0)
            assert status.busy_with.startswith("preparing ää")
        with pytest.raises(SettingsError, match=r"busy\('x', limit_s=0\): must be above 0"):
            checkpointer.busy("x", limit_s=0)


def test_a_failed_one_is_said_to_be_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = State()
    evaluator = state.evaluator = Evaluator(lambda: 1 / 0, limit_s=1.0, name="accuracy")
    with Checkpointer(state, slots=SlotPair(tmp_path / "slots")) as checkpointer:
        checkpointer.save(0)
        with pytest.raises(ZeroDivisionError):
            checkpointer.evaluate(evaluator)
        checkpointer.save(1)
    assert evaluator.pending is None
    assert "accuracy after step 0 failed, and is left out" in caplog.text


def train_with_plateau(tmp_path: Path, die_after: str) -> tuple[dict[int, float], float, int]:
    """Train from where it was, with a rate that two evaluations lower and a best result; end at the moment given."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    state = State(parameter=parameter, optimizer=optimizer, plateau=plateau, count=0)

    def evaluate() -> float:
        if (die_after, state.count) == ("its beginning", 8):
            raise Killed
        return float(state.count)

    def act(result: float) -> None:
        plateau.step(result)
        if (die_after, state.count) == ("its action", 8):
            raise Killed

    evaluator = state.evaluator = Evaluator(evaluate, limit_s=60.0, on_result=act)
    checkpointer = Checkpointer(state, slots=SlotPair(tmp_path / "slots"), interval_steps=1)
    for step in range(checkpointer.restore() + 1, 10):
        state.count += 1
        checkpointer.save(step)
        if step in (3, 7):
            checkpointer.evaluate(evaluator)
            if (die_after, step) == ("its end", 7):
                raise Killed
    return evaluator.results, optimizer.param_groups[0]["lr"], plateau.last_epoch


@pytest.mark.parametrize("moment", ["its beginning", "its action", "its end"])
def test_what_follows_from_a_result_is_kept(tmp_path: Path, moment: str) -> None:
    with pytest.raises(Killed):
        train_with_plateau(tmp_path, moment)
    expected = ({3: 4.0, 7: 8.0}, 0.5, 2)
    assert train_with_plateau(tmp_path, "") == expected, "as without a restart: the second result is worse, once"


def test_another_ranks_result_is_acted_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks, of which one was lost before it had saved the result that the other has."""
    seen: list[Any] = []
    behind = Evaluator(lambda: 1 / 0, limit_s=1.0, on_result=seen.append)
    behind.pending = 7
    monkeypatch.setattr(evaluator_module, "world_of", lambda group: 2)
    monkeypatch.setattr(evaluator_module.transfer, "all_reduce_max", lambda values, group: [7])
    monkeypatch.setattr(evaluator_module.transfer, "gather_bytes", lambda data, group: [data, b"[0.25]"])
    agree_on_pending(behind, None)
    assert (behind.results, behind.pending, seen) == ({7: 0.25}, None, [0.25])
    ahead = Evaluator(lambda: 1 / 0, limit_s=1.0, on_result=seen.append)
    ahead.results[7] = 0.25
    agree_on_pending(ahead, None)
    assert (ahead.results, ahead.pending, seen) == ({7: 0.25}, None, [0.25]), "a second time where it was acted on"


@pytest.mark.parametrize("rng", [True, False])
def test_its_random_numbers_are_its_own(tmp_path: Path, rng: bool) -> None:
    state = State(rng=rng)
    evaluator = state.evaluator = Evaluator(lambda: torch.rand(1).item(), limit_s=1.0)
    torch.manual_seed(3)
    expected = torch.rand(2).tolist()
    torch.manual_seed(3)
    with Checkpointer(state, slots=SlotPair(tmp_path / "slots")) as checkpointer:
        checkpointer.save(0)
        assert checkpointer.evaluate(evaluator) == pytest.approx(expected[0])
        assert torch.rand(1).item() == pytest.approx(expected[not rng])


def test_what_cannot_be_kept_is_refused(tmp_path: Path) -> None:
    state = State()
    results: list[Any] = [torch.zeros(2), {"top": object()}, {"loss": math.nan, "top": (1, 2)}]
    evaluator = Evaluator(lambda: results.pop(0), limit_s=1.0)
    with Checkpointer(state, slots=SlotPair(tmp_path / "slots")) as checkpointer:
        checkpointer.save(0)
        with pytest.raises(SettingsError, match=r"no field of the State.*evaluator=evaluator"):
            checkpointer.evaluate(evaluator)
        state.evaluator = evaluator
        with pytest.raises(SettingsError, match=r"has a Tensor.*item\(\)"):
            checkpointer.evaluate(evaluator)
        with pytest.raises(SettingsError, match=r"top is a builtins\.object"):
            checkpointer.evaluate(evaluator)
        assert str(checkpointer.evaluate(evaluator)) == "{'loss': nan, 'top': (1, 2)}"
    with pytest.raises(SettingsError, match="limit_s=0"):
        Evaluator(lambda: None, limit_s=0)
    with pytest.raises(ProtocolError, match="version 2"):
        evaluator.load_state_dict({"version": 2})
