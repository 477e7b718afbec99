"""What masters and the advisor wrote: reports of shards, and how many teachers and workers there should be.

What does not belong here: deciding any of it (`edl.master`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from edl.dashboard.state.checks import decode_object, number, rows, text, whole
from edl.dashboard.state.schema import (
    DatasetStatus,
    EventRow,
    MasterStatus,
    PoisonedShard,
    ShardFailure,
    ShardHolder,
    WantedCount,
    WantedDecision,
)

__all__ = ["SHARD_STATES", "decode_master", "decode_wanted"]

SHARD_STATES: Final = ("todo", "doing", "done", "poisoned")
"""Of a shard, in the order of its life."""
SILENT_S: Final = 30.0
"""A master that leads writes a report about once a second; after so long without any it is gone, or the Store was."""
_DECISIONS: Final = frozenset({"poisoned", "retried", "takeover"})
"""Kinds of a master's events that the master decided."""


def decode_master(data: bytes, job: str, now_s: float) -> MasterStatus:
    """Read a master's report.

    Args:
        data: JSON.
        job: whose master.
        now_s: wall clock.

    Raises:
        ProtocolError: the bytes are no JSON object. Fields that are wrong are left out, or None.
    """
    fields = decode_object(data)
    written = number(fields.get("time"))
    age_s = max(0.0, now_s - written) if written is not None else None
    state = text(fields.get("state"))
    if state == "leading" and (age_s is None or age_s > SILENT_S):
        state = "silent"
    by_name = {dataset.name: dataset for dataset in map(_dataset, rows(fields.get("datasets")))}
    datasets = sorted(
        by_name.values(),
        key=lambda dataset: (not dataset.shards["poisoned"], dataset.name),
    )
    return MasterStatus(
        job=job,
        state=state,
        endpoint=text(fields.get("endpoint")),
        term=whole(fields.get("term")),
        journal=text(fields.get("journal")),
        commands=whole(fields.get("commands")),
        time=written,
        age_s=age_s,
        datasets=tuple(datasets),
        events=tuple(_event(row, job) for row in rows(fields.get("events"))),
    )


def decode_wanted(fields: Mapping[str, Any]) -> WantedCount:
    """Check a record of how many there should be.

    Args:
        fields: of the record; what is wrong is None.
    """
    return WantedCount(
        count=whole(fields.get("count")),
        now=whole(fields.get("now")),
        reason=text(fields.get("reason")),
        since=number(fields.get("since")),
        time=number(fields.get("time")),
        decisions=tuple(
            WantedDecision(number(row.get("time")), whole(row.get("count")), text(row.get("reason")))
            for row in rows(fields.get("decisions"))
        ),
    )


def _dataset(row: Mapping[str, Any]) -> DatasetStatus:
    counts = row.get("shards")
    shards = {state: whole(counts.get(state)) or 0 if isinstance(counts, dict) else 0 for state in SHARD_STATES}
    return DatasetStatus(
        name=text(row.get("name")),
        kind=text(row.get("kind")),
        epoch=whole(row.get("epoch")),
        epochs=whole(row.get("epochs")),
        units=whole(row.get("units")),
        shards=shards,
        finished=row.get("finished") is True,
        ended=row.get("ended") is not False,
        units_done=number(row.get("units_done")),
        units_per_s=number(row.get("units_per_s")),
        eta_s=number(row.get("eta_s")),
        poisoned=tuple(_poisoned(shard) for shard in rows(row.get("poisoned"))),
        holders=tuple(_holder(holder) for holder in rows(row.get("holders"))),
    )


def _poisoned(row: Mapping[str, Any]) -> PoisonedShard:
    return PoisonedShard(
        shard=whole(row.get("shard")),
        epoch=whole(row.get("epoch")),
        start=whole(row.get("start")),
        stop=whole(row.get("stop")),
        failures=tuple(
            ShardFailure(text(failure.get("holder")), text(failure.get("reason")), number(failure.get("time")))
            for failure in rows(row.get("failures"))
        ),
    )


def _holder(row: Mapping[str, Any]) -> ShardHolder:
    return ShardHolder(
        holder=text(row.get("holder")),
        leases=whole(row.get("leases")),
        units_done=whole(row.get("units_done")),
        units_per_s=number(row.get("units_per_s")),
        seen_s=number(row.get("seen_s")),
    )


def _event(row: Mapping[str, Any], job: str) -> EventRow:
    kind = text(row.get("kind"))
    return EventRow(
        time=number(row.get("time")) or 0.0,
        kind=kind,
        text=text(row.get("text")),
        cause=text(row.get("cause")),
        job=job,
        node=text(row.get("node")) or None,
        decision=kind in _DECISIONS,
    )
