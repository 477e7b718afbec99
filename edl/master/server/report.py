"""A master's report of its job in the Store, and the checks of the report of the master before it.

The leading master writes a report once a second: `edl status`, the dashboard and late workers read it. It stays when
the master has ended, so that the next one knows whether it has the right journal, and can say why it takes over.
"""

from __future__ import annotations

import collections
import json
import logging
from collections.abc import Callable, Mapping
from typing import Any, Final

from edl.background import BackgroundLoop
from edl.backoff import Backoff
from edl.datasets import same_data
from edl.discovery import Store
from edl.discovery.resource import Resource
from edl.errors import ClosedError, ConflictError, DiscoveryError, SettingsError
from edl.master.naming import report_key
from edl.master.shards import ShardBook
from edl.master.shards.specification import check_spec, describe_difference
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
_IDLE_S: Final = 3600.0
"""How long the writer waits unless it is woken: it always is."""
_RETRY_S: Final = (0.5, 5.0)
"""The first and the longest wait before the next attempt to write to a Store that is away."""
_CLOSE_S: Final = 2.0
"""How long `close` waits for the last report to reach the Store."""


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
    shorter: tuple[Callable[[dict[str, Any]], None], ...] = (
        lambda dataset: dataset.update(holders=dataset["holders"][:_HOLDERS]),
        lambda dataset: dataset.update(holders=dataset["holders"][:20], poisoned=dataset["poisoned"][:10]),
        lambda dataset: dataset.update(holders=[], poisoned=[]),
    )
    for shorten in shorter:
        for dataset in report["datasets"]:
            shorten(dataset)
        data = json.dumps(report, allow_nan=False).encode()
        if len(data) <= _NBYTES:
            return data
    return json.dumps({**report, "datasets": report["datasets"][:100], "events": []}, allow_nan=False).encode()


class ReportWriter(Resource):
    """Writes the newest report of a job into the Store; older ones are skipped. A Store that is away is waited for.

    With `anew` it overwrites a report of a later term, which came from another journal.
    """

    def __init__(self, store: Store, job: str, *, anew: bool = False) -> None:
        super().__init__()
        self._store = store
        self._anew = anew
        self._key = report_key(job)
        self._newest: dict[str, Any] | None = None
        self._ending = False
        self._away = False
        self._backoff = Backoff(*_RETRY_S, jitter=0.5)
        self._thread = BackgroundLoop("edl-master-report", self._write)

    def write(self, report: dict[str, Any]) -> None:
        """Have a report written soon. Waits for nothing."""
        self._newest = report
        self._thread.wake()

    def _halt(self) -> None:
        self._ending = True
        self._thread.wake()
        self._thread.wait_ended(_CLOSE_S)
        self._thread.close(_CLOSE_S)

    def _write(self) -> float | None:
        report, self._newest = self._newest, None
        if report is not None:
            try:
                self._put(report)
            except ClosedError:
                return None
            except DiscoveryError as exc:
                if not self._away:
                    logger.warning("cannot write this master's report to the store; the job goes on: %s", exc)
                self._away = True
                if self._ending:
                    return None
                if self._newest is None:
                    self._newest = report
                return self._backoff.next_wait_s()
            self._away = False
            self._backoff.reset()
        if self._newest is not None:
            return 0.0
        return None if self._ending else _IDLE_S

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
    """Refuse to lead a job with a journal other than the one that it has been led with.

    Raises:
        SettingsError: Another journal has given a term that is not below `term`; in one journal terms only grow.
    """
    if last is None or not isinstance(last.get("term"), int) or last["term"] < term:
        return
    raise SettingsError(
        f"what is done of job {last.get('job')!r} stands in another journal, {last.get('journal')} of host "
        f"{last.get('host')}, not in {journal}: start the master with that one; or pass --new to start the job again"
    )


def check_data(book: ShardBook, datasets: Mapping[str, DatasetSpec]) -> None:
    """Refuse to hand out other data under the name of a data set that `book` has.

    Raises:
        SettingsError: A specification is invalid.
        ConflictError: Data of the same name are others, or are cut otherwise; says what differs.
    """
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
