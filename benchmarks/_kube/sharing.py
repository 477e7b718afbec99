"""ElasticDL's experiment: a job that wants every GPU arrives while another runs on a part of them.

Experiment 1 of https://github.com/sql-machine-learning/elasticdl/blob/develop/docs/benchmark/allreduce/report.md has
two jobs of four GPUs each on six. Here a job of two fixed workers runs on two of four GPUs, and seconds later comes one
that can use four: elastically (1 to 4 workers), and beside that all or nothing (4 to 4), as under gang scheduling.
Workers stand for GPUs: a unit of work takes a fixed time on one.
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
"""Of a job. The longest round takes three minutes."""


@dataclass(frozen=True)
class Work:
    """How much the two jobs have to do.

    Attributes:
        first: units of the job that runs, with two workers.
        second: units of the job that comes.
        after_s: seconds from the first job's first unit until the second job comes.
        unit_s: seconds that a unit takes.
    """

    first: int = 60
    second: int = 80
    after_s: float = 5.0
    unit_s: float = 1.0


@dataclass(frozen=True)
class JobTimes:
    """What a job did.

    Attributes:
        submitted: when it was created, in seconds since the epoch.
        units: begin and end of each unit of work that was done.
        numbers: of these units.
        workers: time and number, each time that workers have gathered anew.
    """

    submitted: float
    units: list[tuple[float, float]]
    numbers: list[int]
    workers: list[tuple[float, int]]

    @property
    def wait_s(self) -> float:
        """Seconds from its creation to its first unit's begin."""
        return min(begin for begin, _ in self.units) - self.submitted

    @property
    def span_s(self) -> float:
        """Seconds from its creation to its last unit's end."""
        return max(end for _, end in self.units) - self.submitted


@dataclass(frozen=True)
class Sharing:
    """Both jobs' times.

    Attributes:
        first: the job that ran.
        second: the job that came.
    """

    first: JobTimes
    second: JobTimes

    @property
    def begin(self) -> float:
        """When the first job worked first."""
        return min(begin for begin, _ in self.first.units)

    @property
    def span_s(self) -> float:
        """Seconds from there until all work was done."""
        return max(end for _, end in [*self.first.units, *self.second.units]) - self.begin

    @property
    def utilization(self) -> float:
        """Share of the GPUs' seconds that went into units of work, over that time."""
        busy = sum(end - begin for begin, end in [*self.first.units, *self.second.units])
        return busy / (GPUS * self.span_s)

    def to_json(self) -> str:
        """The times as text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Sharing:
        """The times of `to_json`."""
        found = json.loads(text)
        return cls(**{name: JobTimes(**found[name]) for name in ("first", "second")})


def share_gpus(scene: Scene, template: Mapping[str, Any], folder: Path, work: Work, *, elastic: bool) -> Sharing:
    """Run both jobs on four GPUs and return what they did.

    Args:
        scene: where; an operator runs there.
        template: a worker's pod, with one GPU, that may write into `folder`.
        folder: for what the workers write.
        work: how much there is to do.
        elastic: the second job takes what there is; else all or nothing.
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
    # Not those of the diary: a worker that was killed as it had done a unit did not come to write there.
    units = [entry for path in diary.path.parent.glob("unit-*") for entry in Diary(path).entries("unit")]
    units.sort(key=lambda unit: unit["at"])
    return JobTimes(
        submitted,
        units=[(unit["begin"], unit["at"]) for unit in units],
        numbers=[unit["unit"] for unit in units],
        workers=[(start["at"], start["world"]) for start in diary.entries("start")],
    )
