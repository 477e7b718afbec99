"""A day of a cluster, generated from a seed: arriving jobs, and an online load that rises and falls."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

from edl.master.scaling.workers import ThroughputModel

__all__ = ["DAY_S", "ClusterSize", "Submission", "Trace", "make_trace"]

DAY_S = 86_400.0


@dataclass(frozen=True)
class ClusterSize:
    """The nodes of a cluster, the length of the trace, and the load.

    Attributes:
        nodes: Number of nodes.
        gpus_per_node: GPUs in each node.
        seconds: Length of the trace.
        load: GPU hours that users request, divided by the GPU hours that the online load leaves.
        teachers: Most teachers that can be used, with one GPU each, per GPU of the cluster.
    """

    nodes: int = 400
    gpus_per_node: int = 8
    seconds: float = DAY_S
    load: float = 0.95
    teachers: float = 0.05

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node


@dataclass(frozen=True)
class Submission:
    """A job, as its user submits it.

    Attributes:
        name: Name of the job.
        at_s: Time at which it arrives.
        requested: Workers that its user would request if their number could not change.
        min_workers: Fewest workers with which it runs, if it is elastic.
        max_workers: Most workers that it can use.
        gpus: GPUs per worker, all on one node.
        priority: Priority, 0 to 2.
        model: Its true throughput. A policy only knows what it observes while the job runs.
        work: Total work, in the unit of the model.
        pause_s: Seconds without steps after each start and each change in the number of workers.
    """

    name: str
    at_s: float
    requested: int
    min_workers: int
    max_workers: int
    gpus: int
    priority: int
    model: ThroughputModel
    work: float
    pause_s: float

    @property
    def request_gpus(self) -> int:
        return self.requested * self.gpus


@dataclass(frozen=True)
class Trace:
    """The events of a day, which are the same under all policies.

    Attributes:
        size: The cluster's size.
        seed: Seed from which the trace was made.
        submissions: Submitted jobs, sorted by time.
    """

    size: ClusterSize
    seed: int
    submissions: tuple[Submission, ...]

    def count_online_gpus(self, now_s: float) -> int:
        """Return the GPUs that the online load takes: 15% at night, 45% in the afternoon, with ripples of minutes."""
        day = math.sin(2 * math.pi * (now_s / DAY_S - 0.375))  # lowest at 3 o'clock, highest at 15 o'clock
        ripple = math.sin(now_s / 311 + self.seed) + math.sin(now_s / 997 + 2 * self.seed)
        return round(self.size.gpus * (0.30 + 0.15 * day + 0.01 * ripple))

    def find_capacities(self, now_s: float) -> dict[str, int]:
        """Return the GPUs of each node that jobs may use. The online load fills node after node, a GPU per replica."""
        taken, width = self.count_online_gpus(now_s), self.size.gpus_per_node
        full, rest = divmod(taken, width)
        return {
            f"n{number:05d}": 0 if number < full else width - rest if number == full else width
            for number in range(self.size.nodes)
        }


def make_trace(size: ClusterSize, seed: int) -> Trace:
    """Draw the jobs of a day.

    Workers have 1, 2, 4 or 8 GPUs. With the workers that users request, the median job takes an hour; durations are
    log-normal with long tails, as in the Philly trace (Jeon et al., USENIX ATC 2019). Jobs arrive three times as often
    at noon as at midnight.
    """
    draw = random.Random(seed)
    ticks = range(0, int(size.seconds), 600)
    left_s = size.load * 600 * sum(size.gpus - Trace(size, seed, ()).count_online_gpus(float(at)) for at in ticks)
    submissions: list[Submission] = []
    while left_s > 0:
        submission = draw_submission(draw, size)
        left_s -= submission.work / submission.model.predict_rate(submission.requested) * submission.request_gpus
        submissions.append(submission)
    submissions.sort(key=lambda submission: submission.at_s)
    named = (replace(submission, name=f"job{number:04d}") for number, submission in enumerate(submissions))
    return Trace(size, seed, tuple(named))


def draw_submission(draw: random.Random, size: ClusterSize) -> Submission:
    """Draw a job that requests at most an eighth of the cluster."""
    gpus = draw.choice([1, 1, 1, 2, 2, 4, 8])
    requested = min(draw.choice([1, 2, 2, 4, 4, 8, 8, 16, 32]), max(1, size.gpus // 8 // gpus))
    efficiency = draw.uniform(0.6, 0.95)  # of a worker when all the requested workers run
    b = (1 / efficiency - 1) / max(1, requested - 1)
    model = ThroughputModel(max(0.0, 1.0 - b), b)
    seconds = min(12 * 3600.0, max(300.0, draw.lognormvariate(math.log(3600.0), 1.0)))
    while True:
        at_s = draw.uniform(0.0, size.seconds)
        if draw.random() < (1.0 - 0.5 * math.cos(2 * math.pi * at_s / DAY_S)) / 1.5:
            break
    return Submission(
        name="",
        at_s=at_s,
        requested=requested,
        min_workers=max(1, requested // 4),
        max_workers=2 * requested,
        gpus=gpus,
        priority=draw.choice([0, 0, 0, 1, 1, 2]),
        model=model,
        work=seconds * model.predict_rate(requested),
        pause_s=draw.uniform(5.0, 60.0),
    )
