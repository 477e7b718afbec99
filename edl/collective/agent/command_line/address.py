"""The address at which other nodes reach this node."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import socket
import time
from typing import Final

from edl.discovery.served.addresses import is_loopback
from edl.discovery.urls import servers_of
from edl.errors import SettingsError

__all__ = ["own_address", "warn_of_slow_name"]

logger = logging.getLogger(__name__)

_ELSEWHERE: Final = ("203.0.113.1", "2001:db8::1")
"""Addresses on no network (RFC 5737, RFC 3849): the way there is the way to other hosts. Nothing is sent to them."""

_SLOW_NAME_S: Final = 2.0
"""A resolver that does not answer takes 5 s by default. Less than that a busy machine may take for any lookup."""


def own_address(store_url: str) -> str:
    """Find this node's own address on the way to the store, which all nodes can reach.

    Where hosts have agents of the store of their own, on their loopback (Consul's), it is the address on the way to
    other hosts; the loopback's if there is no such way.

    Args:
        store_url: as `edl.discovery.open_store` takes it.

    Returns:
        The address.

    Raises:
        SettingsError: there is no way to the store's host.
    """
    servers = servers_of(store_url)
    if not servers:
        return "127.0.0.1"  # a store in a file: all nodes are on this machine
    if store_url.startswith("edl:") and is_loopback(servers[0][0]):
        return "127.0.0.1"  # that of one agent: the others are on its machine
    for number, (host, port) in enumerate(servers, 1):
        try:
            address = _towards(host, port or 1)
            break
        except OSError as exc:
            if number == len(servers):
                what = f"no way to the store's host {host}: {exc}"
                raise SettingsError(f"{what}; --local-addr ADDRESS says where others reach this node") from exc
    if ipaddress.ip_address(address).is_loopback:
        for elsewhere in _ELSEWHERE:
            with contextlib.suppress(OSError):
                return _towards(elsewhere, 1)
    return address


def warn_of_slow_name(address: str) -> None:
    """Look up the name of an address in the form that torch asks for at every connection, and warn if that takes long.

    torch's stores connect by IPv6, also to IPv4 addresses, and have the address named (`getnameinfo`) for log lines. A
    line of /etc/hosts with the IPv4 address is no answer to that.

    Args:
        address: the node's own.
    """
    mapped = address if ":" in address else f"::ffff:{address}"
    began = time.monotonic()
    with contextlib.suppress(OSError):
        socket.getnameinfo((mapped, 0, 0, 0), 0)
    took_s = time.monotonic() - began
    if took_s >= _SLOW_NAME_S:
        logger.warning(
            "DNS took %.1f s for the name of %s, which torch asks for at each connection: restarts take so much "
            'longer. The line "%s %s" in /etc/hosts of every node answers at once',
            *(took_s, mapped, mapped, socket.gethostname()),
            extra={"seconds": took_s},
        )


def _towards(host: str, port: int) -> str:
    """Return this node's own address on the way to a host: IPv4's if there is such a way, which peers rather reach."""
    ways = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    failure: OSError | None = None
    for family, kind, protocol, _, address in sorted(ways, key=lambda way: way[0] != socket.AF_INET):
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(address)  # of a datagram socket: sends nothing
                return str(probe.getsockname()[0])
        except OSError as exc:
            failure = exc
    assert failure is not None  # a name that stands for no address is an error before
    try:
        raise failure
    finally:
        failure = None  # its traceback holds this frame
