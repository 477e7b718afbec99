"""Progress of a whole job, as its master reports it in the store."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edl.background import BackgroundLoop
from edl.cli.label.screen import Screen, ShownProgress, counted
from edl.discovery import Store
from edl.distill.labelling import LabelProgress
from edl.errors import DiscoveryError
from edl.master.reports import read_report

__all__ = ["DATASET", "JobProgress", "labels_of"]

DATASET = "labels"
"""Name of the data set in the job."""
_EVERY_S = 1.0
"""Between two looks: masters report as often."""


def labels_of(report: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return what a master's report says of the labels; None where it says nothing."""
    datasets = report.get("datasets") if report is not None else None
    found = [each for each in datasets or () if isinstance(each, dict) and each.get("name") == DATASET]
    return found[0] if found else None


class JobProgress:
    """Shows the progress of the whole from time to time, whatever this process does meanwhile.

    Args:
        store: of the job.
        job: its name.
        screen: where it is shown.
    """

    def __init__(self, store: Store, job: str, screen: Screen) -> None:
        self._store = store
        self._job = job
        self._screen = screen
        self._here = LabelProgress()
        self._away = ""
        self._loop = BackgroundLoop("edl-label-progress", self._step)

    def note(self, here: LabelProgress) -> None:
        """Note what this process has done. May be called from any thread."""
        self._here = here

    def close(self) -> None:
        """Show nothing more. May be called twice."""
        self._loop.close()

    def _step(self) -> float:
        try:
            found = labels_of(read_report(self._store, self._job))
        except DiscoveryError:
            return _EVERY_S
        if found is not None:
            self._screen(shown(found, self._here))
        return _EVERY_S


def shown(labels: Mapping[str, Any], here: LabelProgress) -> ShownProgress:
    """Return what is shown.

    Args:
        labels: what the master reports.
        here: what this process has done.
    """
    workers = counted(len(labels["holders"]), "worker")
    poisoned = labels["shards"]["poisoned"]
    who = [workers, *([f"{counted(poisoned, 'shard')} given up"] if poisoned else [])]
    who.append(f"{here.labelled:,} rows here from {counted(here.teachers_live, 'teacher')}")
    return ShownProgress(labels["units_done"], labels["units"], labels["units_per_s"], labels["eta_s"], ", ".join(who))
