"""The server's metrics for Prometheus: https://prometheus.io/docs/practices/naming/.

The counts are plain numbers that are put together at a scrape. The client library's own counters take a lock for an
increment, which at thousands of requests a second costs more than all of the batching.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from edl.errors import SettingsError
from edl_serving.monitoring.metrics_server import MetricsServer
from edl_serving.monitoring.probes import HealthProbes
from edl_serving.request_error import RequestError

__all__ = ["Metrics", "WorkerMetrics"]

# From a look-up in memory to a language model's batch, three a decade: quantiles are right within a factor of 2.5.
_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
_MOST_TRIES = 10  # to read a gauge; each fails with some small chance
# Powers of two, up to the default of --max-queue.
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class _Buckets:
    """A histogram that a single thread writes."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


class WorkerMetrics:
    """Counts what a worker thread does; only that thread may call the methods.

    Attributes:
        rows: computed.
        faults: by kind.
        batch_rows: histogram of rows in a call of the model.
        queue_s: histogram of seconds from arrival to batch.
        compute_s: histogram of seconds of a call of the model.
        computing_since_s: `time.monotonic()` when the call of the model under way began; None between calls.
    """

    def __init__(self) -> None:
        self.computing_since_s: float | None = None
        self.rows = 0
        self.faults: Counter[str] = Counter()
        self.batch_rows = _Buckets(_ROWS)
        self.queue_s = _Buckets(_SECONDS)
        self.compute_s = _Buckets(_SECONDS)

    def record_queue_time(self, seconds: float) -> None:
        """Count a request that left the queue for a batch, after `seconds`."""
        self.queue_s.observe(seconds)

    def record_batch(self, rows: int, seconds: float) -> None:
        """Count a call of the model with `rows` that took `seconds`."""
        self.rows += rows
        self.batch_rows.observe(rows)
        self.compute_s.observe(seconds)

    def record_fault(self, kind: str) -> None:
        """Count a request that the model failed.

        Args:
            kind: "exception", "nan" or "output" (missing, or other than promised).
        """
        self.faults[kind] += 1


class Metrics(Collector):
    """Collects the counts of a server, in a registry of their own.

    Args:
        model: label of all series.
        clock: returns seconds, and has the zero of `WorkerMetrics.computing_since_s`.

    Attributes:
        registry: of the Prometheus client library.
        probes: what `/livez` and `/readyz` beside `/metrics` answer.
    """

    def __init__(self, model: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.registry = CollectorRegistry()
        self.probes = HealthProbes()
        self._model = model
        self._outcomes: Counter[str] = Counter()
        self._refusals: Counter[str] = Counter()
        self._workers: list[WorkerMetrics] = []
        self._gauges: list[tuple[str, str, Callable[[], float]]] = []
        self._http: MetricsServer | None = None
        self.registry.register(self)

    def add_worker(self) -> WorkerMetrics:
        """Return counters for a further worker."""
        self._workers.append(WorkerMetrics())
        return self._workers[-1]

    def add_gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        """Add a gauge that is read at a scrape.

        Args:
            name: of the series.
            text: its help.
            read: returns the value; called in another thread.
        """
        self._gauges.append((name, text, read))

    def computed(self) -> tuple[int, float]:
        """Return the rows that were computed, and the seconds that it took, summed over workers. From any thread."""
        workers = self._workers
        return sum(worker.rows for worker in workers), sum(worker.compute_s.sum for worker in workers)

    def find_stall(self, limit_s: float) -> str:
        """Return in words which call of the model takes longer than it may; empty if none does. From any thread.

        Args:
            limit_s: how long a call may take, in seconds.
        """
        now_s = self._clock()
        for worker in self._workers:
            since_s = worker.computing_since_s
            if since_s is not None and now_s - since_s > limit_s:
                return f"a call of the model takes {now_s - since_s:,.0f} s already, and {limit_s:g} s are the limit"
        return ""

    def record_outcome(self, outcome: str) -> None:
        """Count a request that ended. For the event loop's thread only.

        Args:
            outcome: "ok", "cancelled", or the status in lower case.
        """
        self._outcomes[outcome] += 1

    def record_error(self, error: RequestError) -> None:
        """Count a request that ended with an error. For the event loop's thread only."""
        self._outcomes[error.code.name.lower()] += 1
        self._refusals[error.reason] += 1

    def record_rejected_call(self, error: RequestError) -> None:
        """Count a call without a request that ended with an error. For the event loop's thread only."""
        self._refusals[error.reason] += 1

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of a scrape."""
        requests = CounterMetricFamily(
            "edl_teacher_requests", "Requests answered, by outcome.", labels=["model", "outcome"]
        )
        for outcome, count in sorted(self._outcomes.copy().items()):
            requests.add_metric([self._model, outcome], count)
        yield requests
        refusals = CounterMetricFamily(
            "edl_teacher_refusals",
            "Requests and calls that ended with an error.",
            labels=["model", "reason"],
        )
        for reason, count in sorted(self._refusals.copy().items()):
            refusals.add_metric([self._model, reason], count)
        yield refusals
        faults = CounterMetricFamily(
            "edl_teacher_model_faults",
            "Requests that the model failed: it raised, answered NaN, or an output other than promised.",
            labels=["model", "kind"],
        )
        for kind in ("exception", "nan", "output"):
            faults.add_metric([self._model, kind], sum(worker.faults[kind] for worker in self._workers))
        yield faults
        rows = CounterMetricFamily("edl_teacher_rows", "Rows computed.", labels=["model"])
        rows.add_metric([self._model], sum(worker.rows for worker in self._workers))
        yield rows
        for name, text, parts in (
            (
                "edl_teacher_batch_rows",
                "Rows in one call of the model.",
                [worker.batch_rows for worker in self._workers],
            ),
            ("edl_teacher_queue_seconds", "From arrival to batch.", [worker.queue_s for worker in self._workers]),
            ("edl_teacher_compute_seconds", "One call of the model.", [worker.compute_s for worker in self._workers]),
        ):
            yield self._histogram(name, text, parts)
        for name, text, read in self._gauges:
            gauge = GaugeMetricFamily(name, text, labels=["model"])
            gauge.add_metric([self._model], _read(read))
            yield gauge

    def _histogram(self, name: str, text: str, parts: Sequence[_Buckets]) -> HistogramMetricFamily:
        family = HistogramMetricFamily(name, text, labels=["model"])
        if parts:
            total, buckets = 0, []
            for index, bound in enumerate([*map(str, map(float, parts[0].bounds)), "+Inf"]):
                total += sum(part.counts[index] for part in parts)
                buckets.append((bound, total))
            family.add_metric([self._model], buckets, sum(part.sum for part in parts))
        return family

    def listen(self, host: str, port: int) -> int:
        """Serve `/metrics`, `/livez` and `/readyz`.

        Args:
            host: a name or an address.
            port: 0 for a free port.

        Returns:
            The port.

        Raises:
            SettingsError: the address cannot be listened on.
        """
        try:
            self._http = MetricsServer(self.registry, host, port, self.probes)
        except OSError as exc:
            raise SettingsError(f"metrics cannot listen on {host}:{port}: {exc.strerror or exc}") from exc
        return self._http.port

    def close(self) -> None:
        """Stop listening."""
        if self._http is not None:
            self._http.close()
            self._http = None


def _read(gauge: Callable[[], float]) -> float:
    """Read a gauge whose value changes in another thread."""
    for _ in range(_MOST_TRIES):
        try:
            return gauge()
        except RuntimeError:  # a dictionary changed its size while it was looked through
            continue
    return gauge()
