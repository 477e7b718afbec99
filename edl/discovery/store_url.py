"""Parses the URLs of stores. A new scheme goes into `_SCHEMES`, `_EXAMPLES`, `_PORTS` and `edl.discovery.urls`."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote, urlsplit

KUBERNETES_GONE: Final = (
    "kubernetes:// is no longer supported: run a store in the cluster (with the chart or `edl store`), and name it as"
    " edl://NAME.NAMESPACE:29400, such as edl://edl-store.edl:29400"
)
CONSUL: Final = ("consul", "consul+https")
ETCD: Final = ("etcd", "etcd+https")
_SCHEMES: Final = ("sqlite", *CONSUL, *ETCD, "edl")
_PORTS: Final = {"consul": 8500, "consul+https": 8501, "etcd": 2379, "etcd+https": 2379, "edl": 29400}
_EXAMPLES: Final = {
    "sqlite": "sqlite:///absolute/path/to/file",
    "edl": "edl://host:29400",
    **dict.fromkeys(CONSUL, "consul://host:8500"),
    **dict.fromkeys(ETCD, "etcd://host:2379,host2:2379"),
}
_ACCEPTED: Final = f"expected {', '.join(dict.fromkeys(_EXAMPLES.values()))} (with TLS: consul+https, etcd+https)"
_SECRETS: Final = {
    "edl": "name a file of tokens in EDL_TOKEN_FILE",
    **dict.fromkeys(CONSUL, "set CONSUL_HTTP_TOKEN"),
    **dict.fromkeys(ETCD, "set ETCDCTL_USER and ETCDCTL_PASSWORD"),
}


@dataclass(frozen=True)
class StoreUrl:
    """The parts of a store's URL.

    Attributes:
        scheme: A scheme of `_SCHEMES`.
        path: The absolute path of a file; empty for a server.
        servers: Hosts of servers, without brackets, and their ports; None for the default port.
    """

    scheme: str
    path: str = ""
    servers: tuple[tuple[str, int | None], ...] = ()

    @classmethod
    def parse(cls, url: str) -> StoreUrl:
        """Parse a URL; raise ValueError if it cannot be a store's. The message contains no password, token or query."""
        parts = urlsplit(url)
        scheme = parts.scheme
        if scheme == "kubernetes":
            raise ValueError(KUBERNETES_GONE)
        if scheme not in _SCHEMES:
            raise ValueError(f"{f'unknown scheme {scheme!r}' if scheme else 'the scheme is missing'}; {_ACCEPTED}")
        if scheme == "sqlite":
            path = unquote(parts.path)
            if parts.netloc or parts.query or parts.fragment:
                raise ValueError(f"only a path may follow sqlite:///; {_ACCEPTED}")
            if not path.startswith("/") or path.endswith("/") or "\0" in path:
                raise ValueError(f"{path!r} is not the absolute path of a file; {_ACCEPTED}")
            return cls(scheme, "/" + path.lstrip("/"))  # sqlite:////path, as other programs write it, means the same
        if "@" in parts.netloc:
            raise ValueError(f"a password does not belong in a URL; {_SECRETS[scheme]}")
        if not parts.netloc:
            raise ValueError(f"a host is missing after {scheme}://; expected {_EXAMPLES[scheme]}")
        if parts.path not in ("", "/") or parts.fragment or parts.query:
            raise ValueError(f"expected only {_EXAMPLES[scheme]}")
        members = parts.netloc.split(",") if scheme in ETCD else [parts.netloc]
        try:
            return cls(scheme, servers=tuple(_server(member.strip()) for member in members))
        except ValueError as exc:
            raise ValueError(f"{exc}; expected {_EXAMPLES[scheme]}") from exc


def identify_store(url: str) -> str:
    """Return the same text for all spellings of a store's URL; text that is not a store's URL is returned unchanged.

    The result does not depend on the case of a host, an explicit default port, the order of etcd's members, a slash at
    the end, or characters that `urlsplit` drops. Hosts are not resolved, and URLs that contain different members of an
    etcd cluster are not recognized as the same store.
    """
    try:
        found = StoreUrl.parse(url)
    except ValueError:
        return url
    place = ",".join(sorted({_joined(found.scheme, *server) for server in found.servers}))
    return f"{found.scheme}://{place}{found.path}"


def find_mistake(url: str) -> str:
    """Return why a URL cannot be a store's; empty if it can. Opens no store, and reads no environment variables."""
    try:
        StoreUrl.parse(url)
    except ValueError as exc:
        return str(exc)
    return ""


def identify_server(scheme: str, member: str) -> str:
    """Return the host and port of a store's server in canonical form; raise ValueError if `member` has no host."""
    return _joined(scheme, *_server(member))


def _server(member: str) -> tuple[str, int | None]:
    parts = urlsplit(f"//{member}")
    host = parts.hostname
    if not host:
        raise ValueError(f"{member!r} has no host")
    if parts.port == 0:
        raise ValueError(f"{member!r}: expected a port from 1 to 65535")
    return str(ipaddress.ip_address(host)) if ":" in host else host, parts.port


def _joined(scheme: str, host: str, port: int | None) -> str:
    return f"{f'[{host}]' if ':' in host else host}:{port or _PORTS[scheme]}"


def servers_of(url: str) -> list[tuple[str, int | None]]:
    """Return the hosts of the servers in a URL, with their ports if the URL gives them; no servers for a file."""
    parts = urlsplit(url)
    each = (urlsplit(f"//{member}") for member in parts.netloc.split(","))
    return [(member.hostname, member.port) for member in each if member.hostname]
