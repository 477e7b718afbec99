"""Opens the store of a job whose nodes meet at HOST:PORT. The agent on HOST serves it; other agents wait for it."""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from collections.abc import Iterator
from typing import Final

from edl.collective.agent.command_line.endpoint import RendezvousEndpoint
from edl.discovery import Store, open_store
from edl.discovery.served.addresses import diagnose
from edl.discovery.served.host import KEPT, StoreHost
from edl.discovery.served.store import ServedStore, StoreRefusalError, store_credentials
from edl.errors import DiscoveryError, SettingsError
from edl.protocol.tls import CredentialFiles
from edl.settings import Credentials

logger = logging.getLogger(__name__)

_POLL_S: Final = 0.1  # until the store answers: a node that waits for it joins up to this much later
_SILENT_S: Final = 2.0  # nodes that are started together answer within it, which needs no message
_PATIENCE_S: Final = 60.0  # for a node that could not store the last state: enough to type its command again


@contextlib.contextmanager
def served_store(
    endpoint: RendezvousEndpoint, credentials: Credentials, *, timeout_s: float, join_timeout_s: float
) -> Iterator[ServedStore]:
    """Open the store at an endpoint. On that host, this process serves the store until the other nodes have ended.

    Raises:
        SettingsError: Another program answers at the endpoint, TLS or tokens do not match, or this host cannot serve
            the store.
        DiscoveryError: Nothing answers in time.
    """
    with contextlib.ExitStack() as stack:
        rendezvous = _Serving(endpoint, store_credentials(credentials))
        stack.callback(rendezvous.close)
        rendezvous.serve_if_own()
        store = open_store(endpoint.url, timeout_s=timeout_s, credentials=credentials)
        assert isinstance(store, ServedStore)
        with store:
            _wait_for(store, rendezvous, join_timeout_s)
            yield store
        rendezvous.leave()


def keep_for_later(store: Store, job: str, wanted: bool) -> None:
    """Record whether this host has a state of the job that is not in storage; if it has, the store's file is kept."""
    key = f"{KEPT}{job}/{socket.gethostname()}"
    with contextlib.suppress(DiscoveryError):
        if wanted:
            store.put(key, b"")
        else:
            store.delete(key)


class _Serving:
    """Serves the store from this process if the endpoint is on this host."""

    def __init__(self, endpoint: RendezvousEndpoint, credentials: Credentials) -> None:
        self._endpoint = endpoint
        self._credentials = credentials
        self.host: StoreHost | None = None
        self.excluded = False

    def serve_if_own(self) -> None:
        """Serve, or prepare to serve, if the endpoint now resolves to this host. It may not have resolved before."""
        if self.host is None and not self.excluded and self._endpoint.own:
            files = CredentialFiles(self._credentials, serving=True) if self._credentials else None
            self.host = StoreHost(self._endpoint.listen, files, self._tell)

    def exclude(self) -> None:
        """Stop serving for good, because the endpoint leads to another host."""
        self.excluded = True
        self.close()

    def leave(self) -> None:
        if self.host is not None:
            self.host.leave(logger.info, _PATIENCE_S)

    def close(self) -> None:
        host, self.host = self.host, None
        if host is not None:
            host.close()

    def _tell(self) -> None:
        port = self._endpoint.port
        logger.info(
            "this node serves the job's store at port %d: the job ends with this host", port, extra={"port": port}
        )
        if not self._credentials and not self._endpoint.local:
            logger.warning(
                "the store listens on all addresses without TLS or tokens: anyone who reaches it can change the job "
                "(EDL_TLS_CA, EDL_TLS_CERT, EDL_TLS_KEY: docs/security.md)"
            )


def _wait_for(store: ServedStore, serving: _Serving, join_timeout_s: float) -> None:
    began = time.monotonic()
    logged = ""
    endpoint = store.client.target.endpoint
    while True:
        try:
            answer = store.client.hello()
        except DiscoveryError as exc:
            words = _explain(store, exc)
        else:
            own = serving.host.server if serving.host is not None else ""
            if own and answer.server != own:
                logger.info("%s leads to %s, which serves the store: this node serves none", endpoint, answer.hostname)
                serving.exclude()
            return
        waited_s = time.monotonic() - began
        if waited_s > join_timeout_s:
            raise DiscoveryError(
                f"no store at {endpoint} within {join_timeout_s:g} s (--rdzv-conf join_timeout=SECONDS waits longer): "
                f"{words}"
            )
        if words != logged and waited_s > _SILENT_S:
            logged = words
            logger.info("waiting for the store at %s, which an agent on that host serves: %s", endpoint, words)
        time.sleep(_POLL_S)
        serving.serve_if_own()


def _explain(store: ServedStore, exc: DiscoveryError) -> str:
    """Return why the store does not answer, as text.

    Raises:
        SettingsError: Waiting longer would not help.
    """
    target = store.client.target
    found = diagnose(target.host, target.port)
    if found.connected and (found.words or target.credentials.ca):
        words = store.client.explain_tls()
        if words:
            raise SettingsError(f"the job's store: {words}; either all nodes of a job use TLS or none") from exc
    if found.final:
        raise SettingsError(f"{target.endpoint}: {found.words}") from exc
    if isinstance(exc, StoreRefusalError):
        raise SettingsError(str(exc)) from exc
    return found.words or str(exc)
