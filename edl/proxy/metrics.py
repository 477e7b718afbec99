"""What Prometheus sees of a proxy, beside its scorer's counters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

__all__ = ["ProxyMetrics"]

_SECONDS: Final = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
"""From a short prompt on an idle GPU to the longest batch behind a full queue."""


class ProxyMetrics:
    """Counters and gauges of a proxy, in a registry of their own.

    Args:
        tokens_inside: tokens that are held now.
        tokens_waiting: tokens of requests that wait for room now.

    Attributes:
        registry: of these.
    """

    def __init__(self, tokens_inside: Callable[[], float], tokens_waiting: Callable[[], float]) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "edl_proxy_requests", "Requests for scores by status.", ["status"], registry=self.registry
        )
        self._tokens = Counter("edl_proxy_tokens", "Tokens that were scored and sent.", registry=self.registry)
        self._seconds = Histogram(
            "edl_proxy_request_seconds", "Until the last byte was sent.", buckets=_SECONDS, registry=self.registry
        )
        inside = Gauge("edl_proxy_tokens_held", "Asked of teachers or being sent.", registry=self.registry)
        inside.set_function(tokens_inside)
        waiting = Gauge("edl_proxy_tokens_waiting", "Of requests that wait for room.", registry=self.registry)
        waiting.set_function(tokens_waiting)

    def record(self, status: int, tokens: int, seconds: float) -> None:
        """Count a request.

        Args:
            status: of HTTP; 499 for a client that went away, as nginx has it.
            tokens: that were sent.
            seconds: since it came.
        """
        self._requests.labels(str(status)).inc()
        self._tokens.inc(tokens)
        if tokens:
            self._seconds.observe(seconds)
