"""Which rank is named as slow: from the statuses of several nodes, and of step times alone."""

from __future__ import annotations

from dataclasses import replace

from edl.collective.agent.health.step_times import StepTimes, compare_step_times, encode_step_times
from edl.collective.agent.health.stragglers import StragglerChange, StragglerDetector, StragglerSettings
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
    changes = windows(slow_rank=2, count=12)
    assert len(changes) == 1
    assert changes[0].startswith("rank 2 is slow: 0.099 s of its own a step, the others 0.04 s")


SETTINGS = StragglerSettings(windows=3)


def test_persistent_slowness_is_named_once() -> None:
    detector = StragglerDetector(SETTINGS)
    slow = {0: 1.0, 1: 1.0, 2: 1.6}
    assert [detector.observe_window(slow) for _ in range(2)] == [[], []]
    assert detector.observe_window(slow) == [StragglerChange(2, "named", 1.6, 1.0)]
    assert [detector.observe_window(slow) for _ in range(9)] == [[]] * 9
    between = {0: 1.0, 1: 1.0, 2: 1.3}
    assert [detector.observe_window(between) for _ in range(9)] == [[]] * 9
    well = {0: 1.0, 1: 1.0, 2: 1.1}
    assert [detector.observe_window(well) for _ in range(3)][-1] == [StragglerChange(2, "cleared", 1.1, 1.0)]
    assert detector.named == set()
