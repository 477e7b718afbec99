"""Which address of this host others can use."""

from __future__ import annotations

import ipaddress
import logging
import socket

from edl.discovery.urls import servers_of
from edl.settings import Credentials

__all__ = ["is_loopback", "outward_address", "warn_of_loopback", "warn_of_no_credentials"]

_log = logging.getLogger(__name__)

_ANYWHERE = "198.51.100.1"  # RFC 5737: belongs to nobody, so it is routed like any other foreign address


def outward_address(discovery_url: str | None) -> str:
    """The address of this host on the way to the registry, or else on the way out.

    Nothing is sent: connecting a datagram socket only asks the kernel which way it would go.
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
    """Log a warning where a registry for many machines is told an address that means this one only."""
    if discovery_url is not None and discovery_url.startswith(("consul", "etcd")) and is_loopback(address):
        _log.warning("only students on this host can reach %s; %s is for others", address, remedy)


def warn_of_no_credentials(host: str, credentials: Credentials) -> None:
    """Log a warning where a teacher takes everybody who reaches it, from beyond this host."""
    if is_loopback(host):
        return
    if not credentials.cert and not credentials.token_file:
        _log.warning(
            "listening on %s without TLS and tokens: whoever reaches this port can use the model, and the network can "
            "read what students send; set --tls-cert and --tls-key, and --tls-ca or --token-file (docs/security.md)",
            host,
        )
    elif not credentials.cert:
        _log.warning("listening on %s without TLS: tokens and data can be read on the network (--tls-cert)", host)
    elif not credentials.ca and not credentials.token_file:
        _log.info("listening on %s with TLS, for everybody: --tls-ca or --token-file says who may ask", host)


def is_loopback(host: str) -> bool:
    """Whether `host` means this host only."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
