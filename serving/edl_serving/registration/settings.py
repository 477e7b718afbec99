"""How a server shows in discovery."""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field

from edl.discovery import Instance
from edl.discovery.records import check_ttl, validated
from edl.settings import LoadSettings

__all__ = ["RegistrationSettings"]


@dataclass(frozen=True)
class RegistrationSettings:
    """How a server shows in discovery.

    Attributes:
        service: the name that students look up.
        url: of the registry; None to stay out of discovery.
        ttl_s: after which others see a server gone that is not renewed.
        id: unique within the service; None for this host's name and the port, which stays the same after a restart.
        capacity: weight of the server; 2 takes twice the students of 1.
        tags: free text.
        meta: keys and values that students can read.
        load: whether and how the server publishes its load.
    """

    service: str
    url: str | None
    ttl_s: float = 10.0
    id: str | None = None
    capacity: float = 1.0
    tags: tuple[str, ...] = ()
    meta: Mapping[str, str] = field(default_factory=dict)
    load: LoadSettings = field(default_factory=LoadSettings)

    def check(self, address: str) -> None:
        """Refuse what no registry takes, before a large model is loaded.

        Args:
            address: of the server, or `unix:/path`.

        Raises:
            SettingsError: names the value.
        """
        if self.url is not None:
            check_ttl(self.ttl_s)
            validated(self.instance(address, 0 if address.startswith("unix:") else 1, model="", meta={}))

    def instance(self, address: str, port: int, model: str, meta: Mapping[str, str]) -> Instance:
        """Build the instance to register.

        Args:
            address: host name, address or `unix:/path`.
            port: 0 for a Unix socket.
            model: name of the model.
            meta: gives way to the keys that the user set.

        Returns:
            The instance, in state "ready".
        """
        return Instance(
            service=self.service,
            id=self.id or re.sub(r"[^A-Za-z0-9.-]+", "-", f"{socket.gethostname()}-{port}").strip("-"),
            address=address,
            port=port,
            capacity=self.capacity,
            model=model,
            tags=self.tags,
            meta={**meta, **self.meta},
        )
