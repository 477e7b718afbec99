"""The simulated cluster: it applies a policy's decisions, lets jobs make steps, and counts.

It makes some simplifications. Time passes in ticks. Starting a job or changing its workers costs a pause without steps,
but no work is lost. When the online load takes GPUs from a job, the job loses these workers at that tick. Nodes are
alike and nothing fails. A worker's speed does not depend on where the other workers are.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from benchmarks._cluster.trace import Submission, Trace

__all__ = ["TEACHERS", "ClusterView", "Policy", "Result", "RunningJob", "Sample", "simulate"]

TEACHERS = "teachers"
_NOISE = 0.03  # of a measured rate, since steps never take equally long
_DRAIN_S = 86_400.0
"""Seconds after the trace for which its jobs are still followed, with no new jobs. Otherwise the jobs that a policy
keeps waiting longest would not count."""

Placements = dict[str, dict[str, int]]


@dataclass
class RunningJob:
    """A job that has arrived and has not ended.

    Attributes:
        submission: What its user submitted.
        left: Work that is left, in the unit of the model.
        places: Node -> workers.
        waited_s: Seconds so far with fewer workers than its minimum.
        paused_until_s: Time before which it makes no steps.
        moves: Changes of its workers, without its starts.
        started_s: When it first had its minimum; None before that.
        rate: Rate measured in the last tick; None unless it made steps during the whole tick.
    """

    submission: Submission
    left: float
    places: dict[str, int] = field(default_factory=dict)
    waited_s: float = 0.0
    paused_until_s: float = 0.0
    moves: int = 0
    started_s: float | None = None
    rate: float | None = None

    @property
    def workers(self) -> int:
        return sum(self.places.values())


@dataclass(frozen=True)
class ClusterView:
    """The state of the cluster, as a policy sees it.

    Attributes:
        now_s: Current time.
        capacities: GPUs of each node that the online load does not use.
        jobs: All jobs that have arrived and not ended, by name.
        teachers: Node -> teachers, with one GPU each.
        most_teachers: Largest number of teachers that can be used now.
    """

    now_s: float
    capacities: Mapping[str, int]
    jobs: Mapping[str, RunningJob]
    teachers: Mapping[str, int]
    most_teachers: int


class Policy(Protocol):
    """Distributes the GPUs of a cluster."""

    name: str
    decision_s: float

    def decide(self, view: ClusterView) -> Placements:
        """Return where to place every job's workers, and the teachers under `TEACHERS`."""

    def needs(self, submission: Submission) -> int:
        """Return the fewest workers with which a job runs."""


@dataclass(frozen=True)
class Sample:
    """The cluster in one tick, in GPUs unless the name says otherwise."""

    at_s: float
    capacity: int
    jobs: int
    pausing: int
    teachers: int
    waiting_jobs: int


@dataclass(frozen=True)
class Result:
    """The outcome of a trace under a policy.

    Attributes:
        policy: Name of the policy.
        samples: One sample per tick of the trace.
        waits_s: Seconds that each job spent with fewer workers than its minimum.
        spans_s: Seconds from arrival to end, for each job that ended.
        moves: Times at which jobs' workers changed, without starts.
        unfinished: Number of jobs that had not ended a day after the trace.
    """

    policy: str
    samples: tuple[Sample, ...]
    waits_s: Mapping[str, float]
    spans_s: Mapping[str, float]
    moves: tuple[float, ...]
    unfinished: int


def simulate(trace: Trace, policy: Policy, tick_s: float = 30.0) -> Result:
    """Simulate a day under a policy, and continue until the jobs are done."""
    noise = random.Random(trace.seed)
    coming = list(reversed(trace.submissions))
    jobs: dict[str, RunningJob] = {}
    teachers: dict[str, int] = {}
    waits: dict[str, float] = {}
    spans: dict[str, float] = {}
    samples: list[Sample] = []
    moves: list[float] = []
    now_s, decided_s = 0.0, -policy.decision_s
    while now_s < trace.size.seconds or (jobs and now_s < trace.size.seconds + _DRAIN_S):
        while coming and coming[-1].at_s <= now_s:
            submission = coming.pop()
            waited_s = now_s - submission.at_s  # for this tick
            jobs[submission.name] = RunningJob(submission, submission.work, waited_s=waited_s)
        capacities = trace.find_capacities(now_s)
        evict(capacities, jobs, teachers, policy, now_s, moves)
        if now_s - decided_s >= policy.decision_s:
            decided_s = now_s
            view = ClusterView(now_s, capacities, jobs, teachers, round(trace.size.teachers * trace.size.gpus))
            wanted = policy.decide(view)
            teachers = dict(wanted.get(TEACHERS, {}))
            for name, job in jobs.items():
                place(job, wanted.get(name, {}), now_s, moves, policy)
            check_capacity(capacities, jobs, teachers)
        if now_s < trace.size.seconds:
            samples.append(look(now_s, tick_s, capacities, jobs, teachers, policy))
        for name in list(jobs):
            job = jobs[name]
            ended_s = advance(job, now_s, tick_s, policy, noise)
            if ended_s is not None:
                waits[name] = job.waited_s
                spans[name] = ended_s - job.submission.at_s
                del jobs[name]
        now_s += tick_s
    for name, job in jobs.items():
        waits[name] = job.waited_s
    within = tuple(at for at in moves if at < trace.size.seconds)
    return Result(policy.name, tuple(samples), waits, spans, within, len(jobs))


