"""Where the page is served, and to whom."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from edl.errors import SettingsError
from edl.kube.settings import KubeSettings
from edl.protocol.channel import is_this_host
from edl.settings import Credentials

__all__ = ["DEFAULT_PORT", "DashboardSettings"]

DEFAULT_PORT: Final = 8650
"""Of `edl dashboard`: free on most machines, as no well-known service has it."""


@dataclass(frozen=True)
class DashboardSettings:
    """Settings of a page.

    Attributes:
        store: URL of the Store whose jobs are shown.
        registry: URL at which teachers register; None for the Store's.
        host: a name or an address to listen on; with 127.0.0.1 only this machine reaches the page.
        port: 0 for a free port.
        job: the only job to show; None for all.
        allowed_hosts: names, besides this machine's, by which browsers may ask for the page.
        credentials: certificate and key for HTTPS, and the file of tokens, any of which opens the page.
        kube: which cluster's jobs and pools to show as well; None for none.
        kube_namespaces: whose jobs and pools these are, an empty one for that of `kube`; none for that alone.
        store_credentials: what a Store that an agent of `edl run` serves is shown; None for what the environment names.

    Raises:
        SettingsError: the port is none, or tokens would cross the network as they are.
    """

    store: str
    registry: str | None = None
    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    job: str | None = None
    allowed_hosts: tuple[str, ...] = ()
    credentials: Credentials = field(default_factory=Credentials)
    store_credentials: Credentials | None = None
    kube: KubeSettings | None = None
    kube_namespaces: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.port, bool) or not isinstance(self.port, int) or not 0 <= self.port <= 65535:
            raise SettingsError(f"port {self.port!r}: must be a whole number from 0 to 65535")
        asks_token = self.credentials.token_file and not self.credentials.allow_insecure_tokens
        if asks_token and not self.credentials.cert and not self.local:
            raise SettingsError(
                f"a page on {self.host} takes no tokens without TLS, where whoever reads the network has them: set "
                "--tls-cert and --tls-key, or say that the network may be trusted (--allow-insecure-tokens)"
            )

    @property
    def local(self) -> bool:
        """Whether only this machine reaches the page."""
        return is_this_host(f"[{self.host}]:0" if ":" in self.host else f"{self.host}:0")
