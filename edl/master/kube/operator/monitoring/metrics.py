"""What an operator counts, for Prometheus."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from edl.kube.responses import Call

__all__ = ["OperatorMetrics"]

_SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""A look at a resource at rest takes two requests of some milliseconds; one that times out takes thirty seconds."""


class OperatorMetrics:
    """An operator's metrics.

    Args:
        registry: to which they are added; None for a registry of their own.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry: Final = registry or CollectorRegistry()
        self._reconciles = Histogram(
            "edl_operator_reconcile_seconds",
            "Seconds that a look at a resource took, with all its requests",
            ["kind"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._failures = Counter(
            "edl_operator_reconcile_failures",
            "Looks at a resource that failed, and are repeated",
            ["kind", "error"],
            registry=self.registry,
        )
        self._requests = Counter(
            "edl_operator_api_requests",
            "Requests of the API server, by the answer's code; code 0 is no answer",
            ["verb", "resource", "code"],
            registry=self.registry,
        )
        self._queue = Gauge(
            "edl_operator_queue_length", "Resources that wait for a look that is due", registry=self.registry
        )
        self._resources = Gauge("edl_operator_resources", "Resources that are worked on", registry=self.registry)

    def watch_queue(self, count_due: Callable[[], int], count_all: Callable[[], int]) -> None:
        """Show the length of a queue."""
        self._queue.set_function(count_due)
        self._resources.set_function(count_all)

    def count_reconcile(self, key: str, seconds: float, error: Exception | None) -> None:
        """Count a look at a resource."""
        kind = key.partition("/")[0]
        self._reconciles.labels(kind).observe(seconds)
        if error is not None:
            self._failures.labels(kind, type(error).__name__).inc()

    def count_request(self, call: Call, code: int) -> None:
        """Count a request of the API server."""
        resource = "discovery" if " " in call.resource else call.resource
        self._requests.labels(call.verb, resource, str(code)).inc()
