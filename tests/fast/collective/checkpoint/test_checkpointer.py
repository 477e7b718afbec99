"""When a `Checkpointer` saves, evaluates and pauses, what it tells the agent, and from whose memory it goes on."""

from __future__ import annotations

import contextlib
import math
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import edl.collective
from edl.collective.agent.health.failures import ExitCause, find_exit_cause
from edl.collective.checkpoint import checkpointer as checkpointer_module
from edl.collective.checkpoint import evaluator as evaluator_module
from edl.collective.checkpoint.checkpointer import Checkpointer, SaveSchedule
from edl.collective.checkpoint.evaluator import Evaluator, agree_on_pending
from edl.collective.checkpoint.memory.restore import RestorePlan, choose_state
from edl.collective.checkpoint.memory.slots import SlotHeader, SlotPair, find_slots
from edl.collective.checkpoint.state.state import State
from edl.collective.integrations.loop_position import BoundaryCheckpointer
from edl.collective.torchrun.handler import handler_creator
from edl.collective.worker_status import Phase, WorkerStatusPage
from edl.errors import ClosedError, ProtocolError, SettingsError, TemporaryError
from tests.waiting import wait_until


@given(st.floats(0.001, 0.5), st.floats(1e-4, 10), st.floats(1e-4, 10))
def test_saving_keeps_to_the_overhead(overhead: float, step_s: float, save_s: float) -> None:
    pace = SaveSchedule(overhead=overhead)
    assert pace.propose_steps(step_s, save_s) == 1  # the first one paid for the pages
    pace.set_next_save(0, 1)
    steps = pace.propose_steps(step_s, save_s)
    assert save_s / (steps * step_s + save_s) <= overhead * (1 + 1e-9)
    assert steps == 1 or save_s / ((steps - 1) * step_s + save_s) > overhead * (1 - 1e-9)


def test_interval_in_seconds_becomes_steps() -> None:
    pace = SaveSchedule(interval_s=5.0)
    assert (pace.propose_steps(0.5, 9.0), pace.propose_steps(7.0, 0.0)) == (10, 1)
    assert pace.propose_steps(0.0, 0.0) > 1


def chosen(*offers: Any, **known: Any) -> RestorePlan:
    choice = choose_state(*offers, **known)
    assert choice is not None
    return choice


def test_the_state_that_all_have_comes_first() -> None:
    older, newer = ([SlotHeader(1, step, 2, rank) for rank in range(2)] for step in (8, 9))
    assert chosen([[older[0], newer[0]], [older[1]]]).step == 8
    assert chosen([[older[0], newer[0]]]).step == 9, "a host was lost"


@pytest.mark.parametrize("sharded", [True, False])
def test_hung_world_goes_back_a_state(sharded: bool) -> None:
    """What the script did after step 9, when it was killed, is done again; a part alone is not gone back to."""
    offers = [[SlotHeader(1, step, 2, rank, sharded=sharded) for step in (8, 9)] for rank in range(2)]
    assert [chosen(offers, before=step).step for step in (9, 10)] == [8, 9]
    assert chosen([offers[0], offers[1][1:]], before=9).step == 9
    assert chosen(offers, before=8).step == 9, "there is nothing earlier"


# Four ranks: 0 and 2 hold the same shards, 1 and 3 the other ones.
_HSDP = [SlotHeader(1, 8, 4, rank, sharded=True) for rank in range(4)]
_SAME = {header: (header.rank % 2, header.rank % 2 + 2) for header in _HSDP}


def test_ranks_with_the_same_shards_stand_in() -> None:
    again = chosen([[], [], [_HSDP[2]], [_HSDP[3]]], same=_SAME)
    assert (again.sources, again.parts, again.holders) == ((2, 3, 2, 3), (2, 3, 2, 3), (-1, -1, 2, 3))
    smaller = chosen([[_HSDP[0]], [_HSDP[3]]], same=_SAME)
    assert (smaller.sources, smaller.holders) == ((), (0, -1, -1, 1))
    assert choose_state([[_HSDP[1]], [_HSDP[3]]], same=_SAME) is None, "half of the shards is no state"
    assert choose_state([[_HSDP[2]], [_HSDP[3]]]) is None, "nothing is known of who holds the same"


def test_a_stand_in_comes_before_a_replica() -> None:
    choice = chosen([[_HSDP[0]], [_HSDP[1]]], [[_HSDP[2]], []], _SAME)
    assert not choice.from_replicas
    choice = choose_state([[_HSDP[0]], []], [[], [_HSDP[3]]], _SAME)
    assert choice is None, "a replica does not say who else held its shards"


@given(st.lists(st.lists(st.builds(SlotHeader, st.integers(0, 2), st.integers(0, 3), st.just(3), st.integers(0, 2)),
                         max_size=2), min_size=1, max_size=5))  # fmt: skip
