"""A master's report of its job in the Store, and the checks of the report of the master before it.

The leading master writes a report once a second: `edl status`, the dashboard and late workers read it. It stays when
the master has ended, so that the next one knows whether it has the right journal, and can say why it takes over.
"""

from __future__ import annotations

import asyncio
import collections
import json
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, Final

from edl.background import start_call
from edl.datasets import same_data
from edl.discovery import Store
from edl.errors import ClosedError, ConflictError, EDLError, SettingsError
from edl.master.naming import report_key
from edl.master.shards import ShardBook
from edl.master.shards.dataset_shards import check_spec, describe_difference
from edl.protocol.master import DatasetSpec
from edl.quoting import shown

__all__ = [
    "ReportWriter",
    "UnitRates",
    "check_continued",
    "check_data",
    "describe_dataset",
    "earlier_events",
    "encode",
    "takeover_cause",
]

logger = logging.getLogger(__name__)

_WINDOW_S: Final = 15.0
"""Rates are averages over this time: a shard may take seconds."""
_NBYTES: Final = 200_000
"""Largest report: a value of the Store may have 256 KiB."""
_HOLDERS: Final = 200
"""Most holders listed of a data set, the busiest first."""
_FLUSH_S: Final = 2.0
"""How long a master that ends waits for a report to reach the Store."""


class UnitRates:
    """Growth of totals per second, by key."""

    def __init__(self) -> None:
        self._looks: dict[str, collections.deque[tuple[float, float]]] = {}

    def look(self, key: str, total: float, now_s: float) -> float:
        """Note a total; return by how much it grows a second."""
        looks = self._looks.setdefault(key, collections.deque())
        if looks and total < looks[-1][1]:
            looks.clear()  # it was put back
        looks.append((now_s, total))
        while len(looks) > 2 and looks[1][0] <= now_s - _WINDOW_S:
            looks.popleft()
        (begun_s, before), (at_s, after) = looks[0], looks[-1]
        return (after - before) / (at_s - begun_s) if at_s > begun_s else 0.0


def describe_dataset(
    status: dict[str, Any], rates: UnitRates, now_s: float, silence_s: Callable[[str], float]
) -> dict[str, Any]:
    """Return what is shown of a data set: `ShardBook.status` with rates, and each holder's seconds of silence."""
    name, done = status["name"], status["units_done"]
    rate = rates.look(name, done, now_s)
    holders = [
        {
            **holder,
            "units_per_s": round(rates.look(f"{name}/{holder['session']}", holder["units_done"], now_s), 3),
            "seen_s": round(silence_s(holder["session"]), 3),
        }
        for holder in status["holders"]
    ]
    holders.sort(key=lambda holder: -holder["units_done"])
    units, epochs = status["units"], status["epochs"]
    left = None if units is None or not epochs else max(0, units * epochs - done)
    return {
        **status,
        "units_per_s": round(rate, 3),
        "eta_s": round(left / rate, 1) if left and rate > 0 else None,
        "holders": holders,
    }


def encode(report: dict[str, Any]) -> bytes:
    """Return the report as JSON for the Store, without its longest parts if it is too long."""
    for holders, poisoned in ((_HOLDERS, None), (20, 10), (0, 0)):
        for dataset in report["datasets"]:
            dataset.update(holders=dataset["holders"][:holders], poisoned=dataset["poisoned"][:poisoned])
        data = json.dumps(report, allow_nan=False).encode()
        if len(data) <= _NBYTES:
            return data
    return json.dumps({**report, "datasets": report["datasets"][:100], "events": []}, allow_nan=False).encode()


