"""How many teachers and workers are wanted, decided beside a master: what joins a job's ledger and the advisor."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Final

from edl.collective.goodput import JobSummary, read_job
from edl.discovery import Store
from edl.errors import ProtocolError, SettingsError
from edl.master.reports import read_report
from edl.master.scaling.advisor import AdvisorSettings, ScalingAdvisor, WorkerAdvice
from edl.master.scaling.teacher_demand import TeacherScalingSettings
from edl.master.scaling.throughput import ThroughputHistory
from edl.master.scaling.work_left import WorkLeft
from edl.master.scaling.workers import WorkerObservation, decide_workers

__all__ = ["WorkerAdviser", "add_advice_options", "open_advisor"]

_SAMPLE_S: Final = 10.0
"""Between two samples of a job's rate: workers report theirs over several seconds."""
_PAUSE_S: Final = 30.0
"""What a change of a job's size is taken to cost before it was measured."""
_PAUSES: Final = ("rendezvous", "load", "rollback")
"""What a change of a job's size consists of: workers meet, load the state, and repeat what was lost."""


def add_advice_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of which `open_advisor` takes the values."""
    add = parser.add_argument_group(
        "how many teachers and workers are wanted (docs/scaling.md); none is started or ended here"
    ).add_argument
    add("--min-teachers", type=int, default=1, metavar="N", help="of each service of the store (default: 1)")
    add("--max-teachers", type=int, metavar="N", help="(default: no limit)")
    add("--min-workers", type=int, default=1, metavar="N", help="of the job that `edl run` runs under JOB (default: 1)")
    add("--max-workers", type=int, metavar="N", help="(default: nothing is said of workers)")
    add("--no-advice", action="store_true", help="say nothing of either")


def open_advisor(store: Store, options: argparse.Namespace, leads: Callable[[], bool]) -> ScalingAdvisor:
    """Start the advisor that the options of a command ask for.

    Args:
        store: where loads are published; not closed by the advisor.
        options: of the command.
        leads: returns whether the command's master leads: one that stands by says nothing of the job's workers.

    Raises:
        SettingsError: the numbers do not go together.
    """
    settings = AdvisorSettings(TeacherScalingSettings(least=options.min_teachers, most=options.max_teachers))
    workers = None
    if options.max_workers is not None:
        if not 1 <= options.min_workers <= options.max_workers:
            raise SettingsError(
                f"--min-workers {options.min_workers} --max-workers {options.max_workers}: expected 1 or more, and the"
                " most not below the least"
            )
        workers = WorkerAdviser(store, options.job, options.min_workers, options.max_workers, leads)
    return ScalingAdvisor(store, settings, workers=workers)


class WorkerAdviser:
    """Decides how many workers a job should have, from the ledger that its agents keep in the Store.

    Args:
        store: of the job.
        job: its name.
        least: workers that it may have, at least.
        most: workers that it may have, at most.
        leads: returns whether the caller's master leads; asked before anything is read.
        sample_s: seconds between two samples of its rate.
        clock: Returns the time of records, in seconds since 1970.
    """

    def __init__(
        self,
        store: Store,
        job: str,
        least: int,
        most: int,
        leads: Callable[[], bool] = lambda: True,
        *,
        sample_s: float = _SAMPLE_S,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._job = job
        self._least = least
        self._most = most
        self._leads = leads
        self._sample_s = sample_s
        self._clock = clock
        self._history = ThroughputHistory()
        self._left = WorkLeft()
        self._generation = -1
        self._sampled_s = float("-inf")
        self._advice: WorkerAdvice | None = None

    def __call__(self) -> WorkerAdvice | None:
        """Return how many workers the job should have; None while it does not run, shows no rate, or another leads.

        Raises:
            DiscoveryError: the store cannot be reached.
        """
        if not self._leads():
            self._advice = None
            return None
        now_s = time.monotonic()
        if now_s - self._sampled_s < self._sample_s:
            return self._advice
        self._sampled_s = now_s
        self._advice = None
        try:
            summary = read_job(self._store, self._job, self._clock())
        except (SettingsError, ProtocolError):  # there is no such job yet, or it is another version's
            return None
        settled = summary.generation == self._generation  # else the rate may be that of the size before
        self._generation = summary.generation
        rate = summary.samples_per_s or summary.steps_per_s
        if summary.state != "running" or summary.world_size < 1 or not rate:
            return None
        if settled:
            self._history = self._history.record_rate(summary.world_size, rate, now_s)
        else:
            self._left.resize()
        decision = decide_workers(self._observe(summary, rate, now_s))
        self._advice = WorkerAdvice(self._job, summary.world_size, decision)
        return self._advice

    def _observe(self, summary: JobSummary, rate: float, now_s: float) -> WorkerObservation:
        report = read_report(self._store, self._job)
        datasets = report.get("datasets") if report is not None else None
        rows = [row for row in datasets if isinstance(row, dict)] if isinstance(datasets, list) else []
        left_s = self._left.look(rows, now_s)
        paused_s = sum(summary.seconds[category] for category in _PAUSES)
        return WorkerObservation(
            workers=summary.world_size,
            min_workers=self._least,
            max_workers=self._most,
            history=self._history,
            now_s=now_s,
            remaining=None if left_s is None else left_s * rate,  # the master's units may be others than the job's
            pause_s=paused_s / (summary.generation + 1) or _PAUSE_S,
            age_s=summary.elapsed_s,
            moves=max(summary.generation, 0),
        )
