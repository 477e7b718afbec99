"""Settings of a proxy: its address, its teachers and its limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from edl.errors import SettingsError
from edl.protocol.channel import is_this_host
from edl.settings import Credentials, is_above_zero

_LABEL_BYTES: Final = 256 << 20  # 512 texts of 512 tokens at k = 64: several steps of a trainer, on any machine
_ENTRY_BYTES: Final = 16  # an id and a value of 4 bytes each, as received and once more per prompt
_LEAST_ROOM: Final = 4096  # tokens, so that a text always fits


@dataclass(frozen=True)
class ProxySettings:
    """Settings of a proxy.

    Attributes:
        services: Maps the name of a model that clients request to the service of the model's teachers, or to the
            `host:port` of each teacher, separated by commas.
        discovery: URL of the registry; None for the default.
        host: Name or address to listen on.
        port: Port to listen on; 0 for a free port.
        top_k: Largest number of entries per position that a request may ask for.
        max_tokens: Largest total number of tokens in requests that are being scored or sent; further requests queue.
            None for the number of tokens whose labels fit in 256 MiB: 131,072 at `top_k=128`.
        timeout_s: Seconds to wait for an answer, including the time in the queue.
        teacher_timeout_s: Seconds that a request waits while no teacher is live.
        version: Version of the model that teachers must have; empty for any version.
        tokenizer: Path or hash of the tokenizer that teachers must have; empty for any tokenizer.
        allowed_hosts: Names, besides localhost, under which clients on this machine may reach the proxy.
        credentials: Certificate and key for HTTPS, and the file of tokens that clients must send.
        teacher_credentials: Credentials for teachers; None for the credentials in the environment.

    Raises:
        SettingsError: a value is out of range, or tokens would cross the network unencrypted.
    """

    services: Mapping[str, str]
    discovery: str | None = None
    host: str = "127.0.0.1"
    port: int = 9000
    top_k: int = 128
    max_tokens: int | None = None
    timeout_s: float = 600.0
    teacher_timeout_s: float = 60.0
    version: str = ""
    tokenizer: str = ""
    allowed_hosts: tuple[str, ...] = ()
    credentials: Credentials = field(default_factory=Credentials)
    teacher_credentials: Credentials | None = None

    def __post_init__(self) -> None:
        for name, low, high in (("port", 0, 65535), ("top_k", 1, 1 << 16), ("max_tokens", 1, 1 << 26)):
            value = getattr(self, name)
            if name == "max_tokens" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                raise SettingsError(f"{name}={value!r}: must be a whole number from {low} to {high}")
        for name in ("timeout_s", "teacher_timeout_s"):
            if not is_above_zero(getattr(self, name)):
                raise SettingsError(f"{name}={getattr(self, name)!r}: must be a number of seconds above 0")
        asks_token = self.credentials.token_file and not self.credentials.allow_insecure_tokens
        if asks_token and not self.credentials.cert and not self.local:
            raise SettingsError(
                f"a proxy on {self.host} accepts no tokens without TLS, because anyone on the network could read them: "
                "set --tls-cert and --tls-key, or --allow-insecure-tokens if the network can be trusted"
            )

    @property
    def room(self) -> int:
        """Largest number of tokens in requests that are being scored or sent."""
        if self.max_tokens is not None:
            return self.max_tokens
        return max(min(_LABEL_BYTES // (_ENTRY_BYTES * self.top_k), 1 << 18), _LEAST_ROOM)

    @property
    def local(self) -> bool:
        """Whether only this machine can reach the proxy."""
        return is_this_host(f"[{self.host}]:0" if ":" in self.host else f"{self.host}:0")