def evict(
    capacities: Mapping[str, int],
    jobs: Mapping[str, RunningJob],
    teachers: dict[str, int],
    policy: Policy,
    now_s: float,
    moves: list[float],
) -> None:
    """Remove workers from GPUs that the online load took: teachers first, then by priority, the youngest first."""
    used: dict[str, int] = dict(teachers)
    for job in jobs.values():
        for node, count in job.places.items():
            used[node] = used.get(node, 0) + count * job.submission.gpus
    by_need = sorted(jobs.values(), key=lambda job: (job.submission.priority, -job.submission.at_s))
    for node, count in used.items():
        over = count - capacities[node]
        if over <= 0:
            continue
        leaving = min(over, teachers.get(node, 0))
        if leaving:
            teachers[node] -= leaving
            over -= leaving
        for job in by_need:
            while over > 0 and job.places.get(node, 0):
                rest = {**job.places, node: job.places[node] - 1}
                place(job, {at: left for at, left in rest.items() if left}, now_s, moves, policy)
                over -= job.submission.gpus


def place(job: RunningJob, places: Mapping[str, int], now_s: float, moves: list[float], policy: Policy) -> None:
    """Give a job its workers. A change costs a pause, and counts as a move if the job was running."""
    if dict(places) == job.places:
        return
    ran = job.workers >= policy.needs(job.submission)
    job.places = dict(places)
    runs = job.workers >= policy.needs(job.submission)
    if ran:
        job.moves += 1
        moves.append(now_s)
    if runs:
        job.paused_until_s = now_s + job.submission.pause_s
        if job.started_s is None:
            job.started_s = now_s


def check_capacity(capacities: Mapping[str, int], jobs: Mapping[str, RunningJob], teachers: Mapping[str, int]) -> None:
    """Refuse placements with more GPUs than there are, or with more workers than a job's maximum."""
    used = dict(teachers)
    for job in jobs.values():
        for node, count in job.places.items():
            used[node] = used.get(node, 0) + count * job.submission.gpus
        assert job.workers <= job.submission.max_workers, f"{job.submission.name} has {job.workers} workers"
    for node, count in used.items():
        assert count <= capacities[node], f"{node} has {capacities[node]} GPUs, but {count} are assigned"


def look(
    now_s: float,
    tick_s: float,
    capacities: Mapping[str, int],
    jobs: Mapping[str, RunningJob],
    teachers: Mapping[str, int],
    policy: Policy,
) -> Sample:
    """Return a sample of the cluster in this tick. A job that pauses for part of the tick counts for that part."""
    using = pausing = waiting = 0
    for job in jobs.values():
        gpus = job.workers * job.submission.gpus
        using += gpus
        if job.workers < policy.needs(job.submission):
            waiting += 1
            pausing += gpus
        else:
            pausing += round(gpus * min(1.0, max(0.0, job.paused_until_s - now_s) / tick_s))
    return Sample(now_s, sum(capacities.values()), using, pausing, sum(teachers.values()), waiting)


def advance(job: RunningJob, now_s: float, tick_s: float, policy: Policy, noise: random.Random) -> float | None:
    """Let a job make steps for a tick, and return when it ended, or None if it did not."""
    job.rate = None
    if job.workers < policy.needs(job.submission):
        job.waited_s += tick_s
        return None
    begin_s = max(now_s, job.paused_until_s)
    rate = job.submission.model.predict_rate(job.workers)
    if begin_s < now_s + tick_s:
        if job.left <= rate * (now_s + tick_s - begin_s):
            return begin_s + job.left / rate
        job.left -= rate * (now_s + tick_s - begin_s)
        if begin_s == now_s:
            job.rate = rate * noise.lognormvariate(0.0, _NOISE)
    return None
