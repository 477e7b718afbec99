"""Handles a served store's addresses: where to listen, whether a name is this host's, and why no server answers."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

from edl.errors import DiscoveryError, SettingsError

_ANYWHERE: Final = ("192.0.2.1", "2001:db8::1")
"""Addresses reserved for documentation (RFC 5737, RFC 3849): the route to them is the default route."""
_TIMEOUT_S: Final = 2.0
"""Seconds to connect, and then to wait for an answer: a reachable host takes milliseconds, and a user is waiting."""
_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
"""The first bytes that an HTTP/2 client (and so a gRPC client) sends: the preface and a settings frame (RFC 9113,
3.4)."""
_SETTINGS: Final = 4
"""The type of the frame that an HTTP/2 server sends first (RFC 9113, 6.5)."""


class PortTakenError(DiscoveryError):
    """Another program is listening on the port."""


@dataclass(frozen=True)
class ListenAddress:
    """Where a server listens: an IP address, or `::` for all IPv4 and IPv6 addresses; port 0 means any free port."""

    host: str
    port: int

    @property
    def endpoint(self) -> str:
        """Host and port in the form that gRPC accepts."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def check_free(self) -> None:
        """Raise PortTakenError or SettingsError if a server cannot listen here; gRPC does not give the reason."""
        if not 0 <= self.port <= 65535:
            raise SettingsError(f"port {self.port}: expected 0 to 65535")
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
                probe.bind((self.host, self.port))
                probe.listen()
        except OSError as exc:
            if exc.errno == errno.EADDRINUSE:
                raise PortTakenError(f"port {self.port} of this host is in use by another program") from exc
            if exc.errno == errno.EAFNOSUPPORT and self.host == "::":
                ListenAddress("0.0.0.0", self.port).check_free()
                return
            raise SettingsError(f"cannot listen at {self.endpoint}: {exc.strerror or exc}") from exc


def open_listener(backlog: int | None = None) -> socket.socket:
    """Listen on all IPv4 and IPv6 addresses of this host, on a port that the system chooses."""
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=backlog)
    return socket.create_server(("", 0), backlog=backlog)


def is_loopback(host: str) -> bool:
    """Return whether `host` is localhost or a loopback address, at which other hosts cannot reach this host."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_own_host(host: str) -> bool:
    """Return whether `host` is this host by the rules of torch's c10d, or the address of one of its interfaces.

    The result is False for a name that cannot be resolved now, so call this again later.
    """
    if is_loopback(host) or host in (socket.gethostname(), socket.getfqdn()):
        return True
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    return any(_is_own_address(family, address) for family, _, _, _, address in found)


def _is_own_address(family: int, address: tuple[object, ...]) -> bool:
    """Return whether this host can bind to an address.

    A host can bind only to its own addresses, unless the system allows other addresses (`ip_nonlocal_bind`). In that
    case, an agent that serves a store notices when its client reaches a different store
    (`edl.collective.agent.command_line.served_store`).
    """
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address[0], 0, *address[2:]))
    except OSError:
        return False
    return True


def outward_address(servers: Iterable[str]) -> str:
    """Return this host's address on the route to one of a store's servers, or else on the default route.

    Without a route, the result is 127.0.0.1. A server at a loopback address of this host is an agent in a cluster;
    because the other hosts in the cluster cannot reach that address, the default route is used. Nothing is sent:
    connecting a datagram socket only asks the kernel for the route.
    """
    for host in (*servers, *_ANYWHERE):
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


class Diagnosis(NamedTuple):
    """The result of a connection attempt. `words` gives the fault and its remedy; empty if a gRPC server answers.

    `final` means that the fault will not go away by itself; `connected` means that a program is listening.
    """

    words: str
    final: bool = False
    connected: bool = True


def diagnose(host: str, port: int) -> Diagnosis:
    """Connect, and find out what answers. Takes at most about 4 s, plus the resolver's time."""
    try:
        with socket.create_connection((host, port), timeout=_TIMEOUT_S) as connection:
            connection.settimeout(_TIMEOUT_S)
            return _greet(connection, port)
    except socket.gaierror as exc:
        return Diagnosis(
            f"the name {host} cannot be resolved here ({exc.strerror}): correct the name, or use an address",
            connected=False,
        )
    except TimeoutError:
        return Diagnosis(
            f"nothing answers, not even with a refusal: {host} is down, or a firewall drops packets; open TCP port "
            f"{port} of {host} for this node",
            connected=False,
        )
    except ConnectionRefusedError:
        return Diagnosis(
            f"nothing listens on that port: start the same command on {host}; if it already runs there, check that "
            "the ports match",
            connected=False,
        )
    except OSError as exc:
        if exc.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH):
            return Diagnosis(
                f"there is no route to it ({exc.strerror}): check routes and firewalls between this node and {host}",
                connected=False,
            )
        return Diagnosis(f"the connection fails ({exc.strerror or exc})", connected=False)


def _greet(connection: socket.socket, port: int) -> Diagnosis:
    answer = b""
    try:
        connection.sendall(_PREFACE)
        while len(answer) < 9 and (part := connection.recv(9 - len(answer))):
            answer += part
    except TimeoutError:
        return Diagnosis(
            f"the listener there sends nothing: another program (torchrun's own store, perhaps), or an agent that is "
            f"stopped; if another program uses port {port}, choose a different port on all nodes"
        )
    except OSError:
        answer = b""
    with contextlib.suppress(IndexError):
        if answer[3] == _SETTINGS:
            return Diagnosis("")
    if not answer:
        return Diagnosis(
            "connections are accepted and closed at once: by a proxy without a store behind it, or by a program "
            "other than EDL"
        )
    return Diagnosis(
        f"a program other than EDL answers there: choose a port other than {port}, the same on all nodes", final=True
    )
