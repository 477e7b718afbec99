"""Mutual TLS between equals over plain sockets: both sides show a certificate, and believe the same CAs."""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Iterator
from typing import Final

from edl.errors import ProtocolError, SettingsError
from edl.protocol.tls import certificates, verification
from edl.protocol.tls.credentials import CredentialFiles
from edl.settings import Credentials

_ALL_OR_NONE: Final = "set TLS on all nodes or on none"


class PeerTLS:
    """Wraps connections to and from others that have certificates of the same CA. Files are read for every connection.

    Raises:
        SettingsError: a part is missing, or a file cannot be used.
    """

    def __init__(self, credentials: Credentials) -> None:
        if not (credentials.ca and credentials.cert and credentials.key):
            raise SettingsError(
                "TLS between nodes is asked for, and takes all of --tls-ca, --tls-cert and --tls-key (EDL_TLS_CA, "
                "EDL_TLS_CERT, EDL_TLS_KEY): each node is a server and a client to the others"
            )
        self._name = credentials.server_name
        self._ca = credentials.ca
        self._files = CredentialFiles(credentials, serving=True)

    def accepted(self, connection: socket.socket) -> ssl.SSLSocket:
        """Wrap a connection from another. `handshake` is still to come; `connection` is good for nothing any more.

        Raises:
            OSError: the other has hung up.
        """
        material = self._files.current(now=True)
        context = certificates.context_for(material.ca, material.pair, serving=True)
        return context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)

    def connected(self, connection: socket.socket, host: str) -> ssl.SSLSocket:
        """Wrap a connection to another, whose certificate must hold `host`, or the name that is set instead."""
        material = self._files.current(now=True)
        context = certificates.context_for(material.ca, material.pair, serving=False)
        return context.wrap_socket(connection, server_hostname=self._name or host, do_handshake_on_connect=False)

    def handshake(self, connection: ssl.SSLSocket, timeout_s: float) -> None:
        """Wait for the handshake.

        Raises:
            ProtocolError: it came to nothing; says why, and what to do.
            OSError: the connection failed.
        """
        connection.settimeout(timeout_s)
        try:
            with self.explained():
                connection.do_handshake()
        except ssl.SSLCertVerificationError as exc:
            expected = connection.server_hostname or ""
            raise ProtocolError(verification.explain("its certificate", exc, self._ca or "", expected)) from exc
        except ssl.SSLError as exc:
            raise ProtocolError(f"the TLS handshake failed ({certificates.reason_of(exc)}): {_ALL_OR_NONE}") from exc
        except (TimeoutError, ConnectionError) as exc:
            raise ProtocolError(f"no TLS handshake came ({exc or type(exc).__name__}): {_ALL_OR_NONE}") from exc

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Turn the other side's refusal of this side's certificate into words; TLS 1.3 tells it behind the handshake.

        Raises:
            ProtocolError: in place of that.
        """
        try:
            yield
        except ssl.SSLError as exc:
            if "ALERT" not in (exc.reason or ""):
                raise
            own = self._files.explain_certificate()
            remedy = own or "have it issued by a CA that the other node knows, and for this node's name"
            raise ProtocolError(
                f"it does not take this node's certificate ({certificates.reason_of(exc)}): {remedy}"
            ) from exc
