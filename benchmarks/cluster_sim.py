"""How well the arbiter shares a cluster on a simulated day, and how long a decision takes.

Jobs that request 95% of the day's GPU hours share 3,200 GPUs (400 nodes of 8). An online load takes 15% to 45% of the
GPUs, and teachers borrow idle GPUs. There are two alternatives: gang scheduling with backfill, which starts a job
either with all of its workers or with a quarter of them (`at the minimum`), and paddle-operator's autoscaler, which is
EDL's ancestor. Changing the number of workers pauses a job for 5 s to 60 s; no work is lost.

- `decision_s`: CPU seconds of the slowest of five decisions with 1,000 jobs on 10,000 nodes.
- `wait_vs_gang`: the mean time that jobs wait for their minimum number of workers, divided by that with gang
  scheduling.
- `utilization`: GPUs in use while a job waits, divided by those that the online load leaves free.
- `span_vs_...`, `moves_vs_ancestor`: ratios of the mean time from a job's arrival to its end, and of the number of
  changes in the number of workers.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from benchmarks._child import ROOT
from benchmarks._cluster.picture import draw_day
from benchmarks._cluster.policies import AncestorAutoscaler, EdlArbiter, GangScheduler
from benchmarks._cluster.simulation import Placements, Policy, Result, Sample, simulate
from benchmarks._cluster.trace import ClusterSize, make_trace
from benchmarks._harness import Goal, Options, Spread, main, note, progress
from edl.master.scaling.allocation_plan import JobRequest
from edl.master.scaling.arbitration import arbitrate
from edl.master.scaling.workers import ThroughputModel

GOALS = [
    Goal("decision_s", 1.0, "at most"),
    Goal("wait_vs_gang", 0.5, "at most"),
    Goal("utilization", 0.95),
]
_PICTURE = ROOT / "docs/images/cluster_sim.png"
_NODES, _JOBS = 10_000, 1_000
_QUICK = ClusterSize(nodes=32, seconds=3 * 3600.0, load=1.5)


def measure(options: Options, picture: Path | None) -> dict[str, list[float]]:
    """Return the figures of each round, which is a day from a different seed."""
    figures: dict[str, list[float]] = {}
    days: list[dict[str, Result]] = []
    for seed in range(options.repeats):
        round_figures = {"decision_s": decide_large(seed, *((300, 60) if options.quick else (_NODES, _JOBS)))}
        days.append(live(_QUICK if options.quick else ClusterSize(), seed))
        round_figures |= compare(days[-1])
        for key, value in round_figures.items():
            figures.setdefault(key, []).append(value)
    tell(days)
    if picture is not None and not options.quick:
        draw_day(list(days[0].values()), picture)
    return figures


def live(size: ClusterSize, seed: int) -> dict[str, Result]:
    """Run a day under each policy."""
    trace = make_trace(size, seed)
    ancestor = AncestorAutoscaler()
    at_minimum = GangScheduler("gang at the minimum", at_minimum=True)
    policies: list[Policy] = [EdlArbiter(), GangScheduler(), at_minimum, ancestor]
    results = {}
    for policy in policies:
        progress(f"day {seed}: {policy.name}")
        results[policy.name] = simulate(trace, policy)
    note(
        f"Day {seed}: {len(trace.submissions)} jobs. In {ancestor.endless} of its {ancestor.decisions} decisions the "
        "ancestor's dry run would not have ended with a desired load of 0.97 (it was followed for 300 rounds).\n"
    )
    return results


def compare(day: Mapping[str, Result]) -> dict[str, float]:
    """Return the figures of a day."""
    ours, gang, ancestor = day["EDL"], day["gang"], day["ancestor"]
    return {
        "wait_vs_gang": mean(ours.waits_s) / mean(gang.waits_s),
        "utilization": utilization(ours, teachers=True),
        "utilization_jobs": utilization(ours, teachers=False),
        "span_vs_gang": mean(ours.spans_s) / mean(gang.spans_s),
        "span_vs_ancestor": mean(ours.spans_s) / mean(ancestor.spans_s),
        "moves_vs_ancestor": len(ours.moves) / max(1, len(ancestor.moves)),
    }


def mean(values: Mapping[str, float]) -> float:
    return statistics.fmean(values.values())


def utilization(result: Result, teachers: bool) -> float:
    """Return the share of GPUs that make steps, over all ticks in which a job waits; 1 if no job ever waits."""

    def useful(sample: Sample) -> int:
        return sample.jobs - sample.pausing + (sample.teachers if teachers else 0)

    waiting = [sample for sample in result.samples if sample.waiting_jobs]
    return sum(map(useful, waiting)) / sum(sample.capacity for sample in waiting) if waiting else 1.0


def tell(days: list[dict[str, Result]]) -> None:
    """Note a table of all policies, with medians over the days."""
    note("| medians over all days | " + " | ".join(days[0]) + " |")
    note("| --- |" + " ---: |" * len(days[0]))
    rows: dict[str, Callable[[Result], float]] = {
        "mean wait for the minimum, s": lambda result: mean(result.waits_s),
        "longest wait of a job, h": lambda result: max(result.waits_s.values()) / 3600,
        "mean time to the end, h": lambda result: mean(result.spans_s) / 3600,
        "utilization while a job waits, %": lambda result: 100 * utilization(result, teachers=True),
        "GPU hours of teachers": lambda result: (
            sum(sample.teachers for sample in result.samples) * result.samples[1].at_s / 3600
        ),
        "moves per job": lambda result: len(result.moves) / len(result.waits_s),
        "jobs not done a day later": lambda result: float(result.unfinished),
    }
    for name, compute in rows.items():
        cells = [f"{Spread.of([compute(day[policy]) for day in days]).median:,.4g}" for policy in days[0]]
        note(f"| {name} | {' | '.join(cells)} |")
    note("")


def decide_large(seed: int, nodes: int, jobs: int) -> float:
    """Return the CPU seconds of the slowest of five decisions about a large cluster."""
    draw = random.Random(seed)
    capacities = {f"n{number:05d}": 8 for number in range(nodes)}

    def request(number: int) -> JobRequest:
        least = draw.choice([1, 2, 4, 8])
        return JobRequest(
            f"job{number:05d}",
            least,
            least * draw.choice([4, 8, 32]),
            gpus=draw.choice([1, 1, 2, 4, 8]),
            priority=draw.choice([0, 0, 1, 2]),
            submitted_s=float(number),
            model=ThroughputModel(1.0, draw.uniform(0.0, 0.1)),
            remaining=draw.uniform(1e4, 1e6),
            pause_s=draw.uniform(5.0, 60.0),
            age_s=draw.uniform(60.0, 36_000.0),
        )

    requests = [request(number) for number in range(jobs)]
    seconds = []

    def decide(what: str, nodes: Mapping[str, int], requests: list[JobRequest], places: Placements) -> Placements:
        begin = time.process_time()
        found = arbitrate(nodes, requests, places)
        seconds.append(time.process_time() - begin)
        progress(f"{what}: {seconds[-1]:.2f} s, {found.steps} steps")
        return {job: dict(nodes) for job, nodes in found.placements.items()}

    first = decide("empty", capacities, requests, {})
    decide("nothing to do", capacities, requests, first)
    lost = {node: gpus for number, (node, gpus) in enumerate(capacities.items()) if number % 10}
    decide("a tenth of the nodes lost", lost, requests, first)
    others = requests[jobs // 20 :] + [request(number) for number in range(jobs, jobs + jobs // 20)]
    decide("a twentieth of the jobs ended, as many came", capacities, others, first)
    taken = {node: gpus - 4 if number % 5 == 0 else gpus for number, (node, gpus) in enumerate(capacities.items())}
    decide("a tenth of the GPUs taken", taken, requests, first)
    return max(seconds)


if __name__ == "__main__":
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument(
        "--picture", type=Path, default=_PICTURE, help="file for the drawing of the first day (default %(default)s)"
    )
    main("cluster_sim", partial(measure, picture=own.parse_known_args()[0].picture), GOALS, __doc__, own=[own])
