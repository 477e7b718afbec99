"""What it means that a certificate did not verify, in words that say what to do."""

from __future__ import annotations

import ssl
import time
from typing import Final

EXPIRED, NOT_YET_VALID = 10, 9  # X509_V_ERR_*, as those that follow
WRONG_NAME: Final = (62, 64)
"""For a host, for an address."""
_UNTRUSTED: Final = (2, 7, 18, 19, 20, 21)
"""No issuer is found, or one of the same name with another key; self-signed; no trusted CA at the end of the chain."""
_SELF_SIGNED: Final = (18, 19)
"""Of those: the certificate itself, or the last of its chain."""


def explain(what: str, exc: ssl.SSLCertVerificationError, ca: str, expected: str, names: str | None = None) -> str:
    """Say what is wrong with another's certificate, and what to do.

    Args:
        what: the certificate.
        exc: the standard library's error.
        ca: the file of the CAs that are trusted.
        expected: the name that it must hold.
        names: in the certificate, in words; None if they are not known.
    """
    if exc.verify_code == EXPIRED:
        return f"{what} has expired: have a new one issued, and replace its files; that needs no restart"
    if exc.verify_code == NOT_YET_VALID:
        return f"{what} is not valid yet: see its dates, and the clock of this host ({utc_now()})"
    if exc.verify_code in WRONG_NAME:
        holds = "another name" if names is None else f"another name ({names})"
        if names == "":
            holds = "no host name or address (none is in its subjectAltName)"
        return (
            f"{what} is for {holds}, not for {expected!r}: have one issued for {expected!r}, or set the "
            "name that is expected (EDL_TLS_SERVER_NAME, --tls-server-name, server_name=)"
        )
    if exc.verify_code in _UNTRUSTED:
        # A chain that is whole ends with a certificate that signs itself; one that breaks off may lack a link.
        link = (
            ""
            if exc.verify_code in _SELF_SIGNED
            else ", or, if that is an intermediate one, put it behind the certificate in the certificate's own file"
        )
        return (
            f"{what} is signed by no CA in {ca!r} ({exc.verify_message}): add the CA that signed it{link}, or mistrust "
            "whoever answers there"
        )
    return f"{what} is not believed: {exc.verify_message}"


def host_of(endpoint: str) -> str:
    """Return the name that a certificate must hold by default: the host in `host:port`, localhost for `unix:/path`."""
    return "localhost" if endpoint.startswith("unix:") else endpoint.rpartition(":")[0].strip("[]")


def utc_now() -> str:
    """Return the time here, by which a reader of the message sees a clock that is wrong."""
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
