"""Who may see the page: a check of the Host header, and tokens, which a browser shows once and a program always.

The page says nothing to a browser that was led to it by another name (DNS rebinding: a stranger's page whose name
suddenly means 127.0.0.1). Addresses are no names, so they cannot be rebound.

What does not belong here: routes (`app`), and reading the files of tokens (`edl.protocol.tls.credentials`).
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

__all__ = ["HostCheck", "TokenCookieCheck"]

_SCHEME: Final = "bearer "


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


class TokenCookieCheck:
    """Tells whether a request shows a token that is valid at this moment.

    A cookie holds no token, but a code made of it with a key of this process: a revoked token's cookie is worth
    nothing, and neither is any cookie after a restart.

    Args:
        files: with the tokens, read again when they change.
        port: of the server; cookies of a host are the same on all of its ports, so it is in the name.
    """

    def __init__(self, files: CredentialFiles, port: int) -> None:
        self._files = files
        self._key = secrets.token_bytes(32)
        self.cookie: Final = f"edl_dashboard_{port}"

    def cookie_value(self, token: str) -> str | None:
        """Return the cookie for a token; None where the token is not valid.

        Args:
            token: as somebody typed it.
        """
        digest = self._digest(token.strip())
        return digest if self._matches(digest) else None

    def allows(self, authorization: str | None, cookie: str | None) -> bool:
        """Return whether a request may be answered.

        Args:
            authorization: the header's value; None without.
            cookie: the value of `cookie`; None without.
        """
        if authorization is not None and authorization[: len(_SCHEME)].lower() == _SCHEME:
            return self._matches(self._digest(authorization[len(_SCHEME) :].strip()))
        return cookie is not None and self._matches(cookie)

    def _matches(self, digest: str) -> bool:
        shown = digest.encode()
        # All of them, so that the place of a token does not show in the time.
        matches = [hmac.compare_digest(shown, self._digest(token).encode()) for token in self._files.current().tokens]
        return any(matches)

    def _digest(self, token: str) -> str:
        return hmac.new(self._key, token.encode(errors="replace"), hashlib.sha256).hexdigest()


def _name(header: str) -> str:
    """Return the host in `host`, `host:port`, `[::1]` or `[::1]:port`, in lower case."""
    if header.startswith("["):
        return header[1:].partition("]")[0].lower()
    if header.count(":") > 1:  # an IPv6 address without brackets
        return header.lower()
    return header.partition(":")[0].lower().rstrip(".")
