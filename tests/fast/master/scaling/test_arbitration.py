"""Who gets what, in cases that a person can follow."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from edl.master.scaling.arbitration import PATIENCE_S, Allocation, JobRequest, arbitrate
from edl.master.scaling.workers import ThroughputModel


def counts(allocation: Allocation, *jobs: str) -> list[int]:
    return [allocation.count_workers(job) for job in jobs]


def test_a_newcomer_takes_from_the_lowest() -> None:
    jobs = [JobRequest("high", 2, 8, priority=2, weight=4.0), JobRequest("low", 2, 8, priority=0)]
    new = JobRequest("new", 4, 4, priority=1, submitted_s=5.0)
    before = arbitrate({"n1": 8, "n2": 8}, jobs, {})
    assert counts(before, "high", "low") == [8, 8]
    after = arbitrate({"n1": 8, "n2": 8}, [*jobs, new], before.placements)
    assert counts(after, "high", "low", "new") == [8, 4, 4]


def test_a_worker_needs_one_node() -> None:
    """Eight free GPUs on four nodes hold no worker of four, and best fit keeps whole nodes free."""
    assert arbitrate({f"n{i}": 2 for i in range(4)}, [JobRequest("a", 1, 1, 4)], {}).pending == ("a",)
    found = arbitrate({"n1": 8, "n2": 3}, [JobRequest("a", 3, 3, 1)], {})
    assert found.placements == {"a": {"n2": 3}}


def test_shrunk_node_gives_surplus_first() -> None:
    """An online load takes GPUs of a node back: surplus goes before minima, whatever the priorities."""
    jobs = [JobRequest("low", 2, 2, priority=0), JobRequest("high", 1, 4, priority=5)]
    found = arbitrate({"n": 4}, jobs, {"low": {"n": 2}, "high": {"n": 4}})
    assert counts(found, "low", "high") == [2, 2]
    below = arbitrate({"n": 1}, jobs, found.placements)
    assert counts(below, "low", "high") == [0, 1]
    assert below.pending == ("low",)


def test_nothing_moves_near_the_end() -> None:
    """20 s before its end a job neither grows nor gives: a pause of 30 s is never worth it."""
    ending = JobRequest("ending", 1, 8, remaining=100.0)
    assert counts(arbitrate({"n": 8}, [ending], {"ending": {"n": 5}}), "ending") == [5]
    new = JobRequest("new", 1, 8, submitted_s=1.0)
    for remaining, after in ((160.0, [7, 1]), (1e9, [4, 4])):
        job = JobRequest("ending", 1, 8, remaining=remaining)
        assert counts(arbitrate({"n": 8}, [job, new], {"ending": {"n": 7}, "new": {"n": 1}}), "ending", "new") == after


def test_who_moved_often_stays() -> None:
    """Pollux's damping: with 100 moves of 30 s in an hour, no gain is believed."""
    tired = JobRequest("a", 1, 8, age_s=3600.0, moves=100)
    assert counts(arbitrate({"n": 8}, [tired], {"a": {"n": 2}}), "a") == [2]
    rested = JobRequest("a", 1, 8, age_s=3600.0, moves=1)
    assert counts(arbitrate({"n": 8}, [rested], {"a": {"n": 2}}), "a") == [8]


def test_large_jobs_do_not_starve() -> None:
    """Small jobs come and go for ever; a large one that has waited long enough gets the GPUs they leave."""

    def started(wait_s: float) -> bool:
        placements = {f"s{number}": {"n": 2} for number in range(4)}
        small = [JobRequest(f"s{number}", 2, 2, submitted_s=float(number)) for number in range(40)]
        for turn in range(30):
            big = JobRequest("big", 8, 8, submitted_s=0.5, waited_s=wait_s * turn)
            placements.pop(f"s{turn}", None)
            found = arbitrate({"n": 8}, [big, *small[turn + 1 : turn + 6]], placements)
            placements = {job: dict(places) for job, places in found.placements.items()}
            if "big" in placements:
                return True
            assert set(found.held_back.values()) <= ({"big"} if big.waited_s >= PATIENCE_S else set())
        return False

    assert started(PATIENCE_S / 10)
    assert not started(0.0)


def test_impossible_jobs_hold_nobody_up() -> None:
    wide = JobRequest("wide", 1, 1, 16, priority=9, waited_s=1e9)
    many = JobRequest("many", 100, 100, 1, priority=9, waited_s=1e9)
    found = arbitrate({"n1": 8, "n2": 8}, [wide, many, JobRequest("a", 1, 1)], {})
    assert found.pending == ("many", "wide")
    assert counts(found, "a") == [1]


