"""Monitoring for operators: Prometheus metrics, health probes, and the access log.

Counts are plain numbers that are collected at each scrape (https://prometheus.io/docs/practices/naming/). The client
library's own counters take a lock for each increment, which at thousands of requests a second costs more than all of
the batching. `edl.http_server.health` serves the metrics.

A separate thread writes the access log, because a disk or a pipe may be slow or hang, and neither the event loop nor
the end of the process may wait for that. If the thread cannot keep up, lines are dropped, and the next line that is
written says how many.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timezone
from io import FileIO
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from edl.background import BackgroundLoop
from edl.errors import SettingsError
from edl.http_server.health import HealthChecks, HealthServer
from edl_serving.request_error import RequestError

_log = logging.getLogger(__name__)

# From a look-up in memory to a language model's batch, three bounds a decade: quantiles are within a factor of 2.5.
_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)

# Powers of two, up to the default of --max-queue.
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class _Buckets:
    """A histogram that a single thread writes."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += times * value


class WorkerMetrics:
    """Counts what a worker thread does; only that thread may write."""

    def __init__(self) -> None:
        self.computing_since_s: float | None = None  # `time.monotonic()` of the present call of the model
        self.rows = 0
        self.faults: Counter[str] = Counter()  # requests on which the model failed: "exception", "nan" or "output"
        self.batches: dict[int, tuple[int, float]] = {}  # calls of the model and their seconds, by rows
        self.queue_s = _Buckets(_SECONDS)  # from arrival to batch
        self.compute_s = _Buckets(_SECONDS)

    def record_batch(self, rows: int, seconds: float) -> None:
        count, spent_s = self.batches.get(rows, (0, 0.0))
        self.batches[rows] = count + 1, spent_s + seconds
        self.rows += rows
        self.compute_s.observe(seconds)


class Metrics(Collector):
    """Collects the counts of a server in its own registry. Only the event loop's thread calls `record_…`."""

    def __init__(self, model: str) -> None:
        self.registry = CollectorRegistry()
        self.checks = HealthChecks()
        self._model = model
        self._outcomes: Counter[str] = Counter()
        self._refusals: Counter[str] = Counter()
        self._workers: list[WorkerMetrics] = []
        self._gauges: list[tuple[str, str, Callable[[], float]]] = []
        self._http: HealthServer | None = None
        self.registry.register(self)

    def add_worker(self) -> WorkerMetrics:
        self._workers.append(WorkerMetrics())
        return self._workers[-1]

    def add_gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        """Add a gauge; `read` is called at each scrape, in any thread."""
        self._gauges.append((name, text, read))

    def computed(self) -> tuple[int, float]:
        """Return the computed rows and the seconds spent on them, summed over workers. Callable from any thread."""
        workers = self._workers
        return sum(worker.rows for worker in workers), sum(worker.compute_s.sum for worker in workers)

    def batches(self) -> dict[int, tuple[int, float]]:
        """Return the number of model calls and their seconds, by number of rows. Callable from any thread."""
        found: dict[int, tuple[int, float]] = {}
        for worker in self._workers:
            for rows, (count, spent_s) in worker.batches.copy().items():
                counts, seconds = found.get(rows, (0, 0.0))
                found[rows] = counts + count, seconds + spent_s
        return found

    def find_stall(self, limit_s: float) -> str:
        """Describe a call of the model that exceeds the limit; empty if no call does. Callable from any thread."""
        now_s = time.monotonic()
        for worker in self._workers:
            since_s = worker.computing_since_s
            if since_s is not None and now_s - since_s > limit_s:
                return f"a call of the model has taken {now_s - since_s:,.0f} s so far, and the limit is {limit_s:g} s"
        return ""

    def record_outcome(self, outcome: str) -> None:
        self._outcomes[outcome] += 1

    def record_error(self, error: RequestError) -> None:
        self._outcomes[error.code.name.lower()] += 1
        self._refusals[error.reason] += 1

    def record_rejected_call(self, error: RequestError) -> None:
        self._refusals[error.reason] += 1

    def collect(self) -> Iterator[Metric]:
        workers = self._workers
        faults = {kind: sum(worker.faults[kind] for worker in workers) for kind in ("exception", "nan", "output")}
        failed = "Requests on which the model failed: it raised an error, or returned NaN or an unexpected output."
        for name, text, label, counts in (
            ("edl_teacher_requests", "Requests answered, by outcome.", "outcome", self._outcomes.copy()),
            ("edl_teacher_refusals", "Requests and calls that ended with an error.", "reason", self._refusals.copy()),
            ("edl_teacher_model_faults", failed, "kind", faults),
        ):
            family = CounterMetricFamily(name, text, labels=["model", label])
            for value, count in sorted(counts.items()):
                family.add_metric([self._model, value], count)
            yield family
        batch_rows = _Buckets(_ROWS)
        for size, (count, _) in self.batches().items():
            batch_rows.observe(size, count)
        rows = CounterMetricFamily("edl_teacher_rows", "Rows computed.", labels=["model"])
        rows.add_metric([self._model], sum(worker.rows for worker in workers))
        yield rows
        for name, text, parts in (
            ("edl_teacher_batch_rows", "Rows in one call of the model.", [batch_rows]),
            ("edl_teacher_queue_seconds", "Time from arrival to batch.", [worker.queue_s for worker in workers]),
            ("edl_teacher_compute_seconds", "Time of one call of the model.", [worker.compute_s for worker in workers]),
        ):
            yield self._histogram(name, text, parts)
        for name, text, read in self._gauges:
            gauge = GaugeMetricFamily(name, text, labels=["model"])
            gauge.add_metric([self._model], read())
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

    def listen(self, host: str, port: int, api: Any = None) -> int:
        """Serve `/metrics`, `/livez` and `/readyz`, and `api` below `/v2`; return the port."""
        self._http = HealthServer(host, port, self.registry, self.checks, api)
        return self._http.port

    def close(self) -> None:
        if self._http is not None:
            self._http.close()
            self._http = None


