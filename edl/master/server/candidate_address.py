"""Which host and port a master listens at, and what workers are told."""

from __future__ import annotations

import socket
from typing import Final

from edl.discovery.urls import servers_of

__all__ = ["own_address", "shown_endpoint"]

_ANY: Final = ("0.0.0.0", "::", "*", "")


def shown_endpoint(host: str, port: int, store_url: str) -> str:
    """Return where workers reach a master that listens at `host` and `port`."""
    shown = own_address(store_url) if host in _ANY else host
    return f"[{shown}]:{port}" if ":" in shown else f"{shown}:{port}"


def own_address(store_url: str) -> str:
    """Return this host's address on the way to the Store; 127.0.0.1 where the Store is a file, or nothing leads there.

    Nothing is sent: connecting a datagram socket asks the kernel for the route only.
    """
    for host, port in servers_of(store_url):
        try:
            for family, kind, protocol, _, address in socket.getaddrinfo(host, port or 9, type=socket.SOCK_DGRAM):
                with socket.socket(family, kind, protocol) as probe:
                    probe.connect(address)
                    return str(probe.getsockname()[0])
        except OSError:
            continue
    return "127.0.0.1"
