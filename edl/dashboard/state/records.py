"""Reads records from masters and the advisor: each field has the right type and is bounded, or is None."""

from __future__ import annotations

import functools
import json
import math
import typing
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

from edl.dashboard.state.schema import DatasetStatus, EventRow, MasterStatus
from edl.errors import ProtocolError

D = TypeVar("D")

_MAX_TEXT: Final = 500
"""Maximum length of a string: a reason of one or two sentences fits; a page of foreign text does not."""
_MAX_WHOLE: Final = 2**53
"""JavaScript cannot represent all whole numbers beyond this."""
_MAX_ITEMS: Final = 1000
"""Maximum length of a list, such as the students of a teacher."""


def text(value: Any, limit: int = _MAX_TEXT) -> str:
    """Return a string, clipped; an empty string for anything else."""
    if not isinstance(value, str):
        return ""
    return value[:limit].encode(errors="replace").decode()  # half a surrogate pair cannot be encoded


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
    """Return a whole number of at least 0 that JavaScript can represent; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _MAX_WHOLE:
        return None
    return value


def rows(value: Any, limit: int = _MAX_ITEMS) -> list[Mapping[str, Any]]:
    """Return the objects among the first items of a list; an empty list for anything else."""
    if not isinstance(value, list):
        return []
    return [item for item in value[:limit] if isinstance(item, dict)]


_hints: Final[Callable[[Any], Mapping[str, Any]]] = functools.cache(typing.get_type_hints)


def read_fields(kind: type[D], row: Mapping[str, Any], **given: Any) -> D:
    """Read a dataclass from a JSON object: each field by name and checked by type, except those given.

    A field's type may be str, bool, float, int (at least 0), one of these or None, or a tuple of such dataclasses.
    """
    values: dict[str, Any] = {}
    for name, hint in _hints(kind).items():
        if name in given:
            values[name] = given[name]
        elif hint in _READERS:
            values[name] = _READERS[hint](row.get(name))
        else:
            (part, _) = typing.get_args(hint)
            values[name] = tuple(read_fields(part, item) for item in rows(row.get(name)))
    return kind(**values)


_READERS: Final[Mapping[Any, Callable[[Any], Any]]] = {
    str: text,
    str | None: lambda value: text(value) or None,
    bool: lambda value: value is True,
    float: lambda value: number(value) or 0.0,
    float | None: number,
    int | None: whole,
}

SHARD_STATES: Final = ("todo", "doing", "done", "poisoned")
"""The states of a shard, in order."""
SILENT_S: Final = 30.0
"""A leading master reports about once a second; after this long without a report, the master or the Store was down."""
_DECISIONS: Final = frozenset({"poisoned", "retried", "takeover"})
"""Kinds of events that are decisions of the master."""


def decode_master(data: bytes, job: str, now_s: float) -> MasterStatus:
    """Read a master's report; ProtocolError if it is not a JSON object. Invalid fields are left out, or None."""
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError) as exc:
        raise ProtocolError(f"not JSON: {exc}") from exc
    if not isinstance(fields, dict):
        raise ProtocolError(f"expected a JSON object, not {type(fields).__name__}")
    written = number(fields.get("time"))
    age_s = max(0.0, now_s - written) if written is not None else None
    state = text(fields.get("state"))
    if state == "leading" and (age_s is None or age_s > SILENT_S):
        state = "silent"
    by_name = {dataset.name: dataset for dataset in map(_dataset, rows(fields.get("datasets")))}
    datasets = sorted(by_name.values(), key=lambda dataset: (not dataset.shards["poisoned"], dataset.name))
    events = (_master_event(row, job) for row in rows(fields.get("events")))
    return read_fields(
        MasterStatus, fields, job=job, state=state, age_s=age_s, datasets=tuple(datasets), events=tuple(events)
    )


def _dataset(row: Mapping[str, Any]) -> DatasetStatus:
    counts = row.get("shards")
    shards = {state: whole(counts.get(state)) or 0 if isinstance(counts, dict) else 0 for state in SHARD_STATES}
    return read_fields(DatasetStatus, row, shards=shards, ended=row.get("ended") is not False)


def _master_event(row: Mapping[str, Any], job: str) -> EventRow:
    return read_fields(EventRow, row, job=job, service=None, decision=text(row.get("kind")) in _DECISIONS)