def test_whoever_gives_a_state_has_it(offers: list[list[SlotHeader]]) -> None:
    choice = choose_state(offers)
    assert (choice is None) == (not any(offers))
    if choice is not None:
        headers = {one for row in offers for one in row}
        newest = max((one.generation, one.step) for one in headers)
        parts = Counter((one.generation, one.step) for one in headers)
        entire = [state for state in parts if parts[state] == 3 == len(offers)]
        assert (choice.generation, choice.step) == max(entire, default=newest)
        for rank, (source, part) in enumerate(zip(choice.sources, choice.parts, strict=True)):
            assert any(choice.matches_slot(header, part) for header in offers[source])
            has = [header.rank for header in offers[rank] if choice.matches_slot(header, header.rank)]
            assert source == rank or not has or (len(offers) == 3 and rank not in has)


@pytest.fixture
def agent(tmp_path: Path) -> WorkerStatusPage:
    return WorkerStatusPage.create(tmp_path / "board")


def worker(tmp_path: Path, state: State, **settings: float) -> Checkpointer:
    board = WorkerStatusPage.open(tmp_path / "board")
    board.record_worker_start(1)
    return Checkpointer(state, board=board, slots=SlotPair(tmp_path / "slots"), **settings)


def steps(tmp_path: Path) -> list[int]:
    return [found.header.step for found in find_slots(tmp_path / "slots")]


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


@pytest.mark.parametrize(("generation", "reached", "lost"), [("1", 6, True), ("1", -1, False), ("0", 6, False)])
def test_lost_state_is_reported(
    generation: str,
    reached: int,
    lost: bool,
    tmp_path: Path,
    agent: WorkerStatusPage,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("EDL_GENERATION", generation)
    agent.finish_step(reached)
    with worker(tmp_path, State(epoch=0)) as checkpointer:
        assert checkpointer.restore() == -1
    warnings = [record.getMessage() for record in caplog.records if "training begins again" in record.getMessage()]
    assert len(warnings) == lost
    assert all("reached step 6" in line and "edl run --checkpoint" in line for line in warnings)


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
    tmp_path: Path, agent: WorkerStatusPage, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpointer_module, "_PAUSE_S", 0.01)
    agent.request_pause(0)
    with worker(tmp_path, State(epoch=0)) as checkpointer:
        checkpointer.save(0)
    assert "the agent did nothing" in caplog.text
    assert agent.read_status().phase is Phase.TRAIN


@pytest.mark.parametrize("name", ["Place", "run_in_process", "stay"])
def test_gone_names_say_what_to_use(name: str) -> None:
    with pytest.raises(ImportError, match=f"^{name} was removed: call .*Checkpointer.restore"):
        getattr(edl.collective, name)
    with pytest.raises(SettingsError, match="--rdzv-backend=edl was removed: start the script with `edl run`"):
        handler_creator()(None)


def test_closed_or_contradictory_is_refused(tmp_path: Path, agent: WorkerStatusPage) -> None:
    with pytest.raises(SettingsError, match="exactly one"):
        worker(tmp_path, State(), interval_steps=3, interval_s=2.0)
    with pytest.raises(SettingsError, match="overlap was removed: remove it"):
        worker(tmp_path, State(), overlap=True)
    for keep in (2.5, 0, True):
        with pytest.raises(SettingsError, match=f"keep={keep}: .* must be a whole number, such as 3"):
            worker(tmp_path, State(), keep=keep)
    checkpointer = worker(tmp_path, State(), keep=np.int64(3))
    with pytest.raises(SettingsError, match=r"save\(-2\)"):
        checkpointer.save(-2)
    checkpointer.save(9)
    with pytest.raises(SettingsError, match=r"save\(0\) after step 9: .*over all epochs"):
        checkpointer.save(0)
    checkpointer.close()
    checkpointer.close()
    with pytest.raises(ClosedError):
        checkpointer.save(0)


@pytest.mark.usefixtures("agent")
def test_block_end_saves_the_last_step(tmp_path: Path) -> None:
    with worker(tmp_path, State(epoch=0), interval_steps=4) as checkpointer:
        for step in range(7):
            checkpointer.save(step)
        assert steps(tmp_path) == [4, 0]
    assert steps(tmp_path) == [6, 4]
    state = State(epoch=9)
    with worker(tmp_path, state, interval_steps=4) as checkpointer:
        assert checkpointer.restore() == 6
    assert steps(tmp_path) == [6, 4], "nothing new was finished"


@pytest.mark.parametrize("error", [ZeroDivisionError, SystemExit])
def test_failed_block_saves_nothing(tmp_path: Path, agent: WorkerStatusPage, error: type[BaseException]) -> None:
    """The state may be half of a step."""
    with contextlib.suppress(error), worker(tmp_path, State(epoch=0), interval_steps=4) as checkpointer:
        for step in range(7):
            checkpointer.save(step)
        raise error
    assert steps(tmp_path) == [4, 0]


def test_silent_agent_is_not_waited_for(tmp_path: Path, agent: WorkerStatusPage) -> None:
    with worker(tmp_path, State(epoch=0), agent_s=0.3) as checkpointer:
        agent.record_agent_heartbeat(0.001)  # when the machine was started
        with pytest.raises(TemporaryError, match="agent of this node was silent") as raised:
            checkpointer.save(0)
        assert find_exit_cause(1, f"edl.errors.TemporaryError: {raised.value}") is ExitCause.PEER_LOST, (
            "no error of the script's"
        )


