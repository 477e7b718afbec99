"""Records that masters and the advisor wrote, checked: each field is of its type and bounded, or None.

What does not belong here: deciding any of it (`edl.master`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, Final

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
from edl.errors import ProtocolError

_MAX_TEXT: Final = 500
"""Characters of a text: a reason in a sentence or two fits; a page of a stranger's text does not."""
_MAX_WHOLE: Final = 2**53
"""Beyond it JavaScript's numbers skip some."""
_MAX_ITEMS: Final = 1000
"""Of a list, such as the students of a teacher: a page with more of them helps no reader."""


def decode_object(data: bytes) -> Mapping[str, Any]:
    """Read a JSON object.

    Raises:
        ProtocolError: the bytes are something else.
    """
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as exc:
        raise ProtocolError(f"not JSON: {exc}") from exc
    if not isinstance(found, dict):
        raise ProtocolError(f"a JSON object is expected, not {type(found).__name__}")
    return found


def text(value: Any, limit: int = _MAX_TEXT) -> str:
    """Return text, clipped; empty for anything else."""
    if not isinstance(value, str):
        return ""
    return value[:limit].encode(errors="replace").decode()  # half a surrogate pair is no text that can be sent


def number(value: Any) -> float | None:
    """Return a finite number as a float; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        found = float(value)
    except OverflowError:  # an int of hundreds of digits
        return None
    return found if math.isfinite(found) else None


def whole(value: Any) -> int | None:
    """Return a whole number from 0 that JavaScript can hold; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _MAX_WHOLE:
        return None
    return value


def rows(value: Any, limit: int = _MAX_ITEMS) -> list[Mapping[str, Any]]:
    """Return the objects in a list, the first ones; an empty list for anything else."""
    if not isinstance(value, list):
        return []
    return [item for item in value[:limit] if isinstance(item, dict)]


def texts(value: Any, limit: int = _MAX_ITEMS) -> tuple[str, ...]:
    """Return the texts in a list, the first ones; nothing for anything else."""
    if not isinstance(value, list):
        return ()
    return tuple(text(item) for item in value[:limit] if isinstance(item, str))


SHARD_STATES: Final = ("todo", "doing", "done", "poisoned")
"""Of a shard, in the order of its life."""
SILENT_S: Final = 30.0
"""A master that leads writes a report about once a second; after so long without any it is gone, or the Store was."""
_DECISIONS: Final = frozenset({"poisoned", "retried", "takeover"})
"""Kinds of a master's events that the master decided."""


def decode_master(data: bytes, job: str, now_s: float) -> MasterStatus:
    """Read a master's report.

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
        events=tuple(_master_event(row, job) for row in rows(fields.get("events"))),
    )


def decode_wanted(fields: Mapping[str, Any]) -> WantedCount:
    """Check a record of how many there should be."""
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


def _master_event(row: Mapping[str, Any], job: str) -> EventRow:
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
