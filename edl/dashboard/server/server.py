"""Serves the page from threads of its own, until it is closed.

What does not belong here: what is answered (`app`), and listening (`edl.http_server`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import Final

from prometheus_client import CollectorRegistry

from edl.background import start_call
from edl.dashboard.metrics import DashboardMetrics, ServerFigures
from edl.dashboard.server.access import TokenCookieCheck
from edl.dashboard.server.app import Pages, make_app
from edl.dashboard.server.event_stream import HEARTBEAT_S, EventStreams
from edl.dashboard.server.look_loop import LookLoop
from edl.dashboard.server.settings import DashboardSettings
from edl.dashboard.server.static_files import read_static_files
from edl.dashboard.state import StateReader
from edl.dashboard.state.cluster.view import ClusterView
from edl.errors import SettingsError
from edl.http_server.access import HostCheck
from edl.http_server.server import STOP_S, AppServer
from edl.protocol.tls.credentials import CredentialFiles

__all__ = ["DashboardServer"]

logger = logging.getLogger(__name__)

_MOST_CONNECTIONS: Final = 400
"""Twice as many as there may be clients of the stream of events."""


class DashboardServer(AppServer):
    """Serves the page of a Store.

    A Store that is away is no error: the page says so, and shows what was known last.

    Args:
        settings: where, and to whom.
        registries: whose metrics `/metrics` shows too.
        heartbeat_s: between two heartbeats of the stream of events.
        write_s: in which a client of it must take an event.

    Raises:
        SettingsError: the address cannot be listened on, or a file of the credentials cannot be used.
    """

    def __init__(
        self,
        settings: DashboardSettings,
        registries: Iterable[CollectorRegistry] = (),
        *,
        heartbeat_s: float = HEARTBEAT_S,
        write_s: float = 30.0,
    ) -> None:
        credentials = CredentialFiles.of(settings.credentials, serving=True)
        super().__init__("edl-dashboard", settings.host, settings.port, credentials, _MOST_CONNECTIONS)
        self._settings = settings
        self._registries = tuple(registries)
        self._streams_s = (heartbeat_s, write_s)
        self._reader = StateReader(
            settings.store,
            registry_url=settings.registry,
            job=settings.job,
            credentials=settings.store_credentials,
            cluster=ClusterView(settings.kube, settings.kube_namespaces) if settings.kube is not None else None,
        )
        try:
            self._reader.open()
        except SettingsError:
            self._reader.close()
            raise
        self.start()
        if not settings.local and not settings.credentials.token_file:
            logger.warning(
                "the page listens on %s without a token: who reaches this port sees the jobs' names, hosts and "
                "errors; set --token-file (docs/dashboard.md)",
                settings.host,
            )

    async def serve(self) -> None:
        """See `AppServer.serve`."""
        settings = self._settings
        looks = LookLoop(self._reader, self._loop)
        heartbeat_s, write_s = self._streams_s
        streams = EventStreams(looks, heartbeat_s=heartbeat_s, write_s=write_s)
        metrics = DashboardMetrics(
            lambda: looks.latest.state if looks.latest is not None else None,
            lambda: ServerFigures(self._reader.looks, looks.look_s, streams.clients),
            self._registries,
        )
        try:
            tokens = None
            if self._credentials is not None and self._credentials.settings.token_file:
                tokens = TokenCookieCheck(self._credentials, settings.port)
            hosts = HostCheck(settings.local, settings.allowed_hosts)
            pages = Pages(looks, metrics, read_static_files(), tokens, self._tls)
            await self.run_app(make_app(pages, streams, hosts, tokens), looks.end)
        finally:
            await asyncio.wrap_future(start_call("edl-dashboard-close", lambda: looks.close(STOP_S)))
