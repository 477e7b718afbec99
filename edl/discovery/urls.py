"""Opens a registry or a store by URL. A backend is imported only when a URL names it.

A new backend needs its scheme in `_SCHEMES` and `_ACCEPTED`, its port in `_PORTS`, and a branch in `_open`.
"""

from __future__ import annotations

import ipaddress
import re
from typing import Final
from urllib.parse import SplitResult, parse_qsl, unquote, urlencode, urlsplit

from edl.discovery.registry import KeyRegistry, Registry
from edl.discovery.store import Store
from edl.errors import SettingsError
from edl.settings import Credentials

_ACCEPTED: Final = (
    "expected sqlite:///absolute/path/to/file, edl://host:29400, consul://host:8500 and"
    " etcd://host:2379,host2:2379 (consul+https:// and etcd+https:// for TLS)"
)
KUBERNETES_GONE: Final = (
    "kubernetes:// is no longer supported: run a store in the cluster (with the chart or `edl store`), and name it as"
    " edl://NAME.NAMESPACE:29400, such as edl://edl-store.edl:29400"
)
_CONSUL: Final = ("consul", "consul+https")
_ETCD: Final = ("etcd", "etcd+https")
_SCHEMES: Final = ("sqlite", *_CONSUL, *_ETCD, "edl")
_PORTS: Final = {"consul": 8500, "consul+https": 8501, "etcd": 2379, "etcd+https": 2379, "edl": 29400}
"""Default ports. The clients know them too, but importing those here would import their libraries."""


def open_registry(url: str, *, timeout_s: float = 5.0, credentials: Credentials | None = None) -> Registry:
    """Open the registry that `url` names.

    A registry is kept in the store at the URL, and takes the same arguments as `open_store`. In Consul, services
    are Consul's own, with a health check, so its UI and its DNS show them; `?dc=NAME` reads from another datacenter.

    Args:
        url: Location of the registry.
        timeout_s: Seconds that a request may take before it fails.
        credentials: As for `open_store`.

    Returns:
        The registry, which the caller closes.

    Raises:
        SettingsError: The URL cannot be used, or the file is not EDL's.
        DiscoveryError: The file cannot be opened just now.
    """
    scheme, parts = _split(url, timeout_s)
    if scheme in _CONSUL:
        from edl.discovery.consul import ConsulRegistry
        from edl.discovery.consul_client import ConsulTarget

        return ConsulRegistry(ConsulTarget.of(parts, timeout_s))
    if scheme in _ETCD:
        from edl.discovery.etcd import REGISTRY_ROOT, EtcdStore, EtcdTarget

        return KeyRegistry(EtcdStore(EtcdTarget.of(parts, timeout_s), REGISTRY_ROOT))
    return KeyRegistry(_open(scheme, parts, url, timeout_s, credentials))


def open_store(url: str, *, timeout_s: float = 5.0, credentials: Credentials | None = None) -> Store:
    """Open the store that `url` names. Opening a store on a server sends no request.

    - `sqlite:///absolute/path`: a file, for all processes of a machine; created if missing, with its folder.
    - `edl://host:port`: a store that another process serves (`edl store`, or an agent of `edl run --rdzv-endpoint`).
    - `consul://host:port`: a Consul agent, preferably the local one; `consul+https://` speaks TLS. The token and
      certificates come from Consul's own variables (`CONSUL_HTTP_TOKEN`, `CONSUL_CACERT`, ...), never from the URL,
      which is logged. All keys are in the folder `edl/`.
    - `etcd://host:port,host2:port`: members of an etcd cluster; the first that answers is used. `etcd+https://`
      speaks TLS. User and certificates come from the variables of etcd's own command line (`ETCDCTL_USER`,
      `ETCDCTL_PASSWORD`, `ETCDCTL_CACERT`, ...). All keys are below `edl/store/`.

    Args:
        url: Location of the store.
        timeout_s: Seconds that a request may take before it fails.
        credentials: Mutual TLS with an `edl://` server, if CA, certificate and key are set, and a token for it. None
            for the credentials in the environment (`EDL_TLS_CA`, ...).

    Returns:
        The store, which the caller closes.

    Raises:
        SettingsError: The URL cannot be used, or the file is not EDL's.
        DiscoveryError: The file cannot be opened just now.
    """
    scheme, parts = _split(url, timeout_s)
    return _open(scheme, parts, url, timeout_s, credentials)


