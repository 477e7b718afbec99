"""The user at the other end of a connection from this host, as the kernel tells.

gRPC tells a peer's address only. The kernel knows the user of the sockets of this network namespace, the client's end
of a connection over loopback among them. It is asked for a single socket where the server's own address is known, and
for all (`/proc/net/tcp`, proc(5)) where the server listens on every address: two users may have an end of the same
address towards two of those.
"""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import os
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path
from urllib.parse import unquote

from edl_serving.shared_memory.socket_owner import Address, user_of_socket

__all__ = ["PeerCredentials", "is_local"]

_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_ESTABLISHED = "01"
_NOBODY = -1  # of an address that two users have, towards servers on one port at several addresses of this host
_FRESH_S = 1.0
"""How long an answer holds: the kernel gives a port over loopback to no other client for a second after its end."""


@functools.lru_cache(maxsize=1024)
def is_local(peer: str) -> bool:
    """Return whether a peer is on this host.

    Args:
        peer: gRPC's name of it ("ipv4:1.2.3.4:5", "ipv6:[::1]:5", "unix:...").
    """
    if _is_unix(peer):
        return True
    address = _parsed(peer)
    return address is not None and address[0].is_loopback


class PeerCredentials:
    """Finds the users of a server's clients on this host. Used on the event loop.

    Args:
        ports: returns the TCP ports that the server listens on.
        host: the address that the server listens on.
    """

    def __init__(self, ports: Callable[[], Collection[int]], host: str = "") -> None:
        self._ports = ports
        self._host: ipaddress.IPv4Address | ipaddress.IPv6Address | None = None
        with contextlib.suppress(ValueError):  # a name, which may be that of several addresses
            address = ipaddress.ip_address(host.strip("[]"))
            self._host = None if address.is_unspecified else _plain(address)
        self._users: dict[Address, int] = {}
        self._read_at = -_FRESH_S

    def user_of(self, peer: str) -> int | None:
        """Return the user id of a local peer; None if it cannot be told.

        A Unix socket lets in whom its file's permissions let in, so its clients count as the server's own user.
        """
        if _is_unix(peer):
            return os.geteuid()
        address = _parsed(peer)
        if address is None:
            return None
        if self._host is not None and self._host.version == address[0].version:
            with contextlib.suppress(OSError):
                return self._user_of_socket(address, self._host)
        if time.monotonic() >= self._read_at + _FRESH_S or address not in self._users:
            self._read()
        user = self._users.get(address, _NOBODY)
        return None if user == _NOBODY else user

    def is_connected(self, peer: str) -> bool:
        """Return whether a connection is still there.

        True for Unix sockets, whose clients have no names of their own.
        """
        if _is_unix(peer):
            return True
        return self.user_of(peer) is not None

    def _user_of_socket(self, client: Address, host: ipaddress.IPv4Address | ipaddress.IPv6Address) -> int | None:
        users = (user_of_socket(client, (host, port)) for port in self._ports())
        return next((user for user in users if user is not None), None)

    def _read(self) -> None:
        self._read_at = time.monotonic()
        self._users.clear()
        ports = [f":{port:04X}" for port in self._ports()]
        for table in _TABLES:
            with contextlib.suppress(OSError):  # no IPv6, or a system without such tables: then nobody is known
                for line in table.read_text().splitlines()[1:]:
                    if any(port in line for port in ports):
                        self._take(line.split(), ports)

    def _take(self, fields: list[str], ports: list[str]) -> None:
        client, server, state, user = fields[1], fields[2], fields[3], int(fields[7])
        if state == _ESTABLISHED and any(server.endswith(port) for port in ports):
            address = _from_table(client)
            if self._users.setdefault(address, user) != user:
                self._users[address] = _NOBODY


def _is_unix(peer: str) -> bool:
    return peer.startswith(("unix:", "unix-abstract:"))


@functools.lru_cache(maxsize=1024)
def _parsed(peer: str) -> Address | None:
    kind, _, rest = unquote(peer).partition(":")
    if kind not in ("ipv4", "ipv6"):
        return None
    host, _, port = rest.rpartition(":")
    try:
        return _plain(ipaddress.ip_address(host.strip("[]"))), int(port)
    except ValueError:
        return None


def _from_table(text: str) -> Address:
    """Parse an address and port of /proc/net/tcp: words of 32 bits in the host's byte order, in hexadecimal digits."""
    host, _, port = text.partition(":")
    words = [bytes.fromhex(host[at : at + 8]) for at in range(0, len(host), 8)]
    packed = b"".join(word[::-1] if sys.byteorder == "little" else word for word in words)
    return _plain(ipaddress.ip_address(packed)), int(port, 16)


def _plain(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Return an IPv4 address that a socket for both kinds shows as an IPv6 address."""
    mapped = getattr(address, "ipv4_mapped", None)
    return mapped or address
