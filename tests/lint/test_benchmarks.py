"""The benchmarks: their harness, what they conclude from step logs of ranks, and the simulated cluster."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks._cluster.policies import AncestorAutoscaler, EdlArbiter, GangScheduler
from benchmarks._cluster.simulation import Policy, simulate
from benchmarks._cluster.trace import ClusterSize, make_trace
from benchmarks._elastic_churn import GOODPUT_LIMIT, goodput, surviving_line
from benchmarks._step_logs import FinishedStep, StepLogs


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


def test_impossible_goodput_is_refused() -> None:
    """A share of time above what noise explains is an error that names the steps and the seconds."""
    steps = regular(0.0, range(10, 111), 0, 2, pid=1)
    assert goodput([steps], {2: 0.2 * (GOODPUT_LIMIT - 0.01)}, 20.0) == pytest.approx(GOODPUT_LIMIT - 0.01)
    with pytest.raises(ValueError, match=r"goodput of 1\.5.* 101 steps \(10 to 110\) take 30\.0 s .* 20\.0 s passed"):
        goodput([steps], {2: 0.3}, 20.0)
    with pytest.raises(ValueError, match="no step was finished"):
        goodput([[]], {2: 0.2}, 20.0)


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


SMALL = ClusterSize(nodes=12, seconds=5400.0, load=1.2)

POLICIES: dict[str, Callable[[], Policy]] = {
    "EDL": EdlArbiter,
    "gang": GangScheduler,
    "gang at the minimum": lambda: GangScheduler("gang at the minimum", at_minimum=True),
    "ancestor": AncestorAutoscaler,
}


@pytest.mark.parametrize("name", POLICIES)
def test_every_job_is_accounted_for(name: str) -> None:
    """`simulate` itself refuses a policy that gives what is not there."""
    trace = make_trace(SMALL, 1)
    result = simulate(trace, POLICIES[name]())
    assert result.policy == name
    names = {job.name for job in trace.submissions}
    assert result.waits_s.keys() == names
    assert len(result.spans_s) + result.unfinished == len(names)
    for job in trace.submissions:
        if job.name in result.spans_s:
            fastest_s = job.work / job.model.predict_rate(job.max_workers)
            assert result.spans_s[job.name] >= fastest_s, "no job is faster than with all it can take"
    for sample in result.samples:
        assert 0 <= sample.pausing <= sample.jobs
        assert sample.jobs + sample.teachers <= sample.capacity
    assert len(result.samples) == 180
