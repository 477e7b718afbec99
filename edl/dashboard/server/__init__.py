"""The server of the page: files, `/api/state`, `/api/events`, `/metrics` and `/healthz`, in threads of its own.

Imports aiohttp (the extra `dashboard`): import this package where a page is asked for, and nowhere else.

What does not belong here: what is to be seen (`edl.dashboard.state`), and how it looks (`edl/dashboard/static`).
"""

from edl.dashboard.server.server import DashboardServer
from edl.dashboard.server.settings import DashboardSettings

__all__ = ["DashboardServer", "DashboardSettings"]
