"""Where a server listens, and whether it can."""

from __future__ import annotations

import contextlib
import errno
import socket
from dataclasses import dataclass

from edl.errors import DiscoveryError, SettingsError

__all__ = ["ListenAddress", "PortTakenError", "open_listener"]


class PortTakenError(DiscoveryError):
    """Another program listens at the port."""


@dataclass(frozen=True)
class ListenAddress:
    """Where a server listens: an IP address, `::` for all of this host's, IPv4 as well; port 0 for any."""

    host: str
    port: int

    @property
    def endpoint(self) -> str:
        """Host and port as gRPC takes them."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def check_free(self) -> None:
        """Find out whether a server can listen here; gRPC does not say why it cannot.

        Raises:
            PortTakenError: another program listens here.
            SettingsError: it cannot for another reason.
        """
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
                raise PortTakenError(f"port {self.port} of this host is taken by another program") from exc
            if exc.errno == errno.EAFNOSUPPORT and self.host == "::":
                ListenAddress("0.0.0.0", self.port).check_free()
                return
            raise SettingsError(f"the store cannot listen at {self.endpoint}: {exc.strerror or exc}") from exc


def open_listener(backlog: int | None = None) -> socket.socket:
    """Listen at all of this host's addresses, IPv4 and IPv6, at a port that the system chooses."""
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=backlog)
    return socket.create_server(("", 0), backlog=backlog)
