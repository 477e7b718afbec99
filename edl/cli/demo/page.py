"""The page of the demo's teachers and students, as `edl dashboard` shows it, and how many teachers would do."""

from __future__ import annotations

import contextlib
import sys
import webbrowser
from collections.abc import Iterator

from edl.cli.demo.screen import Screen
from edl.discovery import open_store
from edl.master.scaling.advisor import ScalingAdvisor

__all__ = ["show_page"]


@contextlib.contextmanager
def show_page(discovery: str, screen: Screen) -> Iterator[None]:
    """Serve the page, say where, and have a browser open it if this is a person's terminal.

    Args:
        discovery: URL of the registry and store.
        screen: where to say it.
    """
    from edl.dashboard.server import DashboardServer, DashboardSettings

    with contextlib.ExitStack() as stack:
        store = stack.enter_context(open_store(discovery))
        stack.enter_context(ScalingAdvisor(store))  # it says how many teachers would do, and starts none
        server = stack.enter_context(DashboardServer(DashboardSettings(store=discovery, port=0)))
        screen.step(f"A page shows it all until the demo ends: {server.url}")
        if sys.stdout.isatty() and _is_window():
            webbrowser.open(server.url)
        yield


def _is_window() -> bool:
    """Whether the browser opens a window: one for terminals would take the demo's."""
    try:
        return type(webbrowser.get()) is not webbrowser.GenericBrowser
    except webbrowser.Error:
        return False
