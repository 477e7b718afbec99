"""What there is to see at a moment: jobs, services and events, read from a Store and a Registry.

`schema` is the state as documented dataclasses, and `StateReader` makes it. What others wrote is checked before it is
shown: a record that is garbage is listed, and takes nothing else off the page.

What does not belong here: HTTP, and anything that writes to the Store.
"""

from edl.dashboard.state.reader import StateReader
from edl.dashboard.state.schema import DashboardState, as_json

__all__ = ["DashboardState", "StateReader", "as_json"]
