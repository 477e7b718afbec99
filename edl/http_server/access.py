"""Whom an HTTP server answers: the name in the Host header, pages of other sites, and tokens.

A browser can be led to a server that asks for no token: a page of any site may send requests to 127.0.0.1 (they carry
`Origin`), and its own name may suddenly mean that address (DNS rebinding), so that the browser takes both for one site.
Then the Host header has the stranger's name. An address is not a name, so it cannot be rebound.
"""

from __future__ import annotations

import base64
import hmac
import ipaddress
import socket
from collections.abc import Iterable

from edl.protocol.tls import CredentialFiles


class HostCheck:
    """Tells whether the name in a Host header is this server's.

    Args:
        local: Whether the server listens on a loopback address, which no other name or address reaches.
        allowed: Further names, with or without a port.
    """

    def __init__(self, local: bool, allowed: Iterable[str] = ()) -> None:
        self._local = local
        self._names = {"localhost", *(_name(name) for name in allowed)}
        if not local:
            self._names |= {socket.gethostname().lower().rstrip(".")}

    def allows(self, header: str | None) -> bool:
        """Return whether a request with this value of Host, or with none, may be answered."""
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
    """Tells whether a request shows a token that is valid at this moment; files are read again when they change.

    Programs send `Bearer TOKEN`. A browser that is asked for `Basic` credentials (RFC 7617) sends a token as the
    password, with any name.
    """

    def __init__(self, files: CredentialFiles) -> None:
        self._files = files

    def allows(self, authorization: str | None) -> bool:
        """Return whether a request with this value of Authorization, or with none, may be answered."""
        scheme, _, value = (authorization or "").partition(" ")
        token = value.strip().encode(errors="replace")
        if scheme.lower() == "basic":
            try:
                token = base64.b64decode(token, validate=True).partition(b":")[2]
            except ValueError:
                return False
        elif scheme.lower() != "bearer":
            return False
        # All of them, so that the place of a token does not show in the time.
        matches = [hmac.compare_digest(token, known.encode()) for known in self._files.current().tokens]
        return any(matches)


def _name(header: str) -> str:
    """Return the host in `host`, `host:port`, `[::1]` or `[::1]:port`, in lower case."""
    if header.startswith("["):
        return header[1:].partition("]")[0].lower()
    if header.count(":") > 1:  # an IPv6 address without brackets
        return header.lower()
    return header.partition(":")[0].lower().rstrip(".")
