"""Opens a registry or a store by URL. A backend is imported only when a URL names it."""

from __future__ import annotations

import re

from edl.discovery.registry import KeyRegistry, Registry
from edl.discovery.store import Store
from edl.discovery.store_url import CONSUL, ETCD, StoreUrl
from edl.errors import SettingsError
from edl.settings import Credentials


def open_registry(url: str, *, timeout_s: float = 5.0, credentials: Credentials | None = None) -> Registry:
    """Open the registry that `url` names.

    A registry is kept in the store at the URL, and is opened with the same arguments as `open_store`. In Consul,
    services are Consul's own services with a health check, so Consul's UI and DNS show them.

    Args:
        url: Location of the registry.
        timeout_s: Seconds that a request may take before it fails.
        credentials: Credentials for the store, as in `open_store`.

    Returns:
        The registry, which the caller closes.

    Raises:
        SettingsError: The URL cannot be used, or the file is not EDL's.
        DiscoveryError: The file cannot be opened just now.
    """
    found = _parsed(url, timeout_s)
    if found.scheme in CONSUL:
        from edl.discovery.consul import ConsulRegistry
        from edl.discovery.consul_client import ConsulTarget

        return ConsulRegistry(ConsulTarget.of(found, timeout_s))
    return KeyRegistry(_open(found, timeout_s, credentials))


def open_store(url: str, *, timeout_s: float = 5.0, credentials: Credentials | None = None) -> Store:
    """Open the store that `url` names. Opening a store on a server sends no request.

    - `sqlite:///absolute/path`: a file, for all processes on a machine. The file and its folder are created if missing.
    - `edl://host:port`: a store that another process serves (`edl store`, or an agent of `edl run --rdzv-endpoint`).
    - `consul://host:port`: a Consul agent, preferably the local one; `consul+https://` speaks TLS. The token and
      certificates come from Consul's own variables (`CONSUL_HTTP_TOKEN`, `CONSUL_CACERT`, ...), never from the URL,
      which is logged. All keys are in Consul's folder `edl/`.
    - `etcd://host:port,host2:port`: members of an etcd cluster; the first that answers is used. `etcd+https://`
      speaks TLS. User and certificates come from the variables of etcd's own command line (`ETCDCTL_USER`,
      `ETCDCTL_PASSWORD`, `ETCDCTL_CACERT`, ...). All keys are below `edl/store/`.

    Args:
        url: Location of the store.
        timeout_s: Seconds that a request may take before it fails.
        credentials: Credentials for an `edl://` server: a token, and mutual TLS if CA, certificate and key are set.
            None for the credentials in the environment (`EDL_TLS_CA`, ...).

    Returns:
        The store, which the caller closes.

    Raises:
        SettingsError: The URL cannot be used, or the file is not EDL's.
        DiscoveryError: The file cannot be opened just now.
    """
    return _open(_parsed(url, timeout_s), timeout_s, credentials)


def _open(url: StoreUrl, timeout_s: float, credentials: Credentials | None) -> Store:
    if url.scheme == "sqlite":
        from edl.discovery.sqlite import SqliteStore

        return SqliteStore(url.path, timeout_s=timeout_s)
    if url.scheme == "edl":
        from edl.discovery.served.store import ServedStore, ServedTarget

        return ServedStore(ServedTarget.of(url, timeout_s, credentials))
    if url.scheme in ETCD:
        from edl.discovery.etcd import EtcdStore, EtcdTarget

        return EtcdStore(EtcdTarget.of(url, timeout_s))
    from edl.discovery.consul import ConsulStore
    from edl.discovery.consul_client import ConsulTarget

    return ConsulStore(ConsulTarget.of(url, timeout_s))


def _parsed(url: str, timeout_s: float) -> StoreUrl:
    if not 0 < timeout_s < float("inf"):
        raise SettingsError(f"timeout_s={timeout_s!r}: must be a finite number above 0")
    try:
        return StoreUrl.parse(url)
    except ValueError as exc:
        # A user may have put a token into it, so show only the part after an "@" and before the query.
        shown = re.sub(r"//[^/]*@", "//", url.partition("?")[0])
        raise SettingsError(f"discovery URL {shown!r}: {exc}") from exc
