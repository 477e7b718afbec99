"""Checks access to HTTP servers: the name in the Host header, and tokens.

A website can make a browser send requests to a server that requires no token. A page from any site can send requests to
127.0.0.1 (these requests contain `Origin`). A site can also rebind its own name to that address (DNS rebinding), so
that the browser treats the site and the server as one site. Then the Host header contains the site's name. An IP
address is not a name and cannot be rebound.
"""

from __future__ import annotations

import base64
import ipaddress
import socket
from collections.abc import Iterable

from edl.protocol.tls import CredentialFiles


class HostCheck:
    """Checks whether a Host header names this server or is in `allowed`. With `local`, it listens on loopback only."""

    def __init__(self, local: bool, allowed: Iterable[str] = ()) -> None:
        self._local = local
        self._names = {"localhost", *(_name(name) for name in allowed)}
        if not local:
            self._names |= {socket.gethostname().lower().rstrip(".")}

    def allows(self, header: str | None) -> bool:
        """Return whether to answer a request with this Host header (None if missing)."""
        if not header:
            return False
        name = _name(header)
        if name in self._names:
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return False
        return address.is_loopback or not self._local


class TokenCheck:
    """Checks whether a request contains a currently valid token; changed token files are read again.

    Programs send `Bearer TOKEN`. If a browser is asked for `Basic` credentials (RFC 7617), it sends a token as the
    password, with any user name.
    """

    def __init__(self, files: CredentialFiles) -> None:
        self._files = files

    def allows(self, authorization: str | None) -> bool:
        """Return whether to answer a request with this Authorization header (None if missing)."""
        scheme, _, value = (authorization or "").partition(" ")
        token = value.strip().encode(errors="replace")
        if scheme.lower() == "basic":
            try:
                token = base64.b64decode(token, validate=True).partition(b":")[2]
            except ValueError:
                return False
        elif scheme.lower() != "bearer":
            return False
        return self._files.accepts(token)


def _name(header: str) -> str:
    """Return the host in `host`, `host:port`, `[::1]` or `[::1]:port`, in lower case."""
    if header.startswith("["):
        return header[1:].partition("]")[0].lower()
    if header.count(":") > 1:  # an IPv6 address without brackets
        return header.lower()
    return header.partition(":")[0].lower().rstrip(".")
