"""Which host and port a master listens at, and what workers are told."""

from __future__ import annotations

import socket
from typing import Final

from edl.discovery.served.own_host import is_loopback
from edl.discovery.urls import servers_of

__all__ = ["own_address", "shown_endpoint"]

_ANYWHERE: Final = ("192.0.2.1", "2001:db8::1")
"""Addresses for documentation (RFC 5737, RFC 3849): the way to them is the way out."""
_ANY: Final = ("0.0.0.0", "::", "*", "")


def shown_endpoint(host: str, port: int, store_url: str) -> str:
    """Return where workers reach a master that listens at `host` and `port`."""
    shown = own_address(store_url) if host in _ANY else host
    return f"[{shown}]:{port}" if ":" in shown else f"{shown}:{port}"


def own_address(store_url: str) -> str:
    """Return this host's address on the way to the Store, or else on the way out; 127.0.0.1 where there is no way.

    A Store at this host's loopback is an agent of a cluster, whose other hosts do not reach that. Nothing is sent:
    connecting a datagram socket asks the kernel for the route only.
    """
    for host in (*(host for host, _ in servers_of(store_url)), *_ANYWHERE):
        if is_loopback(host):
            continue
        try:
            ((family, kind, protocol, _, address), *_) = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0])
        except OSError:
            continue
    return "127.0.0.1"
