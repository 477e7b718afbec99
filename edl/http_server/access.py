"""Whom an HTTP server answers: the name in the Host header, pages of other sites, and bearer tokens.

A browser can be led to a server that asks for no token: a page of any site may send requests to 127.0.0.1 (they carry
`Origin`), and its own name may suddenly mean that address (DNS rebinding), so that the browser takes both for one site.
Then the Host header has the stranger's name. An address is not a name, so it cannot be rebound.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import secrets
import socket
from collections.abc import Iterable
from typing import Final

from edl.protocol.tls import CredentialFiles

SCHEME: Final = "bearer "
"""Begins the value of Authorization, in any case."""


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


class BearerTokenCheck:
    """Tells whether a request shows a token that is valid at this moment; files are read again when they change."""

    def __init__(self, files: CredentialFiles) -> None:
        self._files = files
        self._key = secrets.token_bytes(32)

    def allows_header(self, authorization: str | None) -> bool:
        """Return whether a request with this value of Authorization, or with none, may be answered."""
        if authorization is None or authorization[: len(SCHEME)].lower() != SCHEME:
            return False
        return self.matches(self.digest(authorization[len(SCHEME) :].strip()))

    def matches(self, digest: str) -> bool:
        """Return whether a digest is that of a valid token."""
        shown = digest.encode()
        # All of them, so that the place of a token does not show in the time.
        matches = [hmac.compare_digest(shown, self.digest(token).encode()) for token in self._files.current().tokens]
        return any(matches)

    def digest(self, token: str) -> str:
        """Return the digest of a token, made with a key of this process."""
        return hmac.new(self._key, token.encode(errors="replace"), hashlib.sha256).hexdigest()


def _name(header: str) -> str:
    """Return the host in `host`, `host:port`, `[::1]` or `[::1]:port`, in lower case."""
    if header.startswith("["):
        return header[1:].partition("]")[0].lower()
    if header.count(":") > 1:  # an IPv6 address without brackets
        return header.lower()
    return header.partition(":")[0].lower().rstrip(".")