def test_pauses_count_when_reclaiming() -> None:
    """Of one priority, a job at its end gives where others have no more; it pauses then anyway, and gives more."""
    ending = JobRequest("ending", 1, 9, remaining=0.0)
    other = JobRequest("other", 1, 9)
    placements = {"ending": {"n1": 5}, "other": {"n2": 4}}
    for least, shares in ((2, [5, 2]), (4, [3, 2])):
        new = JobRequest("new", least, least, submitted_s=1.0)
        assert counts(arbitrate({"n1": 5, "n2": 4}, [ending, other, new], placements), "ending", "other") == shares


Placements = Mapping[str, Mapping[str, int]]


@dataclass(frozen=True)
class Cluster:
    nodes: Mapping[str, int]
    jobs: Sequence[JobRequest]
    placements: Placements


@st.composite
def requests(draw: st.DrawFn, name: str, sizes: Sequence[int], waits: Sequence[float]) -> JobRequest:
    least = draw(st.integers(0, 5))
    return JobRequest(
        name,
        least,
        least + draw(st.integers(0 if least else 1, 12)),
        gpus=draw(st.sampled_from(sizes)),
        priority=draw(st.integers(0, 2)),
        submitted_s=float(draw(st.integers(0, 3))),
        weight=draw(st.sampled_from([0.5, 1.0, 3.0])),
        model=ThroughputModel(1.0, draw(st.sampled_from([0.0, 0.01, 0.3, 5.0]))),
        remaining=draw(st.none() | st.floats(0, 1e5)),
        pause_s=draw(st.sampled_from([0.0, 10.0, 120.0])),
        age_s=draw(st.sampled_from([0.0, 100.0, 1e5])),
        moves=draw(st.integers(0, 5)),
        waited_s=draw(st.sampled_from(waits)),
    )


@st.composite
def clusters(
    draw: st.DrawFn, sizes: Sequence[int] = (1, 2, 4, 8), waits: Sequence[float] = (0.0, 2 * PATIENCE_S)
) -> Cluster:
    nodes = {f"n{number}": draw(st.integers(0, 8)) for number in range(draw(st.integers(1, 6)))}
    jobs = [draw(requests(f"j{number}", sizes, waits)) for number in range(draw(st.integers(1, 7)))]
    names = [*nodes, "gone"]
    placements = {
        job.name: draw(st.dictionaries(st.sampled_from(names), st.integers(1, 4), max_size=3))
        for job in jobs
        if draw(st.booleans())
    }
    return Cluster(nodes, jobs, placements)


def used_gpus(cluster: Cluster, allocation: Allocation) -> dict[str, int]:
    gpus = {job.name: job.gpus for job in cluster.jobs}
    used = dict.fromkeys(cluster.nodes, 0)
    for name, places in allocation.placements.items():
        for node, count in places.items():
            used[node] += count * gpus[name]
    return used


def check(cluster: Cluster, allocation: Allocation) -> None:
    for node, used in used_gpus(cluster, allocation).items():
        assert used <= cluster.nodes[node], f"{node} has {cluster.nodes[node]} GPUs, {used} are used"
    for job in cluster.jobs:
        count = allocation.count_workers(job.name)
        assert count <= job.max_workers
        assert count >= job.min_workers or count == 0, f"{job.name} runs with {count} of {job.min_workers}"
        assert (job.name in allocation.pending) == (count < job.min_workers)
        assert all(workers > 0 for workers in allocation.placements.get(job.name, {}).values())
    assert allocation.steps <= sum(cluster.nodes.values()), "at most one step a GPU"


MANY = settings(max_examples=20)


LOST_GPUS = Cluster(
    {"n": 3},
    [
        JobRequest("wide", 0, 2, 2, priority=1, age_s=0.0),
        JobRequest("flat", 0, 1, model=ThroughputModel(1.0, 0.3), priority=1, pause_s=0.0),
        JobRequest("steep", 0, 1, pause_s=0.0),
    ],
    {"wide": {"n": 2}, "flat": {"n": 1}},
)
"""A decision that has to take workers, whose jobs pause anyway, is not the last word on who pauses for nothing."""


@MANY
@example(LOST_GPUS)
@given(clusters())
def test_own_result_moves_nothing(cluster: Cluster) -> None:
    first = arbitrate(cluster.nodes, cluster.jobs, cluster.placements)
    check(cluster, first)
    again = arbitrate(cluster.nodes, cluster.jobs, first.placements)
    check(cluster, again)
    if first.settled:
        assert again.placements == first.placements
        assert again.steps == 0


