"""A day of a cluster, from a seed: jobs that come, and an online load that breathes."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

from edl.master.scaling.workers import ThroughputModel

__all__ = ["DAY_S", "ClusterSize", "Submission", "Trace", "make_trace"]

DAY_S = 86_400.0


@dataclass(frozen=True)
class ClusterSize:
    """Nodes of equal size, and for how long they are looked at.

    Attributes:
        nodes: of the cluster.
        gpus_per_node: of a node.
        seconds: of the trace.
        load: what users request in GPU hours, by the GPU hours that the online load leaves.
        teachers: that are wanted, at most, of a GPU each, for each GPU.
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
    """A job as its user submits it.

    Attributes:
        name: of the job.
        at_s: when it comes.
        requested: workers that its user would ask for if their number could not change.
        min_workers: with fewer it does not run, where it is elastic.
        max_workers: it takes no more.
        gpus: of a worker, on one node.
        priority: 0 to 2.
        model: its true throughput; only what it shows while it runs is known to a policy.
        work: what there is to do, in the unit of the model.
        pause_s: without a step after each start and each change of its size.
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
    """Hold the events of a day, which are the same under all policies.

    Attributes:
        size: of the cluster.
        seed: from which it was made.
        submissions: by time.
    """

    size: ClusterSize
    seed: int
    submissions: tuple[Submission, ...]

    def count_online_gpus(self, now_s: float) -> int:
        """GPUs that the online load takes: 15% of all at night, 45% in the afternoon, and ripples of minutes."""
        day = math.sin(2 * math.pi * (now_s / DAY_S - 0.375))  # lowest at 3 o'clock, highest at 15 o'clock
        ripple = math.sin(now_s / 311 + self.seed) + math.sin(now_s / 997 + 2 * self.seed)
        return round(self.size.gpus * (0.30 + 0.15 * day + 0.01 * ripple))

    def find_capacities(self, now_s: float) -> dict[str, int]:
        """GPUs of each node that jobs may use: the online load fills node after node, one replica a GPU."""
        taken, width = self.count_online_gpus(now_s), self.size.gpus_per_node
        full, rest = divmod(taken, width)
        return {
            f"n{number:05d}": 0 if number < full else width - rest if number == full else width
            for number in range(self.size.nodes)
        }


def make_trace(size: ClusterSize, seed: int) -> Trace:
    """Draw the jobs of a day.

    Workers have 1, 2, 4 or 8 GPUs. Jobs take an hour in the median with what their users request, log-normal with long
    tails (as in Philly's trace: Jeon et al., USENIX ATC 2019), and come three times as often at noon as at midnight.
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
    """Draw a job; none requests more than an eighth of the cluster."""
    gpus = draw.choice([1, 1, 1, 2, 2, 4, 8])
    requested = min(draw.choice([1, 2, 2, 4, 4, 8, 8, 16, 32]), max(1, size.gpus // 8 // gpus))
    efficiency = draw.uniform(0.6, 0.95)  # of a worker beside those that are requested
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
