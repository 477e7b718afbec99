"""The operator's settings, and which stores it may open with its own tokens, certificates and network."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final
from urllib.parse import SplitResult, urlsplit

from edl.discovery.store_url import KUBERNETES_GONE, identify_server, identify_store
from edl.errors import SettingsError
from edl.kube.settings import KubeSettings
from edl.master.kube.members.pod_policy import PodPolicy
from edl.quoting import shown

_SCHEMES: Final = ("consul", "consul+https", "etcd", "etcd+https", "edl")
"""Schemes that can be allowed. A `sqlite:` file would be on the operator's own machine."""
_ETCD: Final = ("etcd", "etcd+https")


@dataclass(frozen=True)
class StoreAllowlist:
    """Stores that may be opened: the operator's own, others of its scheme, host and port, and those with a prefix.

    The author of a resource chooses its store. If the operator opened every store, it would send its token to any host,
    and requests to addresses that only it can reach. A prefix is `SCHEME://HOST:PORT`, `SCHEME://HOST` for any port, or
    `SCHEME://` for any host.

    Raises:
        SettingsError: a prefix has a different form.
    """

    own: str = ""
    prefixes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for prefix in self.prefixes:
            if not _is_prefix(prefix):
                raise SettingsError(
                    f"--allow-store {shown(prefix.partition('?')[0].rpartition('@')[2])}: expected SCHEME://HOST:PORT,"
                    f" SCHEME://HOST or SCHEME://, with a scheme of {', '.join(_SCHEMES)}"
                )

    def find_refusal(self, url: str) -> str:
        """Return why a store is not opened, for the author of its URL; empty if it is allowed."""
        if url == self.own or identify_store(url) == identify_store(self.own):
            return ""
        parts = _split(url)
        if parts is not None and parts.scheme == "kubernetes":
            return KUBERNETES_GONE
        if parts is None or parts.scheme not in (*_SCHEMES, "sqlite"):
            return "not a store URL"
        if parts.scheme == "sqlite":
            return "a file on the operator's machine, which the operator opens only as its own --store"
        if extras := _find_extras(parts):
            return f"a URL with {extras}, which the operator does not accept from a resource"
        own = _split(self.own)
        if own is not None and own.scheme not in (*_SCHEMES, "sqlite"):
            own = None  # such a store is never opened
        try:
            members, own_members = _list_members(parts), [] if own is None else _list_members(own)
        except ValueError as exc:
            return f"not a store URL: {shown(str(exc))}"
        if "" in members:
            return "a URL without a host"
        allowed = [] if own is None else [(own.scheme, member) for member in own_members]
        for member in members:
            if (parts.scheme, member) not in allowed and not self._is_listed(parts.scheme, member):
                prefix = shown(f"{parts.scheme}://{member}")
                return f"to have the operator read it, start the operator with --allow-store {prefix}"
        return ""

    def _is_listed(self, scheme: str, member: str) -> bool:
        for prefix in self.prefixes:
            listed = urlsplit(prefix)
            if listed.scheme != scheme:
                continue
            (place,) = _list_members(listed) if listed.netloc else ("",)
            if place in ("", member) or (listed.port is None and _host_of(place) == _host_of(member)):
                return True
        return False


def _split(url: str) -> SplitResult | None:
    try:
        parts = urlsplit(url)
        if "," not in parts.netloc:
            _ = parts.port  # parsed on access
    except ValueError:
        return None
    return parts


def _find_extras(parts: SplitResult) -> str:
    if "@" in parts.netloc:
        return "a user"
    if parts.path not in ("", "/") or parts.fragment:
        return "a path"
    return "options" if parts.query else ""


def _list_members(parts: SplitResult) -> list[str]:
    """Return the servers of a URL in normalized form; ValueError if one is not a host with a port. A file has none."""
    if parts.scheme == "sqlite" or not parts.netloc:
        return [parts.netloc.lower()]
    members = parts.netloc.split(",") if parts.scheme in _ETCD else [parts.netloc]
    return [identify_server(parts.scheme, member.strip()) for member in members]


def _is_prefix(text: str) -> bool:
    try:
        parts = urlsplit(text)
        _list_members(parts)
    except ValueError:
        return False
    # A missing port, as in `edl://a:`, matches nothing.
    return parts.scheme in _SCHEMES and not (_find_extras(parts) or "," in text or parts.netloc.endswith(":"))


def _host_of(member: str) -> str:
    """Return the host of `HOST:PORT`, with the brackets of an IPv6 address."""
    host, colon, port = member.rpartition(":")
    return host if colon and port.isdigit() else member


ALL_NAMESPACES: Final = "*"
"""In place of a namespace: the whole cluster."""


@dataclass(frozen=True)
class OperatorSettings:
    """Settings of an operator.

    Attributes:
        kube: Cluster and user.
        namespaces: Namespaces whose resources it manages. Empty for its own, `*` for the whole cluster.
        store: URL of the store for resources that name none; empty for none.
        allow_stores: Prefixes of additional stores that it may open: see `StoreAllowlist`.
        pods: Limits on pod templates.
        workers: Number of resources reconciled concurrently.
        resync_s: Seconds after which each resource is reconciled in any case, less often if there are many. This finds
            changes that no event reported.
        resync_rate: Largest number of such reconciliations per second. Each takes two requests.
        capacity: Whether to watch nodes and all pods of the cluster, if allowed.
        host: Address where `/livez`, `/readyz` and `/metrics` are served; None for nowhere.
        port: Port of that address; 0 for any.

    Raises:
        SettingsError: `workers` is out of range, `*` is not alone, or a prefix of a store is invalid.
    """

    kube: KubeSettings = field(default_factory=KubeSettings)
    namespaces: tuple[str, ...] = ()
    store: str = ""
    allow_stores: tuple[str, ...] = ()
    pods: PodPolicy = field(default_factory=PodPolicy)
    workers: int = 4
    resync_s: float = 600.0
    resync_rate: float = 0.2
    capacity: bool = True
    host: str | None = None
    port: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.workers <= 32:
            raise SettingsError(f"workers={self.workers!r}: expected 1 to 32")
        StoreAllowlist(self.store, self.allow_stores)
        if ALL_NAMESPACES in self.namespaces and len(self.namespaces) > 1:
            raise SettingsError(f"namespaces={','.join(self.namespaces)}: {ALL_NAMESPACES} already includes them all")
