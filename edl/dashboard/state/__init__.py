"""The state at a moment: jobs, services and events, read from a Store and a Registry.

`schema` has the state as documented dataclasses, and `StateReader` makes it. Every record is checked before it is
shown: an unreadable one is listed, and takes nothing else off the page. Nothing here writes to the Store.
"""

from edl.dashboard.state.reader import StateReader
from edl.dashboard.state.schema import DashboardState, as_json

__all__ = ["DashboardState", "StateReader", "as_json"]
