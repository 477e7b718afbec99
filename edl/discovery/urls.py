"""From a URL to a registry or a store. Implementations are imported when a URL names them, never before."""

from __future__ import annotations

import contextlib
import ipaddress
import re
from collections.abc import Iterator
from typing import Final
from urllib.parse import SplitResult, parse_qsl, unquote, urlencode, urlsplit

from edl.discovery.registry import Registry
from edl.discovery.store import Store
from edl.errors import SettingsError
from edl.settings import Credentials

__all__ = ["identify_server", "identify_store", "open_registry", "open_store", "servers_of"]

_ACCEPTED = (
    "accepted are sqlite:///absolute/path/to/file, consul://host:8500 and etcd://host:2379,host2:2379"
    " (consul+https:// and etcd+https:// for TLS), kubernetes://namespace, and for a store edl://host:29400"
)
_CONSUL = ("consul", "consul+https")
_ETCD = ("etcd", "etcd+https")
_KUBERNETES = "kubernetes"
_SCHEMES = ("sqlite", *_CONSUL, *_ETCD, _KUBERNETES, "edl")


_PACKAGES = {"consul": "py-consul", "kubernetes": "'kubernetes<36'"}
_ANY_TIMEOUT_S = 5.0
"""Where nothing is asked."""
_PORTS: Final = {"consul": 8500, "consul+https": 8501, "etcd": 2379, "etcd+https": 2379, "edl": 29400}
"""Of URLs that name none, as the targets of these schemes have it; importing those would import their clients."""


def open_registry(url: str, *, timeout_s: float = 5.0) -> Registry:
    """Open the registry that `url` names.

    - `sqlite:///absolute/path`: a file, for all processes of a machine; made if it is not there, with its folder.
    - `consul://host:port`: a Consul agent, best that on this machine; `consul+https://` speaks TLS. `?dc=NAME`
      reads from another datacenter. The token and certificates come from Consul's own variables (`CONSUL_HTTP_TOKEN`,
      `CONSUL_CACERT`, ...), never from the URL, which is logged. Opening does not ask the agent anything.
    - `etcd://host:port,host2:port`: members of an etcd cluster, of which the first that answers is asked; `etcd+https://`
      speaks TLS. User and certificates come from the variables of etcd's own command line (`ETCDCTL_USER`,
      `ETCDCTL_PASSWORD`, `ETCDCTL_CACERT`, ...). Opening does not ask the members anything.
    - `kubernetes://namespace`: objects in a namespace; without a name, of the pod's own or that of the context. The
      cluster and its credentials come from `KUBECONFIG`, from the pod's service account, or from `~/.kube/config`;
      `?context=NAME` and `?kubeconfig=PATH` name others. Opening does not ask the API server anything.

    Args:
        url: where the registry is.
        timeout_s: how many seconds a request may take before it is an error.

    Returns:
        The registry, which the caller closes.

    Raises:
        SettingsError: the URL cannot be used, or the file is not EDL's.
        DiscoveryError: the file cannot be opened just now.
    """
    scheme, parts = _split(url, timeout_s)
    if scheme == "sqlite":
        from edl.discovery.sqlite.registry import SqliteRegistry

        return SqliteRegistry(_path(url, parts), timeout_s=timeout_s)
    if scheme == "edl":
        raise SettingsError(
            f"discovery URL {scheme}://{parts.netloc.rpartition('@')[2]}: what an agent of `edl run` serves is a store"
            " for a training job; teachers register in sqlite:///absolute/path/to/file, consul://host:8500 or"
            " etcd://host:2379"
        )
    if scheme in _ETCD:
        from edl.discovery.etcd.registry import EtcdRegistry
        from edl.discovery.etcd.target import EtcdTarget

        return EtcdRegistry(EtcdTarget.of(parts, timeout_s))
    if scheme == _KUBERNETES:
        from edl.discovery.kubernetes.target import KubernetesTarget

        kubernetes_target = KubernetesTarget.of(parts, timeout_s)
        with _naming_the_extra():
            from edl.discovery.kubernetes.registry import KubernetesRegistry

            return KubernetesRegistry(kubernetes_target)
    assert scheme in _CONSUL, f"no registry is opened for {scheme}"
    from edl.discovery.consul.target import ConsulTarget

    target = ConsulTarget.of(parts, timeout_s)
    with _naming_the_extra():
        from edl.discovery.consul.registry import ConsulRegistry
    return ConsulRegistry(target)


