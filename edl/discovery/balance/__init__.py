"""Which teachers a student talks to: `assignment` and `fewest_moves` compute it, students agree on it in a `group`."""

from __future__ import annotations

from edl.discovery.balance.assignment import DEFAULT_FAN_OUT, balance

__all__ = ["DEFAULT_FAN_OUT", "balance"]
