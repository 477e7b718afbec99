"""Where a served Store is, from its URL, and what this side shows to it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final
from urllib.parse import SplitResult

from edl.errors import SettingsError
from edl.settings import Credentials

__all__ = ["DEFAULT_PORT", "FORMAT", "SERVICE", "ServedTarget", "store_credentials"]

SERVICE: Final = "edl.store.v1.Store"
FORMAT: Final = 1
"""Of the protocol; a client of another one is told so, where it would misread answers otherwise."""

DEFAULT_PORT: Final = 29400
"""torch's own for a rendezvous (`torch.distributed.elastic`)."""


def store_credentials(credentials: Credentials) -> Credentials:
    """Return what of a process's credentials is for a served store: mutual TLS, where all of it is set, and tokens.

    A CA alone, or a certificate alone, is for teachers.
    """
    if credentials.ca and credentials.cert:
        return credentials
    return Credentials(token_file=credentials.token_file, allow_insecure_tokens=credentials.allow_insecure_tokens)


@dataclass(frozen=True)
class ServedTarget:
    """A served store as a client sees it."""

    host: str
    port: int
    timeout_s: float
    credentials: Credentials = field(default_factory=Credentials)

    def __str__(self) -> str:
        return f"the store at {self.endpoint}"

    @property
    def endpoint(self) -> str:
        """Host and port as gRPC takes them."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        """What opens it again."""
        return f"edl://{self.endpoint}"

    @classmethod
    def of(cls, parts: SplitResult, timeout_s: float, credentials: Credentials | None = None) -> ServedTarget:
        """Take a URL apart.

        Args:
            parts: of the URL.
            timeout_s: for a call, in seconds.
            credentials: of this side; None for what the environment names.

        Raises:
            SettingsError: the URL cannot be used. The message repeats no password and no query.
        """
        where = f"discovery URL {parts.scheme}://{parts.netloc.rpartition('@')[2]}"
        if "@" in parts.netloc:
            raise SettingsError(f"{where}: a URL is no place for a password; name a file of tokens in EDL_TOKEN_FILE")
        if parts.path not in ("", "/") or parts.query or parts.fragment:
            raise SettingsError(f"{where}: a host and a port are expected, and nothing else")
        try:
            port = DEFAULT_PORT if parts.port is None else parts.port
        except ValueError as exc:
            raise SettingsError(f"{where}: {exc}") from exc
        if not parts.hostname:
            raise SettingsError(f"{where}: the host is missing; expected is edl://host:{DEFAULT_PORT}")
        if port == 0:
            raise SettingsError(f"{where}: a port from 1 to 65535 is expected")
        own = store_credentials(Credentials.of() if credentials is None else credentials)
        return cls(parts.hostname, port, timeout_s, own)
