"""What the benchmarks of elastic training conclude from the step logs of ranks: traces, gaps, lost steps, goodput."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks._elastic_churn import GOODPUT_LIMIT, Churn, goodput, surviving_line, trace
from benchmarks._step_logs import FinishedStep, StepLogs, median_step_s


def log(*steps: tuple[float, int, int, int], pid: int = 1) -> list[FinishedStep]:
    """Of (at, step, generation, world)."""
    return [FinishedStep(at, step, generation, world, pid) for at, step, generation, world in steps]


def regular(begin: float, numbers: range, generation: int, world: int, pid: int) -> list[FinishedStep]:
    """Steps that end every 0.2 s from `begin` on."""
    ends = enumerate(numbers)
    return log(*((begin + 0.2 * position, number, generation, world) for position, number in ends), pid=pid)


def write(folder: Path, place: str, text: str) -> None:
    with (folder / f"{place}.steps").open("a") as file:
        file.write(text)


@given(seed=st.integers(0, 1000), events=st.integers(0, 40), first=st.integers(1, 3))
def test_trace_is_bounded_and_reproducible(seed: int, events: int, first: int) -> None:
    """A trace stays within its bounds and is the same for a seed."""
    plan = trace(seed, events, first, least=1, most=3)
    assert len(plan) == events
    assert plan == trace(seed, events, first, least=1, most=3)
    nodes = first
    for kind in plan:
        nodes += {Churn.JOIN: 1, Churn.LEAVE: -1, Churn.KILL_NODE: -1, Churn.KILL_RANK: 0}[kind]
        assert 1 <= nodes <= 3


def test_undisturbed_run_has_goodput_one() -> None:
    steps = log(*((10 + 0.2 * number, number, 0, 2) for number in range(50)))
    assert goodput([steps, steps], {2: 0.2}, steps[-1].at) == pytest.approx(1.0)


def test_repeated_step_counts_once() -> None:
    """A step done twice counts once, with the world that finished it for good."""
    first = log((0.0, 0, 0, 2), (1.0, 1, 0, 2), (2.0, 2, 0, 2))
    again = log((5.0, 2, 1, 1), (5.5, 3, 1, 1))
    until = max(step.at for step in (*first, *again))
    assert goodput([first, again], {1: 0.5, 2: 1.0}, until) == pytest.approx((1.0 + 0.5 + 0.5) / 5.5)


def test_job_that_began_anew_lost_its_steps() -> None:
    """Where the last rank dies with the state, as torchft's do, nothing before counts, but its time does."""
    first, second = regular(0.0, range(10, 510), 2, 2, pid=1), regular(0.1, range(10, 300), 2, 2, pid=2)
    anew = regular(105.0, range(100), 5, 1, pid=3)
    until = anew[-1].at
    assert surviving_line([first, second, anew], 0.4) == anew[::-1]
    assert goodput([[*first, *anew], second], {1: 0.2, 2: 0.2}, until) == pytest.approx(100 * 0.2 / until)


def test_job_goes_on_from_a_file() -> None:
    """Steps done again since the last file count once, as those of the new world."""
    first, again = regular(0.0, range(10, 110), 2, 2, pid=1), regular(25.0, range(100, 150), 3, 1, pid=2)
    until = again[-1].at
    line = surviving_line([first, again], 0.4)
    assert [step.step for step in line] == [*range(149, 9, -1)]
    assert {step.world for step in line if step.step >= 100} == {1}
    assert goodput([first, again], {1: 0.2, 2: 0.1}, until) == pytest.approx((89 * 0.1 + 50 * 0.2) / until)


