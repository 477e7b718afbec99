"""What a job's masters and clients share: names, keys in the Store and their contents, sizes, error codes."""

from __future__ import annotations

import json
from typing import Any, Final

from edl.discovery import Store
from edl.errors import ConflictError, EDLError, LeaseLostError, ProtocolError, SettingsError

SERVICE: Final = "edl.master.v1.Master"
FORMAT: Final = 1
"""Version of the protocol; a client with a different version gets an error instead of misreading replies."""
MESSAGE_NBYTES: Final = 64 << 20  # the index of a data set with a million file names takes about 15 MB


class NotFoundError(SettingsError):
    """The master has no such data set."""


REFUSALS: Final[dict[str, type[EDLError]]] = {
    "NOT_FOUND": NotFoundError,
    "INVALID_ARGUMENT": SettingsError,
    "ALREADY_EXISTS": ConflictError,
    "FAILED_PRECONDITION": LeaseLostError,
    "DATA_LOSS": ProtocolError,
}
"""gRPC status codes in a master's replies, and EDL's errors for them. After any other code, the call should be
retried."""


def candidacy(job: str) -> str:
    """Return the name of the election among a job's masters (`Store.elect`)."""
    return f"masters/{job}"


def election_key(job: str) -> str:
    """Return the key that holds the leading master's address while it leads."""
    return f"elections/{candidacy(job)}"


def report_key(job: str) -> str:
    """Return the key of the leading master's report. It remains after the master has ended."""
    return f"master_reports/{job}"


def read_report(store: Store, job: str) -> dict[str, Any] | None:
    """Return the last report of a job's master; None if unreadable. DiscoveryError if the Store is unreachable."""
    entry = store.get(report_key(job))
    try:
        found = None if entry is None else json.loads(entry.value)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None
