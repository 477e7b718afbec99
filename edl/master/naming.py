"""Names that a job's masters and their clients agree on: of the service, and of keys in the Store."""

from __future__ import annotations

from typing import Final

__all__ = ["FORMAT", "SERVICE", "candidacy", "election_key", "report_key"]

SERVICE: Final = "edl.master.v1.Master"
FORMAT: Final = 1
"""Of the protocol; a client of another version is told so, where it would misread answers otherwise."""


def candidacy(job: str) -> str:
    """Return the name that a job's masters compete for (`Store.elect`)."""
    return f"masters/{job}"


def election_key(job: str) -> str:
    """Return the key at which the leading master's address is found while it leads."""
    return f"elections/{candidacy(job)}"


def report_key(job: str) -> str:
    """Return the key of what the leading master reports. It stays when the master has ended."""
    return f"master_reports/{job}"
