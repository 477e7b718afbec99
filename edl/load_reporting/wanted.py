"""Numbers of wanted teachers and workers, written by advisors: `wanted/teachers/SERVICE`, `wanted/workers/JOB`.

Advisors run in masters and operators. A key has no lease: while no advisor is running, the last value is still the best
estimate. A running advisor updates `time`, the time of the last write, at least every ten seconds.
"""

from __future__ import annotations

import json
import logging
from typing import Any, Literal

from edl.discovery import Store
from edl.quoting import shown

logger = logging.getLogger(__name__)

WantedKind = Literal["teachers", "workers"]

WANTED_VERSION = 1


def wanted_key(kind: WantedKind, name: str) -> str:
    """Return the key for the wanted teachers of the service `name`, or the wanted workers of the job `name`."""
    return f"wanted/{kind}/{name}"


def read_wanted(store: Store, kind: WantedKind, name: str) -> dict[str, Any] | None:
    """Read how many teachers or workers are wanted.

    Args:
        store: Store where advisors write these numbers.
        kind: "teachers" of a service, or "workers" of a job.
        name: Name of the service or job.

    Returns:
        A dictionary with these fields, among others: `count` (how many are wanted), `now` (how many there were),
        `reason`, `since` (time of the last change, Unix time), `time` (time of the last write, Unix time) and
        `decisions` (the last changes: `time`, `from`, `count`, `reason`; oldest first). None if there is no usable
        record.

    Raises:
        DiscoveryError: the store cannot be reached.
    """
    entry = store.get(wanted_key(kind, name))
    return None if entry is None else parse_wanted(entry.key, entry.value)


def read_all_wanted(store: Store) -> dict[tuple[str, str], dict[str, Any]]:
    """Read all wanted numbers.

    Args:
        store: Store where advisors write them.

    Returns:
        What `read_wanted` returns, by kind and name.

    Raises:
        DiscoveryError: the store cannot be reached.
    """
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for entry in store.list("wanted/"):
        kind, _, name = entry.key.removeprefix("wanted/").partition("/")
        fields = parse_wanted(entry.key, entry.value)
        if fields is not None and kind in ("teachers", "workers") and name:
            found[kind, name] = fields
    return found


def parse_wanted(key: str, value: bytes) -> dict[str, Any] | None:
    """Return the fields of a record; None if the record is unusable (its key is then logged at level DEBUG)."""
    try:
        fields = json.loads(value)
    except (ValueError, RecursionError):
        fields = None
    usable = (
        _is_record(fields, "count", "now", "since", "time")
        and fields.get("v") == WANTED_VERSION
        and isinstance(fields.get("decisions"), list)
        and all(_is_record(decision, "time", "from", "count") for decision in fields["decisions"])
    )
    if not usable:
        logger.debug("%s is skipped: not a record of a wanted number", shown(key))
        return None
    return dict(fields)


def _is_record(value: Any, *numbers: str) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("reason"), str)
        and all(_is_number(value.get(name)) for name in numbers)
    )


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= 1e18