def test_restore_before_the_group_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    checkpointer = Checkpointer(State(step=-1))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SettingsError, match=r"2 workers, but no process group: call init_process_group\(\)"):
        checkpointer.restore()
    with pytest.raises(SettingsError, match=r"call init_process_group\(\)"):
        checkpointer.save(0, force=True)
    monkeypatch.setenv("PADDLE_TRAINERS_NUM", "2")
    with pytest.raises(SettingsError, match=r"import Checkpointer and PaddleState from edl\.collective\.paddle, not"):
        checkpointer.restore()
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert checkpointer.restore() == -1
    checkpointer.close()


class Killed(BaseException):
    """The worker is no more: nothing of the block's end happens."""


def test_anything_else_is_announced_as_well(tmp_path: Path, agent: WorkerStatusPage) -> None:
    board = WorkerStatusPage.open(tmp_path / "board")
    with Checkpointer(State(), board=board, slots=SlotPair(tmp_path / "slots")) as checkpointer:
        with checkpointer.busy("preparing " + "ä" * 99, limit_s=5.0), checkpointer.busy("inner", limit_s=3.0):
            assert (agent.read_status().busy_with, agent.read_status().busy_limit_s) == ("inner", 3.0)
        with checkpointer.busy("preparing " + "ä" * 99, limit_s=5.0):
            status = agent.read_status()
            assert (status.phase, status.busy_limit_s) == (Phase.BUSY, 5.0)
            assert status.busy_with.startswith("preparing ää")
        with pytest.raises(SettingsError, match=r"busy\('x', limit_s=0\): limit_s must be above 0 seconds"):
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
    assert "accuracy after step 0 failed and is skipped" in caplog.text


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
    monkeypatch.setattr(evaluator_module, "all_reduce_max", lambda values, group: [7])
    monkeypatch.setattr(evaluator_module, "gather_bytes", lambda data, group: [data, b"[0.25]"])
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
        assert checkpointer.evaluate(evaluator) == pytest.approx(expected[0]), "the end of an epoch may come again"


def test_what_cannot_be_kept_is_refused(tmp_path: Path) -> None:
    state = State()
    results: list[Any] = [torch.zeros(2), {"top": object()}, {"loss": math.nan, "top": (1, 2)}]
    evaluator = Evaluator(lambda: results.pop(0), limit_s=1.0)
    with Checkpointer(state, slots=SlotPair(tmp_path / "slots")) as checkpointer:
        checkpointer.save(0)
        with pytest.raises(SettingsError, match=r"not a field of the State.*evaluator=evaluator"):
            checkpointer.evaluate(evaluator)
        state.evaluator = evaluator
        with pytest.raises(SettingsError, match=r"contains a Tensor.*item\(\)"):
            checkpointer.evaluate(evaluator)
        with pytest.raises(SettingsError, match=r"top is a builtins\.object"):
            checkpointer.evaluate(evaluator)
        assert str(checkpointer.evaluate(evaluator)) == "{'loss': nan, 'top': (1, 2)}"
    with pytest.raises(SettingsError, match="limit_s=0"):
        Evaluator(lambda: None, limit_s=0)
    with pytest.raises(ProtocolError, match="version 2"):
        evaluator.load_state_dict({"version": 2})


@pytest.fixture(autouse=True)
def new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """No loop has begun in this process."""
    monkeypatch.setattr(BoundaryCheckpointer, "_opened", False)


def boundary_of(folder: Path) -> BoundaryCheckpointer:
    return BoundaryCheckpointer({"storage": str(folder), "interval_steps": 1, "storage_interval_s": 1e-6})


@pytest.mark.parametrize(("ended", "stored"), [(False, 1.0), (True, 777.0)])
def test_broken_step_is_not_stored(tmp_path: Path, ended: bool, stored: float, monkeypatch: pytest.MonkeyPatch) -> None:
    value = torch.ones(1)
    boundary = boundary_of(tmp_path)
    boundary.open(State(value=value))
    for step in range(3):
        boundary.count_step()
        boundary.begin_step(step)
    value.fill_(777.0)
    if ended:
        boundary.save_end(3)
    boundary.close()

    monkeypatch.setattr(BoundaryCheckpointer, "_opened", False)  # the next process
    again = State(value=torch.zeros(1))
    boundary = boundary_of(tmp_path)
    assert boundary.open(again)
    boundary.close()
    assert again.value.item() == stored


def test_a_second_loop_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would find the end of the first one, which a restart of that is to find, and train nothing."""
    state = State(model=torch.nn.Linear(2, 2))
    for _ in range(2):  # nothing is kept
        boundary = BoundaryCheckpointer({})
        assert not boundary.open(state)
        boundary.close()
    monkeypatch.setenv("EDL_SLOTS", str(tmp_path / "slots"))
    first = BoundaryCheckpointer({})
    first.open(state)
    first.save_end(0)
    first.close()
    for second in (BoundaryCheckpointer({}), boundary_of(tmp_path / "stored")):
        with pytest.raises(SettingsError, match=r"keeps the state of one training loop.*its own job"):
            second.open(state)