@MANY
@given(clusters(), st.randoms(use_true_random=False))
def test_order_of_input_does_not_matter(cluster: Cluster, shuffler: random.Random) -> None:
    nodes, jobs, placements = list(cluster.nodes.items()), list(cluster.jobs), list(cluster.placements.items())
    first = arbitrate(cluster.nodes, cluster.jobs, cluster.placements)
    for items in (nodes, jobs, placements):
        shuffler.shuffle(items)
    turned = {job: dict(reversed(places.items())) for job, places in placements}
    assert arbitrate(dict(nodes), jobs, turned) == first


ENDLESS_PAUSE = Cluster(
    {"n0": 1, "n1": 0},
    [JobRequest("j0", 0, 1), JobRequest("j1", 0, 1, age_s=0.0), JobRequest("j2", 1, 1)],
    {"j1": {"n0": 1}},
)
"""Moving j1 is never worth its pause, and yet its GPU is j2's."""


@MANY
@example(ENDLESS_PAUSE)
@given(clusters(sizes=(1,), waits=(0.0,)))
def test_pending_minima_come_first(cluster: Cluster) -> None:
    """With workers of one GPU it is exact: no surplus is held while a pending minimum fits by reclaiming it."""
    found = arbitrate(cluster.nodes, cluster.jobs, cluster.placements)
    if not found.settled:
        return
    free = sum(cluster.nodes.values()) - sum(used_gpus(cluster, found).values())
    surplus = sum(max(0, found.count_workers(job.name) - job.min_workers) for job in cluster.jobs)
    for job in cluster.jobs:
        if job.name in found.pending:
            assert job.min_workers > free + surplus, f"{job.name} would fit"


@MANY
@given(clusters())
def test_who_runs_goes_on(cluster: Cluster) -> None:
    """Nobody is brought below its minimum for another; only lost nodes do that."""
    before = arbitrate(cluster.nodes, cluster.jobs, cluster.placements)
    newcomers = [JobRequest(f"new{number}", 3, 9, 1 + number, priority=9) for number in range(3)]
    after = arbitrate(cluster.nodes, [*cluster.jobs, *newcomers], before.placements)
    for job in cluster.jobs:
        if before.count_workers(job.name) >= job.min_workers:
            assert after.count_workers(job.name) >= job.min_workers


@MANY
@given(clusters(sizes=(1,), waits=(0.0,)), st.integers(1, 6))
def test_minima_start_in_order(cluster: Cluster, running: int) -> None:
    """A job waits only for what runs already, and for those that come before it: by priority, then age."""
    old = cluster.jobs[:running]
    before = arbitrate(cluster.nodes, old, cluster.placements)
    after = arbitrate(cluster.nodes, cluster.jobs, before.placements)
    assume(before.settled and after.settled)
    runs = {job.name for job in old if before.count_workers(job.name) >= job.min_workers}

    def rank(job: JobRequest) -> tuple[float, float, str]:
        return -job.priority, job.submitted_s, job.name

    for job in cluster.jobs:
        if job.name in after.pending:
            first = [other for other in cluster.jobs if other.name in runs or rank(other) < rank(job)]
            held = sum(other.min_workers for other in first if other.name not in after.pending)
            assert held + job.min_workers > sum(cluster.nodes.values()), f"{job.name} waits for a later job"


@st.composite
def single_gpu_jobs(draw: st.DrawFn) -> tuple[int, list[JobRequest], dict[str, dict[str, int]]]:
    jobs, placements = [], {}
    for number in range(draw(st.integers(1, 3))):
        model = ThroughputModel(1.0, draw(st.sampled_from([0.0, 0.05, 0.4, 3.0])))
        weight = draw(st.sampled_from([0.5, 1.0, 2.0]))
        job = JobRequest(f"j{number}", 1, draw(st.integers(1, 9)), weight=weight, model=model, pause_s=0.0)
        jobs.append(job)
        placements[job.name] = {"n": draw(st.integers(1, job.max_workers))}
    return draw(st.integers(len(jobs), 12)), jobs, placements


@MANY
@given(single_gpu_jobs())
def test_shares_are_the_best_there_are(case: tuple[int, list[JobRequest], dict[str, dict[str, int]]]) -> None:
    """Where moves cost nothing, no other shares have a larger sum of weighted log-speedups."""
    gpus, jobs, placements = case

    def total(counts: tuple[int, ...]) -> float:
        return sum(job.weight * math.log(job.model.predict_rate(n)) for job, n in zip(jobs, counts, strict=True))

    best = max(
        total(counts)
        for counts in itertools.product(*(range(1, job.max_workers + 1) for job in jobs))
        if sum(counts) <= gpus
    )
    found = arbitrate({"n": gpus}, jobs, placements)
    if found.settled:
        assert math.isclose(total(tuple(found.count_workers(job.name) for job in jobs)), best, abs_tol=1e-6)