@pytest.mark.parametrize("late_s", [-0.05, 0.05])
def test_discarded_quorum_does_not_count(late_s: float) -> None:
    """Of two quorums beside each other the one whose state is taken counts, though the other trained as long."""
    ahead = [*regular(0.0, range(50), 1, 2, pid=1), *regular(10.0, range(50, 70), 2, 1, pid=1)]
    discarded = regular(12.0 + late_s, range(50, 60), 3, 1, pid=2)
    behind = [*regular(0.01, range(50), 1, 2, pid=2), *discarded]
    merged = [regular(14.0, range(70, 90), 4, 2, pid=1), regular(14.01, range(70, 90), 4, 2, pid=2)]
    step_logs = [[*ahead, *merged[0]], [*behind, *merged[1]]]
    line = surviving_line(step_logs, 0.4)
    assert [step.step for step in line] == [*range(89, -1, -1)]
    assert not {*line} & {*discarded}
    until = merged[0][-1].at
    assert goodput(step_logs, {1: 0.2, 2: 0.2}, until) == pytest.approx(1.0, rel=0.01)


def test_impossible_goodput_is_refused() -> None:
    """A share of time above what noise explains is an error that names the steps and the seconds."""
    steps = regular(0.0, range(10, 111), 0, 2, pid=1)
    assert goodput([steps], {2: 0.2 * (GOODPUT_LIMIT - 0.01)}, 20.0) == pytest.approx(GOODPUT_LIMIT - 0.01)
    with pytest.raises(ValueError, match=r"goodput of 1\.5.* 101 steps \(10 to 110\) take 30\.0 s .* 20\.0 s passed"):
        goodput([steps], {2: 0.3}, 20.0)
    with pytest.raises(ValueError, match="no step was finished"):
        goodput([[]], {2: 0.2}, 20.0)


def test_usual_step_lies_within_generations() -> None:
    """The usual step leaves out what lies between generations."""
    assert median_step_s(log((0.0, 0, 0, 1), (1.0, 1, 0, 1), (9.0, 2, 1, 1), (10.0, 3, 1, 1))) == 1.0


def test_unfinished_line_is_read_later(tmp_path: Path) -> None:
    """A line that is still being written is taken with the next look."""
    step_logs = StepLogs(tmp_path)
    write(tmp_path, "0-0", "step 1.0 0 0 1 7\nstep 2.0 1 0")
    step_logs.read()
    assert [step.step for step in step_logs.steps["0-0"]] == [0]
    write(tmp_path, "0-0", " 1 7\nsaved 1\n")
    step_logs.read()
    assert step_logs.steps["0-0"] == [FinishedStep(1.0, 0, 0, 1, 7), FinishedStep(2.0, 1, 0, 1, 7)]
    assert step_logs.saved == {"0-0": [1]}


def test_ranks_meet_in_a_world_of_just_them(tmp_path: Path) -> None:
    """Ranks are together once all have finished steps in a world of just them."""
    step_logs = StepLogs(tmp_path)
    for place in ("0-0", "0-1"):
        write(tmp_path, place, "step 1.0 0 0 2 7\nstep 2.0 1 0 2 7\n")
    step_logs.read()
    assert step_logs.together(["0-0", "0-1"], since=0.5, count=2)
    assert not step_logs.together(["0-0", "0-1"], since=1.5, count=2)
    assert not step_logs.together(["0-0"], since=0.5, count=2)
    assert not step_logs.together(["0-0", "0-1", "0-2"], since=0.5, count=2)
    write(tmp_path, "0-0", "step 3.0 1 1 2 8\nstep 4.0 2 1 2 8\n")
    step_logs.read()
    assert not step_logs.together(["0-0", "0-1"], since=0.5, count=2)


@pytest.mark.parametrize(("resumed", "lost"), [(1, 2), (2, 1), (3, 0)])
def test_lost_steps_are_those_repeated(tmp_path: Path, resumed: int, lost: int) -> None:
    """Lost steps are those that the next generation did again."""
    step_logs = StepLogs(tmp_path)
    write(tmp_path, "0-0", "".join(f"step {number}.0 {number} 0 2 7\n" for number in range(3)))
    write(tmp_path, "0-1", "".join(f"step {number}.0 {number} 0 2 8\n" for number in range(2)))
    for place in ("0-0", "0-1"):
        write(tmp_path, place, f"step 9.0 {resumed} 1 2 9\nstep 10.0 {resumed + 1} 1 2 9\n")
    step_logs.read()
    assert step_logs.resumed("0-0").at == 9.0
    assert step_logs.lost(["0-0", "0-1"]) == lost
