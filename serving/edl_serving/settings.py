"""The settings of a teacher server."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from edl.errors import SettingsError
from edl.protocol.channel import is_this_host
from edl.settings import Credentials

__all__ = ["ServerSettings", "authority"]
_ROOM = ("max_queue_bytes", "max_client_bytes")
_LEAST_ROOM_BYTES = 1 << 30
"""Six batches of 256 images as float32; by default a student holds half of that ahead."""
_DAY_S = 86_400
_BOUNDS: dict[str, tuple[float, float]] = {
    # A larger message ends the stream that it comes on, and students send bundles of up to 4 kB without asking.
    "max_message_bytes": (8192, 2**31 - 1),
    **dict.fromkeys(("max_batch_rows", "max_queue_rows", "max_connections", "max_streams"), (1, math.inf)),
    **dict.fromkeys(("max_regions", "max_region_bytes", *_ROOM), (1, math.inf)),
    "max_calls": (1, 2**31 - 1),
    "max_delay_s": (0, 60),
    "drain_timeout_s": (0, _DAY_S),
    **dict.fromkeys(("canary_s", "canary_timeout_s"), (0.01, _DAY_S)),  # else the canary would keep the model busy
    # Kubernetes probes once a second at most: a shorter limit would be seen by chance alone.
    "stall_timeout_s": (1, 365 * _DAY_S),
    **dict.fromkeys(("port", "metrics_port"), (0, 65535)),
    "max_connection_age_s": (1, 365 * _DAY_S),
}


@dataclass(frozen=True)
class ServerSettings:
    """Everything that a teacher server can be told.

    Attributes:
        model: Name that requests must ask for.
        host: Address to listen on; "0.0.0.0" or "[::]" for all.
        port: TCP port, 0 for a free one.
        uds: Path of a Unix socket to listen on as well; None for none.
        max_batch_rows: Most rows in one call of the backend. A request with more is computed in parts.
        max_delay_s: Seconds that the first request of a batch waits for others to join it, while the model is idle.
            With 0 a batch is what gathered while the model was busy.
        max_queue_rows: Rows that may wait. Beyond it requests are refused with UNAVAILABLE and a hint when to retry;
            a request with more rows than this on its own is INVALID_ARGUMENT.
        max_queue_bytes: Bytes of requests that may wait, with those that their answers will take; refused likewise. A
            request that only its answer makes too large waits alone; one that is too large without it is
            INVALID_ARGUMENT. Tensors in shared memory count only by their names, as the memory is the client's. 0 for
            1 GiB, or room for two of the largest messages if that is more.
        max_message_bytes: Bytes of the largest request.
        max_connections: Clients with open calls. More are refused with RESOURCE_EXHAUSTED, except for questions about
            health and readiness.
        max_streams: Open streams of all clients together; more are refused likewise.
        max_calls: Open calls of one connection; gRPC makes the client wait with others.
        max_client_bytes: Bytes of one client's requests without an answer, and of its answers not sent yet. The excess
            is refused with RESOURCE_EXHAUSTED. 0 as for `max_queue_bytes`.
        check_nan: Answer INTERNAL rather than NaN.
        shared_memory: Let clients on this host pass tensors through system shared memory.
        shared_memory_users: Ids of users whose shared memory is accepted, besides the server's own user. It is copied,
            as they could otherwise end the server by making it shorter.
        max_regions, max_region_bytes: Most registered regions, and their most bytes together.
        drain_timeout_s: Seconds that SIGTERM waits for requests in flight.
        metrics_port: Port for Prometheus metrics, `/livez` and `/readyz` over HTTP (0 for a free one); None for none.
        metrics_host: Address for that.
        credentials: Certificate, key and tokens; with a `ca` only clients with a certificate of it are served (mutual
            TLS). Files are read again when they change.
        open_health: Answer the health service without a token.
        max_connection_age_s: Seconds that a connection lives with mutual TLS: existing connections keep a revoked
            certificate valid for this long.
        canary_s: Seconds between two rows of the sample that are run through the model; the server is ready only while
            they are answered. None for never.
        canary_timeout_s: Seconds that such a row may take, queueing included.
        stall_timeout_s: Seconds of a call of the model, or of its warm-up, after which `/livez` fails.
        access_log: File for a line of JSON for each request, "-" for standard output; None for none.

    Raises:
        SettingsError: Names the setting, its value, and what is accepted.
    """

    model: str
    host: str = "127.0.0.1"
    port: int = 0
    uds: str | None = None
    max_batch_rows: int = 64
    max_delay_s: float = 0.0
    max_queue_rows: int = 1024
    max_queue_bytes: int = 0
    max_message_bytes: int = 512 << 20
    max_connections: int = 1024
    max_streams: int = 1024
    max_calls: int = 1024
    max_client_bytes: int = 0
    check_nan: bool = True
    shared_memory: bool = True
    shared_memory_users: tuple[int, ...] = ()
    max_regions: int = 256
    max_region_bytes: int = 16 << 30
    drain_timeout_s: float = 30.0
    metrics_port: int | None = None
    metrics_host: str = "127.0.0.1"
    credentials: Credentials = field(default_factory=Credentials)
    open_health: bool = True
    max_connection_age_s: float = 3600.0
    canary_s: float | None = None
    canary_timeout_s: float = 30.0
    stall_timeout_s: float = 1800.0
    access_log: str | None = None

    def __post_init__(self) -> None:
        """Check the settings, and derive those that are left to others."""
        if not self.model:
            raise SettingsError("model='' : a served model needs a name")
        for name in _ROOM:
            if getattr(self, name) == 0:
                object.__setattr__(self, name, max(_LEAST_ROOM_BYTES, 2 * self.max_message_bytes))
        for name, (low, high) in _BOUNDS.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise SettingsError(f"{name}={value!r}: must be between {low} and {high}")
        credentials = self.credentials
        if credentials.token_file and not (
            credentials.cert or credentials.allow_insecure_tokens or is_this_host(authority(self.host, 0))
        ):
            raise SettingsError(
                f"tokens without TLS on {self.host}: anyone who reads the network has them. Give the teacher a "
                "certificate (--tls-cert, --tls-key), or listen on 127.0.0.1, or say that the network may be trusted "
                "(--allow-insecure-tokens)"
            )
        if self.max_queue_rows < self.max_batch_rows:
            raise SettingsError(
                f"max_queue_rows={self.max_queue_rows}: must hold a batch, max_batch_rows={self.max_batch_rows} "
                "(edl serve --max-queue, --max-batch)"
            )
        for name in _ROOM:
            if getattr(self, name) < self.max_message_bytes:
                raise SettingsError(
                    f"{name}={getattr(self, name)}: must hold a message, max_message_bytes={self.max_message_bytes} "
                    f"(edl serve --{name.replace('_', '-')}, --max-message)"
                )


def authority(host: str, port: int) -> str:
    """Return `host:port` as gRPC takes it: an IPv6 address, with brackets or without, in brackets."""
    host = host.strip("[]")
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
