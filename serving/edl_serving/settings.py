"""The settings of a teacher server."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from edl.errors import SettingsError
from edl.protocol.channel import is_this_host
from edl.settings import Credentials

_ROOM = ("max_queue_bytes", "max_client_bytes")
_LEAST_ROOM_BYTES = 1 << 30
"""Enough bytes for six batches of 256 float32 images; by default, a student has three such batches in flight."""
_DAY_S = 86_400
_BOUNDS: dict[str, tuple[float, float]] = {
    "max_message_bytes": (8192, 2**31 - 1),
    **dict.fromkeys(("max_batch_rows", "max_queue_rows", "max_connections", "max_streams"), (1, math.inf)),
    **dict.fromkeys(_ROOM, (1, math.inf)),
    "max_delay_s": (0, 60),
    "drain_timeout_s": (0, _DAY_S),
    **dict.fromkeys(("canary_s", "canary_timeout_s"), (0.01, _DAY_S)),  # else the canary would keep the model busy
    # Kubernetes probes at most once a second, so a shorter limit would be noticed only by chance.
    "stall_timeout_s": (1, 365 * _DAY_S),
    **dict.fromkeys(("port", "channel_port", "metrics_port"), (0, 65535)),
    "max_connection_age_s": (1, 365 * _DAY_S),
}


@dataclass(frozen=True)
class ServerSettings:
    """All settings of a teacher server.

    Attributes:
        model: Name that requests must ask for.
        host, port: Address to listen on ("0.0.0.0" or "[::]" for all addresses), and TCP port (0 for a free port).
        tensor_channel: Also accept requests from EDL's students over a plain socket, which costs a fraction of what
            gRPC costs.
        channel_port: TCP port of that socket, on `host`; 0 for a free port.
        max_batch_rows: Maximum number of rows in one call of the backend. A request with more rows is computed in
            parts.
        max_delay_s: Seconds for which the first request of a batch waits for other requests to join the batch, while
            the model is idle.
        max_queue_rows: Rows that may wait in the queue. Further requests are refused with UNAVAILABLE and a hint about
            when to retry. A single request with more rows is refused with INVALID_ARGUMENT.
        max_queue_bytes: Bytes that waiting requests and their future answers may take. Further requests are refused
            with UNAVAILABLE. A request that is too large only because of its answer waits alone; a request that is too
            large even without its answer is refused with INVALID_ARGUMENT. Tensors in shared memory count only if they
            are copied. 0 stands for the default: 1 GiB, or twice `max_message_bytes` if that is more.
        max_message_bytes: Bytes of the largest request.
        max_connections: Clients with open calls. Further clients are refused with RESOURCE_EXHAUSTED, except for checks
            of health and readiness.
        max_streams: Open streams and tensor channels of all clients together. Further streams and channels are also
            refused with RESOURCE_EXHAUSTED.
        max_client_bytes: Bytes of one client's unanswered requests and of its answers that have not been sent yet.
            Further requests are also refused with RESOURCE_EXHAUSTED. 0 stands for the same default as for
            `max_queue_bytes`.
        check_nan: Answer with the error INTERNAL if an output contains NaN.
        shared_memory: Let clients on this host pass tensors through system shared memory.
        shared_memory_users: Ids of users whose shared memory is accepted, in addition to the server's own user. Their
            shared memory is copied, because these users could otherwise crash the server by truncating it.
        drain_timeout_s: Seconds that the server waits for requests in flight after SIGTERM.
        metrics_host, metrics_port: Address and port (0 for a free port) for Prometheus metrics, `/livez` and `/readyz`
            over HTTP; None to open no port.
        credentials: Certificate, key and tokens. With a `ca`, only clients with a certificate from this CA are served
            (mutual TLS). The files are read again when they change.
        open_health: Let clients use the health service without a token.
        max_connection_age_s: Seconds after which a connection with mutual TLS is closed. A revoked certificate stays
            usable on existing connections for this long.
        canary_s: Seconds between two sample rows that are run through the model; the server is ready only while the
            model answers these rows. None to send no sample rows.
        canary_timeout_s: Seconds that a sample row may take, including the wait in the queue.
        stall_timeout_s: Seconds that a call of the model, or its warm-up, may take before `/livez` fails.
        access_log: File to which a line of JSON is written for each request; "-" for standard output, None for none.

    Raises:
        SettingsError: A setting is invalid. The message names the setting, its value, and what is accepted.
    """

    model: str
    host: str = "127.0.0.1"
    port: int = 0
    tensor_channel: bool = True
    channel_port: int = 0
    max_batch_rows: int = 64
    max_delay_s: float = 0.0
    max_queue_rows: int = 1024
    max_queue_bytes: int = 0
    max_message_bytes: int = 512 << 20
    max_connections: int = 1024
    max_streams: int = 1024
    max_client_bytes: int = 0
    check_nan: bool = True
    shared_memory: bool = True
    shared_memory_users: tuple[int, ...] = ()
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
        if not self.model:
            raise SettingsError("model='': a served model needs a name")
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
                f"tokens without TLS on {self.host}: anyone who reads the network gets them. Give the teacher a "
                "certificate (--tls-cert, --tls-key), or listen on 127.0.0.1, or say that the network may be trusted "
                "(--allow-insecure-tokens)"
            )
        if self.max_queue_rows < self.max_batch_rows:
            raise SettingsError(
                f"max_queue_rows={self.max_queue_rows}: smaller than a batch, max_batch_rows={self.max_batch_rows} "
                "(edl serve --max-queue, --max-batch)"
            )
        for name in _ROOM:
            if getattr(self, name) < self.max_message_bytes:
                raise SettingsError(
                    f"{name}={getattr(self, name)}: smaller than a message, max_message_bytes={self.max_message_bytes} "
                    f"(edl serve --{name.replace('_', '-')}, --max-message)"
                )


def authority(host: str, port: int) -> str:
    """Return `host:port` in gRPC's format; an IPv6 address gets brackets if `host` has none."""
    host = host.strip("[]")
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
