"""Where nodes meet by torchrun's options: `--rdzv-endpoint`, or `--master-addr` and `--master-port`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass

from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from edl.discovery.served.addresses import ListenAddress, is_loopback, is_own_host
from edl.discovery.served.store import DEFAULT_PORT
from edl.errors import SettingsError

__all__ = ["RendezvousEndpoint"]

_MASTER_PORT = 29500
"""torchrun's own where `--master-port` is not given."""
_MASTER_ADDR = "127.0.0.1"
_TRUE = ("1", "true", "t", "yes", "y")
_FALSE = ("0", "false", "f", "no", "n")


@dataclass(frozen=True)
class RendezvousEndpoint:
    """A host and a port that all nodes name alike; the agent on that host serves the store.

    Attributes:
        is_host: whether this is that host, where the user says so (`--rdzv-conf is_host=1`, as for torch's c10d).
    """

    host: str
    port: int
    is_host: bool | None = None

    @classmethod
    def of(cls, options: argparse.Namespace, conf: Mapping[str, str], max_nodes: int) -> RendezvousEndpoint | None:
        """Read torchrun's options.

        Args:
            options: of the command line.
            conf: what `--rdzv-conf` says.
            max_nodes: how many nodes the job may have.

        Returns:
            The endpoint; None where torchrun's options name no place, or EDL's name a store.

        Raises:
            SettingsError: an option cannot be used.
        """
        backend = options.rdzv_backend.strip().lower()
        if options.standalone or options.store or max_nodes < 2 or "://" in options.rdzv_endpoint:
            return None
        if backend.startswith("etcd"):
            return None
        if options.rdzv_endpoint:
            given, text, default = "--rdzv-endpoint", options.rdzv_endpoint, DEFAULT_PORT
        elif backend == "static" and (options.master_addr != _MASTER_ADDR or options.master_port is not None):
            port = _MASTER_PORT if options.master_port is None else options.master_port
            addr = options.master_addr
            bare = ":" in addr and not addr.startswith("[")
            given, text, default = "--master-addr", f"[{addr}]:{port}" if bare else f"{addr}:{port}", port
        else:
            return None
        if text.count(":") > 1 and not text.startswith("["):
            raise SettingsError(f"{given} {text}: an IPv6 address goes in brackets, such as [fd00::2]:{DEFAULT_PORT}")
        try:
            host, port = parse_rendezvous_endpoint(text, default)
        except ValueError as exc:
            raise SettingsError(f"{given} {text}: wanted is HOST or HOST:PORT, such as node0:{DEFAULT_PORT}") from exc
        if port == 0:
            raise SettingsError(f"{given} {text}: other nodes cannot know the port: name one, such as {DEFAULT_PORT}")
        return cls(host, port, _is_host(conf))

    @property
    def url(self) -> str:
        """The store's, for `open_store`."""
        return f"edl://[{self.host}]:{self.port}" if ":" in self.host else f"edl://{self.host}:{self.port}"

    @property
    def own(self) -> bool:
        """Whether the endpoint names this host."""
        return is_own_host(self.host) if self.is_host is None else self.is_host

    @property
    def local(self) -> bool:
        """Whether only processes of this host can mean it."""
        return is_loopback(self.host)

    @property
    def listen(self) -> ListenAddress:
        """Where to listen, if this is the host.

        At all addresses, as c10d: its own name may stand for an address of the loopback here (Debian's /etc/hosts),
        and for another address elsewhere. But where the loopback is named, at that alone.
        """
        if not self.local:
            return ListenAddress("::", self.port)
        return ListenAddress("127.0.0.1" if self.host == "localhost" else self.host, self.port)


def _is_host(conf: Mapping[str, str]) -> bool | None:
    value = conf.get("is_host")
    if value is None:
        return None
    if value.lower() not in (*_TRUE, *_FALSE):
        raise SettingsError(f"--rdzv-conf is_host={value}: wanted is 1 or 0")
    return value.lower() in _TRUE
