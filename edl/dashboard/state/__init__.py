"""The current state: jobs, services and events, read from a Store and a Registry.

`schema` defines the state as documented dataclasses, and `StateReader` reads it. Every record is checked before it is
shown. An unreadable record is listed as such, and does not hide any other record. Nothing here writes to the Store.
"""

from edl.dashboard.state.reader import StateReader
from edl.dashboard.state.schema import DashboardState, as_json

__all__ = ["DashboardState", "StateReader", "as_json"]
