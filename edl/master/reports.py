"""Reads what a job's leading master reports in the Store."""

from __future__ import annotations

import json
from typing import Any

from edl.discovery import Store
from edl.master.naming import report_key

__all__ = ["read_report"]


def read_report(store: Store, job: str) -> dict[str, Any] | None:
    """Return the last report of a job's master; None where there is none, or none that can be read.

    Raises:
        DiscoveryError: the Store cannot be reached.
    """
    entry = store.get(report_key(job))
    try:
        found = None if entry is None else json.loads(entry.value)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None