def open_store(url: str, *, timeout_s: float = 5.0, credentials: Credentials | None = None) -> Store:
    """Open the store that `url` names; URLs, arguments and errors are those of `open_registry`, and a further URL.

    In Consul all keys lie in the folder `edl/`, in etcd in `edl/store/`.

    - `edl://host:port`: what an agent of `edl run --rdzv-endpoint host:port` serves. Opening does not ask it anything.

    Args:
        url: where the store is.
        timeout_s: how many seconds a request may take before it is an error.
        credentials: what is shown to such an agent, and whom to believe: mutual TLS if CA, certificate and key are
            there, and tokens. None for what the environment names (`EDL_TLS_CA`, ...).

    Returns:
        The store, which the caller closes.
    """
    scheme, parts = _split(url, timeout_s)
    if scheme == "sqlite":
        from edl.discovery.sqlite.store import SqliteStore

        return SqliteStore(_path(url, parts), timeout_s=timeout_s)
    if scheme == "edl":
        from edl.discovery.served.store import ServedStore
        from edl.discovery.served.target import ServedTarget

        return ServedStore(ServedTarget.of(parts, timeout_s, credentials))
    if scheme in _ETCD:
        from edl.discovery.etcd.store import EtcdStore
        from edl.discovery.etcd.target import EtcdTarget

        return EtcdStore(EtcdTarget.of(parts, timeout_s))
    if scheme == _KUBERNETES:
        from edl.discovery.kubernetes.target import KubernetesTarget

        kubernetes_target = KubernetesTarget.of(parts, timeout_s)
        with _naming_the_extra():
            from edl.discovery.kubernetes.store import KubernetesStore

            return KubernetesStore(kubernetes_target)
    assert scheme in _CONSUL, f"no store is opened for {scheme}"
    from edl.discovery.consul.target import ConsulTarget

    target = ConsulTarget.of(parts, timeout_s)
    with _naming_the_extra():
        from edl.discovery.consul.store import ConsulStore
    return ConsulStore(target)


def identify_store(url: str) -> str:
    """Return the same text for URLs that differ in their spelling only: what they name is the same store.

    These do not count: the case of a host, a port that is the scheme's own, the order of etcd's members, a slash at the
    end, characters that `urlsplit` drops. Hosts are not resolved, and members of etcd that are named alone are not
    known to be of one cluster.

    Args:
        url: of a store. What is no such URL is returned as it is.
    """
    try:
        parts = urlsplit(url)
        if parts.scheme == "sqlite":
            return f"sqlite://{_path(url, parts)}"
        if parts.scheme not in _SCHEMES or parts.path not in ("", "/") or parts.fragment or "@" in parts.netloc:
            return url
        if parts.scheme == _KUBERNETES:
            place = parts.netloc
        else:
            members = parts.netloc.split(",") if parts.scheme in _ETCD else [parts.netloc]
            place = ",".join(sorted({identify_server(parts.scheme, member.strip()) for member in members}))
    except (ValueError, SettingsError):
        return url
    query = urlencode(sorted(parse_qsl(parts.query, keep_blank_values=True)))
    return f"{parts.scheme}://{place}{'?' if query else ''}{query}"


def identify_server(scheme: str, member: str) -> str:
    """Return host and port of a store's server in the one spelling.

    Args:
        scheme: of the store's URL.
        member: as the URL has it, with the scheme's own port or without.

    Raises:
        ValueError: it is no host with a port.
    """
    parts = urlsplit(f"//{member}")
    host = parts.hostname
    if not host:
        raise ValueError(f"{member}: no host")
    if ":" in host:
        host = f"[{ipaddress.ip_address(host)}]"
    return f"{host}:{_PORTS[scheme] if parts.port is None else parts.port}"


def servers_of(url: str) -> list[tuple[str, int | None]]:
    """Hosts, and ports where they are given, of the servers that a URL names; none for a file."""
    parts = urlsplit(url)
    if parts.scheme == _KUBERNETES:
        from edl.discovery.kubernetes.target import KubernetesTarget

        with _naming_the_extra():
            server = KubernetesTarget.of(parts, _ANY_TIMEOUT_S).server()
        return [server] if server else []
    each = (urlsplit(f"//{member}") for member in parts.netloc.split(","))
    return [(member.hostname, member.port) for member in each if member.hostname]


def _split(url: str, timeout_s: float) -> tuple[str, SplitResult]:
    if not 0 < timeout_s < float("inf"):
        raise SettingsError(f"timeout_s={timeout_s!r}: must be a finite number above 0")
    # Somebody may have put a token into it, so what is shown ends before the query and begins after an "@".
    shown = re.sub(r"//[^/]*@", "//", url.partition("?")[0])
    try:
        parts = urlsplit(url)
    except ValueError as exc:
        raise SettingsError(f"discovery URL {shown!r}: {exc}; {_ACCEPTED}") from exc
    if parts.scheme not in _SCHEMES:
        raise SettingsError(f"discovery URL {shown!r}: unknown scheme {parts.scheme!r}; {_ACCEPTED}")
    return parts.scheme, parts


@contextlib.contextmanager
def _naming_the_extra() -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as exc:
        scheme = (exc.name or "").partition(".")[0]
        if scheme not in _PACKAGES:
            raise
        package = _PACKAGES[scheme]
        raise SettingsError(f"a {scheme}: URL needs the package {package}: pip install {package}") from exc


def _path(url: str, parts: SplitResult) -> str:
    path = unquote(parts.path)
    if parts.netloc or parts.query or parts.fragment:
        raise SettingsError(f"discovery URL {url!r}: a path after sqlite:/// and nothing else is expected; {_ACCEPTED}")
    if not path.startswith("/") or path.endswith("/") or "\0" in path:
        raise SettingsError(f"discovery URL {url!r}: {path!r} is not the absolute path of a file; {_ACCEPTED}")
    return "/" + path.lstrip("/")  # sqlite:////path, as other programs write it, means the same
