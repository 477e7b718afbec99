"""Whether a master may go on with a job, by its journal and its data; and what it takes over from the one before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edl.datasets import same_data
from edl.errors import ConflictError, SettingsError
from edl.master.shards import ShardBook
from edl.master.shards.specification import check_spec, describe_difference
from edl.protocol.master import DatasetSpec
from edl.quoting import shown

__all__ = ["check_continued", "check_data", "earlier_events", "takeover_cause"]


def check_continued(last: dict[str, Any] | None, term: int, journal: str) -> None:
    """Refuse to lead a job with a journal that is not the one that it has been led with.

    Args:
        last: the report in the Store.
        term: that the journal gave; in one journal terms only grow.
        journal: its name.

    Raises:
        SettingsError: another journal has given a larger term.
    """
    if last is None or not isinstance(last.get("term"), int) or last["term"] < term:
        return
    raise SettingsError(
        f"what is done of job {last.get('job')!r} stands in another journal, {last.get('journal')} of host "
        f"{last.get('host')}, not in {journal}: start the master with that one; or say --new, and the job begins anew"
    )


def check_data(book: ShardBook, datasets: Mapping[str, DatasetSpec]) -> None:
    """Refuse to hand out other data under the name of a data set that is there.

    Args:
        book: as the journal has it.
        datasets: that the master was started with, by name; those that are not there yet are not looked at.

    Raises:
        SettingsError: a specification cannot be used.
        ConflictError: data of the same name are others, or cut otherwise; says what differs.
    """
    for name, asked in datasets.items():
        if name not in book.datasets():
            continue
        present, spec = book.describe(name).spec, check_spec(name, asked)
        if not same_data(present, spec):
            raise ConflictError(
                f"data set {name} of this job is another: {_difference(present, spec)}. To go on with it, start the"
                " master as before, or without data (--data); for other data choose another name for the data set"
                " (--name) or for the job, or begin anew (--new), which forgets what is done"
            )


def takeover_cause(last: Mapping[str, Any] | None, endpoint: str) -> str:
    """Return why a master leads a job that was led before.

    Args:
        last: the report in the Store, of the master before.
        endpoint: of the master that leads from now on.
    """
    if last is None:
        return "the master before it has left no report"
    state = last.get("state")
    if last.get("endpoint") == endpoint:
        return "another master took its journal, or the journal was away"
    before = shown(f"the one at {last.get('endpoint')} on {last.get('host')}", 200)
    if state == "done":
        return f"{before} had ended, all being done"
    if state == "stopped":
        return f"{before} was stopped, or had lost its journal"
    return f"{before} has ended without a word: killed, or cut off from the Store"


def earlier_events(last: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """Return the events in a report; those that cannot be shown are left out."""
    events = last.get("events") if last is not None else None
    return [event for event in events if isinstance(event, dict)] if isinstance(events, list) else []


def _difference(present: DatasetSpec, spec: DatasetSpec) -> str:
    """Say which fields differ; of an index, whose bytes say nothing to people, only that it does."""
    if present.kind != spec.kind or present.location != spec.location:
        return f"it is {present.kind}:{present.location}, and not {spec.kind}:{spec.location}"
    shown, other = DatasetSpec(), DatasetSpec()
    shown.CopyFrom(present)
    other.CopyFrom(spec)
    shown.index = other.index = b""
    return describe_difference(shown, other) or "its files, or what is in them, have changed since it was created"
