"""What a job's masters and their clients agree on: names, keys in the Store and what stands there, sizes, refusals."""

from __future__ import annotations

import json
from typing import Any, Final

from edl.discovery import Store
from edl.errors import ConflictError, EDLError, LeaseLostError, ProtocolError, SettingsError

SERVICE: Final = "edl.master.v1.Master"
FORMAT: Final = 1
"""Of the protocol; a client of another version is told so, where it would misread answers otherwise."""
MESSAGE_NBYTES: Final = 64 << 20
"""Largest message: the index of a data set of a million file names has some 15 MB."""


class NotFoundError(SettingsError):
    """The master has no such data set."""


REFUSALS: Final[dict[str, type[EDLError]]] = {
    "NOT_FOUND": NotFoundError,
    "INVALID_ARGUMENT": SettingsError,
    "ALREADY_EXISTS": ConflictError,
    "FAILED_PRECONDITION": LeaseLostError,
    "DATA_LOSS": ProtocolError,
}
"""gRPC's status codes that a master answers with, and the errors that they are in EDL. Others mean: ask again."""


def candidacy(job: str) -> str:
    """Return the name that a job's masters compete for (`Store.elect`)."""
    return f"masters/{job}"


def election_key(job: str) -> str:
    """Return the key at which the leading master's address is found while it leads."""
    return f"elections/{candidacy(job)}"


def report_key(job: str) -> str:
    """Return the key of what the leading master reports. It stays when the master has ended."""
    return f"master_reports/{job}"


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
