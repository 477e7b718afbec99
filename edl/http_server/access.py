"""Who is answered: a check of the Host header, and tokens.

A server that asks for no token says nothing to a browser that was led to it by another name (DNS rebinding: a
stranger's page whose name suddenly means 127.0.0.1). Addresses are no names, so they cannot be rebound.

What does not belong here: reading the files of tokens (`edl.protocol.tls.credentials`).
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import secrets
import socket
from collections.abc import Iterable
from typing import Final

from edl.protocol.tls.credentials import CredentialFiles

__all__ = ["SCHEME", "BearerTokenCheck", "HostCheck"]

SCHEME: Final = "bearer "
"""Begins the value of Authorization, in any case."""


class HostCheck:
    """Tells whether the name in a Host header is this server's.

    Args:
        local: the server listens on a loopback address, where other names and addresses are no way to reach it.
        allowed: further names, with or without a port.
    """

    def __init__(self, local: bool, allowed: Iterable[str] = ()) -> None:
        self._local = local
        self._names = {"localhost", *(_name(name) for name in allowed)}
        if not local:
            self._names |= {socket.gethostname().lower().rstrip(".")}

    def allows(self, header: str | None) -> bool:
        """Return whether a request may be answered.

        Args:
            header: the value of Host; None without.
        """
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
    """Tells whether a request shows a token that is valid at this moment.

    Args:
        files: with the tokens, read again when they change.
    """

    def __init__(self, files: CredentialFiles) -> None:
        self._files = files
        self._key = secrets.token_bytes(32)

    def allows_header(self, authorization: str | None) -> bool:
        """Return whether a request may be answered.

        Args:
            authorization: the header's value; None without.
        """
        if authorization is None or authorization[: len(SCHEME)].lower() != SCHEME:
            return False
        return self.matches(self.digest(authorization[len(SCHEME) :].strip()))

    def matches(self, digest: str) -> bool:
        """Return whether a digest is that of a valid token.

        Args:
            digest: as somebody showed it.
        """
        shown = digest.encode()
        # All of them, so that the place of a token does not show in the time.
        matches = [hmac.compare_digest(shown, self.digest(token).encode()) for token in self._files.current().tokens]
        return any(matches)

    def digest(self, token: str) -> str:
        """Return the digest of a token, made with a key of this process.

        Args:
            token: as somebody showed it.
        """
        return hmac.new(self._key, token.encode(errors="replace"), hashlib.sha256).hexdigest()


def _name(header: str) -> str:
    """Return the host in `host`, `host:port`, `[::1]` or `[::1]:port`, in lower case."""
    if header.startswith("["):
        return header[1:].partition("]")[0].lower()
    if header.count(":") > 1:  # an IPv6 address without brackets
        return header.lower()
    return header.partition(":")[0].lower().rstrip(".")
