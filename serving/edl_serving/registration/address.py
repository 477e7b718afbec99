"""Addresses of this host: which of them other hosts can use."""

from __future__ import annotations

import ipaddress
import logging
import socket

from edl.discovery.urls import servers_of

__all__ = ["is_loopback", "outward_address", "warn_of_loopback"]

_log = logging.getLogger(__name__)

_ANYWHERE = "198.51.100.1"  # RFC 5737: belongs to nobody, so it is routed like any other foreign address


def outward_address(discovery_url: str | None) -> str:
    """Return the address of this host on the way to the registry, or else on the way out.

    Nothing is sent: connecting a datagram socket asks the kernel for the route only.

    Args:
        discovery_url: URL of the registry; None for the way out.

    Returns:
        An IPv4 or IPv6 address; 127.0.0.1 if there is no route.
    """
    registry = [host for host, _ in servers_of(discovery_url or "")]
    for host in (*registry, _ANYWHERE):
        if is_loopback(host):
            continue
        try:
            ((family, kind, protocol, _, target), *_) = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(target)
                return str(probe.getsockname()[0])
        except OSError:
            continue
    return "127.0.0.1"


def warn_of_loopback(discovery_url: str | None, address: str, remedy: str) -> None:
    """Log a warning if an address of this host only is registered where other hosts look it up.

    Args:
        discovery_url: URL of the registry; None where the server stays out of discovery.
        address: of the server.
        remedy: flags that register another address.
    """
    if discovery_url is not None and discovery_url.startswith(("consul", "etcd", "edl")) and is_loopback(address):
        _log.warning("only students on this host can reach %s; %s is for others", address, remedy)


def is_loopback(host: str) -> bool:
    """Return whether `host` means this host only."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