_MOST_WAITING = 10_000  # lines: some seconds of requests, and 5 MB, so that a hanging disk does not fill the memory
_GATHER_S = 0.05  # pause between two writes; waking the thread for each line would cost more than the line
_CLOSE_S = 2.0  # how long the end of the process waits for the last lines


class AccessLog:
    """Writes a line for each request until `close`. If `logrotate` moves the file, the path is opened again."""

    def __init__(self, path: str, model: str, version: str) -> None:
        self._path = path
        self._common = {"model": model, "version": version}
        self._lines: deque[dict[str, Any]] = deque()
        self._dropped = 0
        self._failing = False
        self._closing = False
        self._file: FileIO | None = None
        try:
            self._file = self._open()
        except OSError as exc:
            why = "this pipe has no reader" if exc.errno == errno.ENXIO else exc.strerror or exc
            raise SettingsError(f"--access-log {path!r}: cannot be written: {why}") from exc
        self._loop = BackgroundLoop("edl-access-log", self._write_waiting)

    def write_request(self, **fields: Any) -> None:
        """Write a line. Not thread-safe."""
        if len(self._lines) >= _MOST_WAITING:
            self._dropped += 1
            return
        line: dict[str, Any] = {"time": time.time(), **self._common, **fields}
        if self._dropped:
            line["dropped"] = self._dropped  # before this line
            self._dropped = 0
        self._lines.append(line)

    def close(self) -> None:
        """Write the waiting lines and end the thread, or give up after 2 s if the file hangs."""
        self._closing = True
        self._loop.wake()
        if not self._loop.wait_ended(_CLOSE_S):
            _log.error("the access log %r hangs; its last lines are lost", self._path)

    def _write_waiting(self) -> float | None:
        closing = self._closing  # read before taking the lines, so that the last lines are among them
        if lines := [self._lines.popleft() for _ in range(len(self._lines))]:
            self._write(b"".join(map(_encoded, lines)))
        if closing:
            self._close_file()
        return None if closing else _GATHER_S

    def _write(self, data: bytes) -> None:
        try:
            if self._file is None or self._was_rotated(self._file):
                self._close_file()
                self._file = self._open()
            view = memoryview(data)
            while view:
                view = view[self._file.write(view) or 0 :]
        except OSError as exc:
            if not self._failing:
                self._failing = True
                _log.error("the access log %r cannot be written: %s", self._path, exc.strerror or exc)
            self._close_file()
            return
        if self._failing:
            self._failing = False
            _log.warning("the access log %r is written again", self._path)

    def _open(self) -> FileIO:
        # Not `sys.stdout`: a hanging thread would hold its lock when the process ends.
        return FileIO(os.dup(1), "w") if self._path == "-" else FileIO(self._path, "a", opener=_open_at_once)

    def _was_rotated(self, file: FileIO) -> bool:
        if self._path == "-":
            return False
        try:
            found, ours = Path(self._path).stat(), os.fstat(file.fileno())
        except FileNotFoundError:
            return True
        return (found.st_dev, found.st_ino) != (ours.st_dev, ours.st_ino)

    def _close_file(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None


def _open_at_once(path: str, flags: int) -> int:
    """Open a file without blocking: a pipe without a reader raises ENXIO, while `open` would wait for one."""
    file = os.open(path, flags | os.O_NONBLOCK, 0o666)
    os.set_blocking(file, True)
    return file


def _encoded(line: dict[str, Any]) -> bytes:
    moment = datetime.fromtimestamp(line["time"], timezone.utc)
    return json.dumps({**line, "time": moment.isoformat(timespec="milliseconds")}).encode() + b"\n"
