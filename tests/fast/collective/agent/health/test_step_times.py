"""Which rank is named as slow, from the statuses of several nodes, without a clock."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edl.collective.agent.health.step_times import StepTimes, compare_step_times, encode_step_times, own_step_s
from edl.collective.agent.health.stragglers import StragglerDetector
from edl.collective.worker_status import Phase, WorkerStatus
from edl.discovery.store import Entry

BEGIN = WorkerStatus(
    generation=3,
    pid=100,
    phase=Phase.TRAIN,
    phase_since=0.0,
    totals_s=dict.fromkeys(Phase, 0.0),
    step=0,
    step_at=0.0,
    saved=-1,
    paused=-1,
    samples=0,
    durations_s=(),
    in_process=False,
)


def after(steps: int, step_s: float, waited_s: float) -> WorkerStatus:
    """The status of a rank that made `steps` steps, in each of which it waited for others."""
    trained = {**BEGIN.totals_s, Phase.TRAIN: steps * step_s}
    return replace(BEGIN, step=steps, totals_s=trained, waited_s=steps * waited_s)


def windows(slow_rank: int, count: int) -> list[str]:
    """What is said over `count` windows of ten steps of 0.1 s, in which all but one rank wait for 0.06 s."""
    nodes = {"a": range(2), "b": range(2, 4)}
    times = {name: StepTimes() for name in nodes}
    stragglers, changes = StragglerDetector(), []
    for window in range(count + 1):
        entries = []
        for name, ranks in nodes.items():
            statuses = {rank: after(10 * window, 0.1, 0.001 if rank == slow_rank else 0.06) for rank in ranks}
            own = times[name].measure_window(statuses)
            entries.append(Entry(name, encode_step_times(3, own), window + 1))
        changes += [str(change) for change in compare_step_times(entries, 3, stragglers)]
    return changes


def test_rank_that_never_waits_is_named() -> None:
    """The rank that never waits is named once."""
    changes = windows(slow_rank=2, count=12)
    assert len(changes) == 1
    assert changes[0].startswith("rank 2 is slow: 0.099 s of its own a step, the others 0.04 s")


def test_nobody_is_named_before_it_lasts() -> None:
    assert windows(slow_rank=2, count=4) == []


def test_unmeasured_ranks_are_not_named() -> None:
    """Nobody is named where nobody measures."""
    times = StepTimes()
    times.measure_window({0: BEGIN})
    assert times.measure_window({0: after(10, 0.1, 0.0)}) == {}


def test_a_new_worker_begins_a_new_window() -> None:
    times = StepTimes()
    times.measure_window({0: BEGIN})
    assert times.measure_window({0: replace(after(10, 0.1, 0.01), pid=101)}) == {}


def test_other_generations_do_not_count() -> None:
    """Other generations and nonsense do not count."""
    stragglers = StragglerDetector()
    for _ in range(20):
        entries = [
            Entry("a", encode_step_times(3, {0: 0.1}), 1),
            Entry("b", encode_step_times(2, {1: 9.0}), 1),
            *(
                Entry("c", nonsense, 1)
                for nonsense in (b"", b"[]", b'{"generation": 3}', b'{"generation":3,"own_s":[1]}')
            ),
        ]
        assert compare_step_times(entries, 3, stragglers) == []


def test_own_time_excludes_the_wait() -> None:
    """Own time is the step without the wait."""
    before = BEGIN
    totals = {**before.totals_s, Phase.TRAIN: before.totals_s[Phase.TRAIN] + 4.0}
    after = replace(before, step=before.step + 4, totals_s=totals)
    assert own_step_s(before, after, waited_s=3.0) == pytest.approx(0.25)
    assert own_step_s(before, before, waited_s=0.0) is None
    assert own_step_s(before, replace(after, generation=9), waited_s=0.0) is None
