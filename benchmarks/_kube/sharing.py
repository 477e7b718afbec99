"""ElasticDL's experiment: a job that can use every GPU arrives while another job runs on some of them.

Experiment 1 of https://github.com/sql-machine-learning/elasticdl/blob/develop/docs/benchmark/allreduce/report.md has
two jobs with four GPUs each on six GPUs. Here a job with two fixed workers runs on two of four GPUs. Seconds later, a
job arrives that can use all four: either elastic (1 to 4 workers) or all or nothing (4 to 4), as under gang scheduling.
Each worker stands for a GPU, on which a unit of work takes a fixed time.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.kubernetes.scenarios.scene import Diary, Scene

__all__ = ["GPUS", "JobTimes", "Sharing", "Work", "share_gpus"]

GPUS = 4
PROGRAM = Path(__file__).parent / "working.py"
END_S = 900.0
"""Seconds to wait for the end of a job. The longest round takes three minutes."""


@dataclass(frozen=True)
class Work:
    """The amount of work for both jobs.

    Attributes:
        first: Units of work for the first job, which has two workers.
        second: Units of work for the second job.
        after_s: Seconds from the first job's first unit until the second job arrives.
        unit_s: Seconds that a unit takes.
    """

    first: int = 60
    second: int = 80
    after_s: float = 5.0
    unit_s: float = 1.0


@dataclass(frozen=True)
class JobTimes:
    """What a job did.

    Attributes:
        submitted: When it was created, in seconds since the epoch.
        units: Begin and end of each completed unit of work.
        numbers: Numbers of these units.
        workers: Time and number of workers, each time the workers have formed a new group.
    """

    submitted: float
    units: list[tuple[float, float]]
    numbers: list[int]
    workers: list[tuple[float, int]]

    @property
    def wait_s(self) -> float:
        """Return the seconds from the job's creation until its first unit begins."""
        return min(begin for begin, _ in self.units) - self.submitted

    @property
    def span_s(self) -> float:
        """Return the seconds from the job's creation until its last unit ends."""
        return max(end for _, end in self.units) - self.submitted


@dataclass(frozen=True)
class Sharing:
    """The times of both jobs.

    Attributes:
        first: The job that was already running.
        second: The job that arrived.
    """

    first: JobTimes
    second: JobTimes

    @property
    def begin(self) -> float:
        """Return when the first job began its first unit."""
        return min(begin for begin, _ in self.first.units)

    @property
    def span_s(self) -> float:
        """Return the seconds from `begin` until all work was done."""
        return max(end for _, end in [*self.first.units, *self.second.units]) - self.begin

    @property
    def utilization(self) -> float:
        """Return the share of the GPUs' time that went into units of work, over `span_s`."""
        busy = sum(end - begin for begin, end in [*self.first.units, *self.second.units])
        return busy / (GPUS * self.span_s)

    def to_json(self) -> str:
        """Return the times as JSON text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Sharing:
        """Return the times in text from `to_json`."""
        found = json.loads(text)
        return cls(**{name: JobTimes(**found[name]) for name in ("first", "second")})


def share_gpus(scene: Scene, template: Mapping[str, Any], folder: Path, work: Work, *, elastic: bool) -> Sharing:
    """Run both jobs on four GPUs and return what they did.

    Args:
        scene: Resources in a namespace where an operator runs.
        template: A worker's pod, with one GPU, that can write into `folder`.
        folder: Folder for the files that workers write.
        work: The amount of work.
        elastic: Whether the second job starts with the GPUs that are free, instead of all or nothing.
    """
    first, second = Diary(folder / "first/diary.jsonl"), Diary(folder / "second/diary.jsonl")
    for diary in (first, second):
        diary.path.parent.mkdir(parents=True)
        diary.path.parent.chmod(0o777)
    first_submitted = time.time()
    scene.create_job("first", _run(first, work.first, work), template, minReplicas=2)
    scene.wait("the first job's work", lambda: first.has("unit"))
    time.sleep(work.after_s)
    second_submitted = time.time()
    least = 1 if elastic else GPUS
    scene.create_job("second", _run(second, work.second, work), template, minReplicas=least, maxReplicas=GPUS)
    for name in ("first", "second"):
        scene.wait_success(name, END_S)
    return Sharing(_times(first, first_submitted), _times(second, second_submitted))


def _run(diary: Diary, units: int, work: Work) -> list[str]:
    program = [str(PROGRAM), str(diary.path.parent)]
    return ["--nproc-per-node", "1", *program, "--units", str(units), "--unit-s", str(work.unit_s)]


def _times(diary: Diary, submitted: float) -> JobTimes:
    # Do not read the diary: a worker that was killed right after a unit had no time to write there.
    units = [entry for path in diary.path.parent.glob("unit-*") for entry in Diary(path).entries("unit")]
    units.sort(key=lambda unit: unit["at"])
    return JobTimes(
        submitted,
        units=[(unit["begin"], unit["at"]) for unit in units],
        numbers=[unit["unit"] for unit in units],
        workers=[(start["at"], start["world"]) for start in diary.entries("start")],
    )