class ReportWriter:
    """Writes the newest report of a job into the Store, in a thread; older ones are skipped. For an event loop.

    With `anew` it first overwrites a report of a later term, which came from another journal.
    """

    def __init__(self, store: Store, job: str, *, anew: bool = False) -> None:
        self._store = store
        self._anew = anew
        self._key = report_key(job)
        self._newest: dict[str, Any] | None = None
        self._call: Future[None] | None = None
        self._away = False

    def write(self, report: dict[str, Any]) -> None:
        """Have a report written soon; if the Store is away, the next report is tried."""
        self._newest = report
        if self._call is None or self._call.done():
            self._call = start_call("edl-master-report", self._write)

    async def flush(self) -> None:
        """Wait for the newest report to be written, for seconds at most."""
        while self._call is not None:
            done, _ = await asyncio.wait([asyncio.wrap_future(self._call)], timeout=_FLUSH_S)
            if not done or self._newest is None:
                return
            self._call = start_call("edl-master-report", self._write)

    def _write(self) -> None:
        while (report := self._newest) is not None:
            self._newest = None
            try:
                self._put(report)
                self._away = False
            except ClosedError:
                return
            except (EDLError, ValueError) as exc:
                if not self._away:
                    logger.warning("cannot write this master's report to the store; the job goes on: %s", exc)
                self._away = True

    def _put(self, report: dict[str, Any]) -> None:
        entry = self._store.get(self._key)
        if entry is not None and _term(entry.value) > report["term"] and not self._anew:
            return  # another master has led since
        self._anew = False
        self._store.compare_and_set(self._key, encode(report), None if entry is None else entry.version)


def _term(value: bytes) -> int:
    try:
        return int(json.loads(value)["term"])
    except (ValueError, TypeError, KeyError):
        return 0


# --- What a master takes from the one before it: `last` is that one's report. ---


def check_continued(last: Mapping[str, Any] | None, term: int, journal: str) -> None:
    """Raise SettingsError if the job was led with another journal, which gave a term that is not below `term`."""
    if last is None or not isinstance(last.get("term"), int) or last["term"] < term:
        return
    raise SettingsError(
        f"what is done of job {last.get('job')!r} is in another journal, {last.get('journal')} of host "
        f"{last.get('host')}, not in {journal}: start the master with that one; or pass --new to start the job again"
    )


def check_data(book: ShardBook, datasets: Mapping[str, DatasetSpec]) -> None:
    """Raise ConflictError if `book` has other data under a name, or has cut them otherwise."""
    for name, asked in datasets.items():
        if name not in book.datasets():
            continue
        present, spec = book.describe(name).spec, check_spec(name, asked)
        if not same_data(present, spec):
            raise ConflictError(
                f"data set {name} of this job is another: {_difference(present, spec)}. To go on with it, start the"
                " master as before, or without data (--data); for other data choose another name for the data set"
                " (--name) or for the job, or start again (--new), which forgets what is done"
            )


def _difference(present: DatasetSpec, spec: DatasetSpec) -> str:
    """Say which fields differ; of an index, whose bytes mean nothing to people, only that it does."""
    if present.kind != spec.kind or present.location != spec.location:
        return f"it is {present.kind}:{present.location}, and not {spec.kind}:{spec.location}"
    shown, other = DatasetSpec(), DatasetSpec()
    shown.CopyFrom(present)
    other.CopyFrom(spec)
    shown.index = other.index = b""
    return describe_difference(shown, other) or "its files, or what is in them, have changed since it was created"


def takeover_cause(last: Mapping[str, Any] | None, endpoint: str) -> str:
    """Return why the master at `endpoint` leads a job that was led before."""
    if last is None:
        return "the master before it left no report"
    state = last.get("state")
    if last.get("endpoint") == endpoint:
        return "another master took its journal, or the journal was away"
    before = shown(f"the one at {last.get('endpoint')} on {last.get('host')}", 200)
    if state == "done":
        return f"{before} had ended, with everything done"
    if state == "stopped":
        return f"{before} was stopped, or had lost its journal"
    return f"{before} ended without a word: killed, or cut off from the Store"


def earlier_events(last: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """Return the events in the report; those that cannot be shown are left out."""
    events = last.get("events") if last is not None else None
    return [event for event in events if isinstance(event, dict)] if isinstance(events, list) else []
