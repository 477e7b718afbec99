"""Which teachers a student talks to: computed by `assignment`, agreed on by students in a `group`.

`assignment`, `fair_loads`, `fewest_moves` and `rules` are pure; `group` and `member` read and write the store.
What does not belong here: connections to teachers.
"""

from __future__ import annotations

from edl.discovery.balance.assignment import DEFAULT_FAN_OUT, balance

__all__ = ["DEFAULT_FAN_OUT", "balance"]
