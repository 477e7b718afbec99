"""The simulated cluster: its day, the policies that share it out, and the ancestor's algorithm as its source has it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from benchmarks._cluster.policies import AncestorAutoscaler, EdlArbiter, GangScheduler, scale_all_jobs
from benchmarks._cluster.simulation import TEACHERS, ClusterView, Placements, Policy, simulate
from benchmarks._cluster.trace import ClusterSize, Submission, make_trace
from edl.master.scaling.arbitration import JobRequest, arbitrate
from edl.master.scaling.throughput import ThroughputModel

SMALL = ClusterSize(nodes=12, seconds=5400.0, load=1.2)


def submission(name: str, least: int, most: int, gpus: int = 1) -> Submission:
    return Submission(name, 0.0, least, least, most, gpus, 0, ThroughputModel(1.0, 0.0), 1e3, 10.0)


def test_trace_is_seeded() -> None:
    assert make_trace(SMALL, 3) == make_trace(SMALL, 3)
    assert make_trace(SMALL, 3) != make_trace(SMALL, 4)
    trace = make_trace(SMALL, 3)
    for at_s in (0.0, 40_000.0, 80_000.0):
        left = sum(trace.find_capacities(at_s).values())
        assert left == SMALL.gpus - trace.count_online_gpus(at_s)
    assert all(0 <= job.at_s < SMALL.seconds and job.min_workers <= job.requested for job in trace.submissions)


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


def test_a_day_is_reproducible() -> None:
    trace = make_trace(SMALL, 1)
    assert simulate(trace, EdlArbiter()) == simulate(trace, EdlArbiter())


def test_greedy_policies_are_refused() -> None:
    class Greedy(GangScheduler):
        def decide(self, view: ClusterView) -> Placements:
            return {TEACHERS: {node: gpus + 1 for node, gpus in view.capacities.items()}}

    with pytest.raises(AssertionError, match="are given"):
        simulate(make_trace(SMALL, 1), Greedy())


def test_gang_is_all_or_nothing() -> None:
    trace = make_trace(SMALL, 2)

    class Watched(GangScheduler):
        def decide(self, view: ClusterView) -> Placements:
            found = super().decide(view)
            for name, places in found.items():
                if name != TEACHERS:
                    assert sum(places.values()) == view.jobs[name].submission.requested
            return found

    assert simulate(trace, Watched()).waits_s


def test_ancestor_shares_by_fulfilment() -> None:
    """With a load that may reach all GPUs, every round gives each job one more: they end alike."""
    jobs = [(submission("a", 1, 10), 1), (submission("b", 1, 10), 1)]
    change, ended = scale_all_jobs(jobs, gpu_limit=2, gpu_total=12, max_load=1.0, most_rounds=100)
    assert ended
    assert change == {"a": 5, "b": 5}
    full = [(submission("a", 1, 10), 10), (submission("new", 2, 2), 2)]
    assert scale_all_jobs(full, 12, 10, 1.0, 100) == ({"a": -2}, True)


def test_ancestor_never_ends_and_edl_does() -> None:
    """Regression of the ancestor: up to 100% of the GPUs, down above 97%, in turns and for ever."""
    jobs = [(submission("a", 1, 100), 50), (submission("b", 1, 100), 47)]
    assert not scale_all_jobs(jobs, gpu_limit=97, gpu_total=100, max_load=0.97, most_rounds=10_000)[1]
    requests = [JobRequest("a", 1, 100), JobRequest("b", 1, 100)]
    nodes = {"n": 100}
    found = arbitrate(nodes, requests, {"a": {"n": 50}, "b": {"n": 47}})
    assert found.settled
    assert found.steps <= 100
    assert arbitrate(nodes, requests, found.placements).placements == found.placements


def test_elastic_jobs_wait_less() -> None:
    """The reason for all of it, on a small and busy cluster, whatever the seed."""
    size = replace(SMALL, seconds=3 * 3600.0, load=1.5)
    ours = gang = 0.0
    for seed in range(2):
        trace = make_trace(size, seed)
        ours += sum(simulate(trace, EdlArbiter()).waits_s.values())
        gang += sum(simulate(trace, GangScheduler()).waits_s.values())
    assert ours < 0.5 * gang
