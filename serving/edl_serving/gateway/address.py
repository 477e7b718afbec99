"""The address of an engine: `vllm://host:port`, `sglang://host:port`, with `+https` for TLS."""

from __future__ import annotations

import re
from dataclasses import dataclass

from edl.errors import SettingsError

__all__ = ["EngineAddress", "names_engine"]

_URL = re.compile(
    r"(?P<kind>vllm|sglang)(?P<tls>\+https)?://(?P<host>\[[0-9A-Fa-f:.%\w]+\]|[^\s:/\[\]@?#]+):(?P<port>\d{1,5})/?"
)


@dataclass(frozen=True)
class EngineAddress:
    """Where an engine listens, and which protocol it speaks.

    Attributes:
        kind: "vllm" or "sglang".
        host: name or address, IPv6 in brackets.
        port: of HTTP.
        tls: whether it speaks HTTPS.
    """

    kind: str
    host: str
    port: int
    tls: bool = False

    @classmethod
    def parse(cls, text: str) -> EngineAddress:
        """Parse an address.

        Args:
            text: `vllm://host:port` or `sglang://host:port`; `vllm+https://` and `sglang+https://` for TLS.

        Raises:
            SettingsError: the text is something else.
        """
        match = _URL.fullmatch(text)
        if match is None or not 0 < int(match["port"]) < 65536:
            raise SettingsError(
                f"{text!r}: expected vllm://host:port or sglang://host:port (vllm+https:// with TLS), without a path "
                "or a user"
            )
        return cls(match["kind"], match["host"], int(match["port"]), match["tls"] is not None)

    @property
    def base_url(self) -> str:
        """The beginning of the engine's URLs, without a slash at the end."""
        return f"http{'s' if self.tls else ''}://{self.host}:{self.port}"

    def __str__(self) -> str:
        """Return the address as it was parsed."""
        return f"{self.kind}{'+https' if self.tls else ''}://{self.host}:{self.port}"


def names_engine(text: str) -> bool:
    """Return whether `text` is meant as the address of an engine."""
    return re.match(r"(vllm|sglang)(\+\w+)?://", text) is not None
