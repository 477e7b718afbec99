"""A proxy that runs, from `start` until `close`."""

from __future__ import annotations

import logging
import time
from typing import Final

from edl.http_server.access import HostCheck, TokenCheck
from edl.http_server.server import AppServer
from edl.protocol.tls import CredentialFiles
from edl.proxy.app import ScoringApi, make_app
from edl.proxy.scorers import ScorerPool
from edl.proxy.settings import ProxySettings

logger = logging.getLogger(__name__)

_MOST_CONNECTIONS: Final = 2048  # TRL's asynchronous trainer has 128 requests in flight per process
_POLL_S: Final = 0.05  # while waiting for a closing proxy's last answer


class ProxyServer(AppServer):
    """Answers requests for prompt log-probabilities like vLLM, using the teachers of services.

    If no teacher is live, requests wait for one, and are refused after `teacher_timeout_s`.

    Args:
        settings: The proxy's address, its teachers and its limits.

    Raises:
        SettingsError: the address cannot be listened on, or a setting cannot be used.
    """

    def __init__(self, settings: ProxySettings) -> None:
        credentials = CredentialFiles.of(settings.credentials, serving=True)
        super().__init__("edl-proxy", settings.host, settings.port, credentials, _MOST_CONNECTIONS)
        self._settings = settings
        self._scorers = ScorerPool(settings)
        self._api: ScoringApi | None = None
        try:
            self.start()
        except BaseException:
            self._scorers.close()
            raise
        if not settings.local and not settings.credentials.token_file:
            logger.warning(
                "the proxy listens on %s without a token: anyone who reaches this port can ask your teachers; set "
                "--token-file",
                settings.host,
            )

    async def serve(self) -> None:
        """See `AppServer.serve`."""
        settings = self._settings
        self._api = ScoringApi(settings, self._scorers)
        tokens = None
        if self._credentials is not None and self._credentials.settings.token_file:
            tokens = TokenCheck(self._credentials)
        hosts = HostCheck(True, settings.allowed_hosts) if settings.local and tokens is None else None
        await self.run_app(make_app(self._api, hosts, tokens), answers_late=True)

    def drain(self, timeout_s: float) -> bool:
        """Refuse new requests, and wait for pending answers; return whether all were sent in time."""
        api = self._api
        assert api is not None
        api.draining = True
        deadline = time.monotonic() + timeout_s
        while api.open_requests:
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        return True

    def close(self) -> None:
        """Close all connections, including those to teachers. May be called twice."""
        super().close()
        self._scorers.close()
