"""How a teacher server is set up."""

from __future__ import annotations

import math
from dataclasses import dataclass

from edl.errors import SettingsError

__all__ = ["ServerSettings"]


@dataclass(frozen=True)
class ServerSettings:
    """Everything that a teacher server can be told.

    Attributes:
        model: the name that requests must ask for.
        host: address to listen on; "0.0.0.0" or "[::]" for all.
        port: TCP port, 0 for a free one.
        uds: path of a Unix socket to listen on as well; None for none.
        max_batch_rows: the most rows in one call of the backend. A request with more is computed in parts.
        max_delay_s: how long the first request of a batch waits for others to join it, while the model is idle. With 0
            a batch is what gathered while the model was busy.
        max_queue_rows: rows that may wait. Beyond it requests are refused with UNAVAILABLE and a hint when to retry;
            a request with more rows than this on its own is INVALID_ARGUMENT.
        max_message_bytes: the largest request in bytes.
        check_nan: answer INTERNAL rather than NaN.
        shared_memory: let clients on this host pass tensors through system shared memory.
        max_regions, max_region_bytes: how many regions may be registered, and how large all of them together.
        drain_timeout_s: how long SIGTERM waits for what is in flight.
        metrics_port: serve Prometheus metrics over HTTP on this port (0 for a free one); None for not at all.
        metrics_host: address for that.

    Raises:
        SettingsError: names the setting, its value, and what is accepted.
    """

    model: str
    host: str = "127.0.0.1"
    port: int = 0
    uds: str | None = None
    max_batch_rows: int = 64
    max_delay_s: float = 0.0
    max_queue_rows: int = 1024
    max_message_bytes: int = 512 << 20
    check_nan: bool = True
    shared_memory: bool = True
    max_regions: int = 256
    max_region_bytes: int = 16 << 30
    drain_timeout_s: float = 30.0
    metrics_port: int | None = None
    metrics_host: str = "127.0.0.1"

    def __post_init__(self) -> None:
        if not self.model:
            raise SettingsError("model='' : a served model needs a name")
        for name in ("max_batch_rows", "max_queue_rows", "max_message_bytes", "max_regions", "max_region_bytes"):
            self._check(name, 1, math.inf)
        self._check("max_message_bytes", 1, 2**31 - 1)
        self._check("max_delay_s", 0, 60)
        self._check("drain_timeout_s", 0, 86400)
        self._check("port", 0, 65535)
        if self.metrics_port is not None:
            self._check("metrics_port", 0, 65535)
        if self.max_queue_rows < self.max_batch_rows:
            raise SettingsError(
                f"max_queue_rows={self.max_queue_rows}: must hold a batch, max_batch_rows={self.max_batch_rows}"
            )

    def _check(self, name: str, low: float, high: float) -> None:
        value = getattr(self, name)
        if not low <= value <= high:
            raise SettingsError(f"{name}={value!r}: must be between {low} and {high}")
