"""How far a job is, from its master's reports. Pure, but for the memory of rates."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from edl.master.kube.observation import WorkProgress
from edl.master.scaling.work_left import WorkLeft

__all__ = ["ProgressReader", "count_done"]


class ProgressReader:
    """Reads reports of a job's master, one after the other."""

    def __init__(self) -> None:
        self._left = WorkLeft()
        self._workers: int | None = None

    def read(self, value: bytes, now_s: float) -> WorkProgress | None:
        """Return what a report says; None if it cannot be read, or says nothing of data."""
        try:
            report = json.loads(value)
        except (ValueError, RecursionError):
            return None
        found = report.get("datasets") if isinstance(report, dict) else None
        datasets = [entry for entry in found if isinstance(entry, dict)] if isinstance(found, list) else []
        if not datasets:
            return None
        done, whole = count_done(datasets)
        left_s = self._left.look(datasets, now_s)
        percentage = None if whole is None else min(100, int(100 * done / whole)) if whole > 0 else 100
        message = f"{done:,.0f} units done" if whole is None else f"{done:,.0f} of {whole:,.0f} units done"
        return WorkProgress(
            percentage=percentage,
            remaining_s=None if left_s is None or not left_s < 1e9 else round(left_s),
            message=message,
        )


def count_done(datasets: Sequence[Mapping[str, Any]]) -> tuple[float, float | None]:
    """Return units that are done, and units in all; None for the latter where a data set has no end yet."""
    done, whole = 0.0, 0.0
    endless = False
    for dataset in datasets:
        units, epochs = _read_number(dataset.get("units")), _read_number(dataset.get("epochs"))
        units_done = _read_number(dataset.get("units_done")) or 0.0
        if dataset.get("finished") is True:
            done += units_done
            whole += units_done
        elif units is None or not epochs:
            done += units_done
            endless = True
        else:
            done += min(units_done, units * epochs)
            whole += units * epochs
    return done, None if endless else whole


def _read_number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1e18:
        return None
    return float(value)
