"""Whether a name or address is this host's own: which agent serves the store follows from it."""

from __future__ import annotations

import ipaddress
import socket
from pathlib import Path

__all__ = ["is_loopback", "is_own_host"]


def is_loopback(host: str) -> bool:
    """Return whether other hosts cannot mean this host by `host`: localhost, or an address of the loopback."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_own_host(host: str) -> bool:
    """Whether `host` is this host: by its name as torch's c10d decides it, or by an address of any of its interfaces.

    A name that cannot be resolved now is not; ask again.
    """
    if is_loopback(host) or host in (socket.gethostname(), socket.getfqdn()):
        return True
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    return any(_is_own_address(family, address) for family, _, _, _, address in found)


def _is_own_address(family: int, address: tuple[object, ...]) -> bool:
    """Only a host's own addresses can be bound to, unless the system was told to allow others."""
    version = "ipv6" if family == socket.AF_INET6 else "ipv4"
    allowed = Path(f"/proc/sys/net/{version}/ip_nonlocal_bind")
    try:
        if allowed.read_text().strip() not in ("", "0"):
            return _leads_here(family, address)
    except OSError:
        pass
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address[0], 0, *address[2:]))
    except OSError:
        return False
    return True


def _leads_here(family: int, address: tuple[object, ...]) -> bool:
    """Whether the way to an address begins at that address. Sends nothing. Misses second addresses of an interface."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address[0], 1, *address[2:]))
            return bool(probe.getsockname()[0] == address[0])
    except OSError:
        return False
