"""What implementations of `Registry` and `Store` have in common: threads, leases, watches, election.

An implementation is a `Claim` (how to write, renew and withdraw), a query that a watch repeats, and checked arguments;
everything else is here. What does not belong here: anything that knows a server or file format.
"""

from __future__ import annotations

__all__: list[str] = []