def _open(scheme: str, parts: SplitResult, url: str, timeout_s: float, credentials: Credentials | None) -> Store:
    if scheme == "sqlite":
        from edl.discovery.sqlite import SqliteStore

        return SqliteStore(_path(url, parts), timeout_s=timeout_s)
    if scheme == "edl":
        from edl.discovery.served.store import ServedStore, ServedTarget

        return ServedStore(ServedTarget.of(parts, timeout_s, credentials))
    if scheme in _ETCD:
        from edl.discovery.etcd import EtcdStore, EtcdTarget

        return EtcdStore(EtcdTarget.of(parts, timeout_s))
    assert scheme in _CONSUL, f"no store is opened for {scheme}"
    from edl.discovery.consul import ConsulStore
    from edl.discovery.consul_client import ConsulTarget

    return ConsulStore(ConsulTarget.of(parts, timeout_s))


def identify_store(url: str) -> str:
    """Return the same text for URLs of the same store that differ only in spelling; other text is returned as it is.

    It ignores differences in the case of a host, the scheme's own port, the order of etcd's members, a slash at the
    end, and characters that `urlsplit` drops. Hosts are not resolved, and etcd members that are named alone are not
    recognized as one cluster.
    """
    try:
        parts = urlsplit(url)
        if parts.scheme == "sqlite":
            return f"sqlite://{_path(url, parts)}"
        if parts.scheme not in _SCHEMES or parts.path not in ("", "/") or parts.fragment or "@" in parts.netloc:
            return url
        members = parts.netloc.split(",") if parts.scheme in _ETCD else [parts.netloc]
        place = ",".join(sorted({identify_server(parts.scheme, member.strip()) for member in members}))
    except (ValueError, SettingsError):
        return url
    query = urlencode(sorted(parse_qsl(parts.query, keep_blank_values=True)))
    return f"{parts.scheme}://{place}{'?' if query else ''}{query}"


def find_mistake(url: str) -> str:
    """Return why no store can be at a URL; empty if there may be one. Opens nothing, and reads no environment."""
    try:
        parts = urlsplit(url)
        if parts.scheme == "kubernetes":
            return KUBERNETES_GONE
        if parts.scheme not in _SCHEMES:
            return f"unknown scheme {parts.scheme!r}" if parts.scheme else "the scheme is missing"
        if parts.scheme == "sqlite":
            _path(url, parts)
        elif not parts.netloc:
            return f"a host is missing after {parts.scheme}://"
        for member in parts.netloc.split(",") if parts.scheme in _ETCD else filter(None, [parts.netloc]):
            identify_server(parts.scheme, member.strip())
    except (ValueError, SettingsError) as exc:
        return str(exc)
    return ""


def identify_server(scheme: str, member: str) -> str:
    """Return host and port of a store's server in one spelling; raise ValueError if `member` has no host."""
    parts = urlsplit(f"//{member}")
    host = parts.hostname
    if not host:
        raise ValueError(f"{member}: no host")
    if ":" in host:
        host = f"[{ipaddress.ip_address(host)}]"
    return f"{host}:{_PORTS[scheme] if parts.port is None else parts.port}"


def servers_of(url: str) -> list[tuple[str, int | None]]:
    """Return hosts, and ports where given, of the servers that a URL names; none for a file."""
    parts = urlsplit(url)
    each = (urlsplit(f"//{member}") for member in parts.netloc.split(","))
    return [(member.hostname, member.port) for member in each if member.hostname]


def _split(url: str, timeout_s: float) -> tuple[str, SplitResult]:
    if not 0 < timeout_s < float("inf"):
        raise SettingsError(f"timeout_s={timeout_s!r}: must be a finite number above 0")
    # A user may have put a token into it, so show only the part after an "@" and before the query.
    shown = re.sub(r"//[^/]*@", "//", url.partition("?")[0])
    try:
        parts = urlsplit(url)
    except ValueError as exc:
        raise SettingsError(f"discovery URL {shown!r}: {exc}; {_ACCEPTED}") from exc
    if parts.scheme == "kubernetes":
        raise SettingsError(f"discovery URL {shown!r}: {KUBERNETES_GONE}")
    if parts.scheme not in _SCHEMES:
        raise SettingsError(f"discovery URL {shown!r}: unknown scheme {parts.scheme!r}; {_ACCEPTED}")
    return parts.scheme, parts


def _path(url: str, parts: SplitResult) -> str:
    path = unquote(parts.path)
    if parts.netloc or parts.query or parts.fragment:
        raise SettingsError(f"discovery URL {url!r}: only a path may follow sqlite:///; {_ACCEPTED}")
    if not path.startswith("/") or path.endswith("/") or "\0" in path:
        raise SettingsError(f"discovery URL {url!r}: {path!r} is not the absolute path of a file; {_ACCEPTED}")
    return "/" + path.lstrip("/")  # sqlite:////path, as other programs write it, means the same
