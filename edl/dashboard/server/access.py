"""Who may see the page: tokens, which a browser shows once and a program always.

What does not belong here: routes (`app`), and the check of names (`edl.http_server.access`).
"""

from __future__ import annotations

from typing import Final

from edl.http_server.access import SCHEME, BearerTokenCheck
from edl.protocol.tls.credentials import CredentialFiles

__all__ = ["TokenCookieCheck"]


class TokenCookieCheck(BearerTokenCheck):
    """Tells whether a request shows a token, or a cookie that was given for a token, that is valid at this moment.

    A cookie holds no token, but a code made of it with a key of this process: a revoked token's cookie is worth
    nothing, and neither is any cookie after a restart.

    Args:
        files: with the tokens, read again when they change.
        port: of the server; cookies of a host are the same on all of its ports, so it is in the name.
    """

    def __init__(self, files: CredentialFiles, port: int) -> None:
        super().__init__(files)
        self.cookie: Final = f"edl_dashboard_{port}"

    def cookie_value(self, token: str) -> str | None:
        """Return the cookie for a token; None where the token is not valid.

        Args:
            token: as somebody typed it.
        """
        digest = self.digest(token.strip())
        return digest if self.matches(digest) else None

    def allows(self, authorization: str | None, cookie: str | None) -> bool:
        """Return whether a request may be answered.

        Args:
            authorization: the header's value; None without.
            cookie: the value of `cookie`; None without.
        """
        if authorization is not None and authorization[: len(SCHEME)].lower() == SCHEME:
            return self.allows_header(authorization)
        return cookie is not None and self.matches(cookie)
