"""What Prometheus is told: https://prometheus.io/docs/practices/naming/."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from edl.errors import SettingsError

__all__ = ["Metrics"]

_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class Metrics:
    """The counters of one server, in a registry of their own.

    Args:
        model: label of every series.
    """

    def __init__(self, model: str) -> None:
        self.registry = CollectorRegistry()
        self._http: tuple[Any, Thread] | None = None
        self._model = model
        self._requests = Counter(
            "edl_teacher_requests", "Requests answered, by outcome.", ["model", "outcome"], registry=self.registry
        )
        self._outcomes: dict[str, Counter] = {}
        self._faults = Counter(
            "edl_teacher_model_faults",
            "Requests that the model failed on: it raised, returned NaN, or an output other than promised.",
            ["model", "kind"],
            registry=self.registry,
        )
        self._rows = self._counter("edl_teacher_rows", "Rows computed.")
        self._batch_rows = self._histogram("edl_teacher_batch_rows", "Rows in one call of the model.", _ROWS)
        self._queue = self._histogram("edl_teacher_queue_seconds", "Time from arrival to batch.", _SECONDS)
        self._compute = self._histogram("edl_teacher_compute_seconds", "Time of one call of the model.", _SECONDS)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, ["model"], registry=self.registry).labels(self._model)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, ["model"], registry=self.registry, buckets=buckets).labels(self._model)

    def watch(self, name: str, text: str, read: Callable[[], float]) -> None:
        """A gauge that is read whenever somebody asks."""
        Gauge(name, text, ["model"], registry=self.registry).labels(self._model).set_function(read)

    def answered(self, outcome: str) -> None:
        """A request ended: "ok", "cancelled", or the status in lower case."""
        counter = self._outcomes.get(outcome)
        if counter is None:
            counter = self._outcomes[outcome] = self._requests.labels(self._model, outcome)
        counter.inc()

    def waited(self, seconds: float) -> None:
        """A request left the queue for a batch."""
        self._queue.observe(seconds)

    def computed(self, rows: int, seconds: float) -> None:
        """The model was called."""
        self._rows.inc(rows)
        self._batch_rows.observe(rows)
        self._compute.observe(seconds)

    def faulted(self, kind: str) -> None:
        """The model failed a request."""
        self._faults.labels(self._model, kind).inc()

    def listen(self, host: str, port: int) -> int:
        """Serve `/metrics`; the port.

        Raises:
            SettingsError: the address cannot be listened on.
        """
        try:
            self._http = start_http_server(port, host, self.registry)
        except OSError as exc:
            raise SettingsError(f"metrics cannot listen on {host}:{port}: {exc.strerror or exc}") from exc
        return int(self._http[0].server_port)

    def close(self) -> None:
        """Stop listening."""
        if self._http is not None:
            server, thread = self._http
            self._http = None
            server.shutdown()
            server.server_close()
            thread.join()
