"""Exports a reader's counters to Prometheus, which reads them when it asks."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Protocol

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from edl.distill.dispatch.actions import FailureKind
from edl.distill.stats import ReaderStats

__all__ = ["export"]


_DEPARTED = "departed"
"""The label of all teachers that left; sums over teachers never fall."""


class _HasStats(Protocol):
    def stats(self) -> ReaderStats: ...


class _ReaderCollector(Collector):
    def __init__(self, reader: _HasStats, name: str) -> None:
        self._reader = weakref.ref(reader)
        self._name = name

    def collect(self) -> Iterable[Metric]:
        reader = self._reader()
        if reader is None:
            return
        stats = reader.stats()
        rows = CounterMetricFamily("edl_reader_rows", "Rows by what happened to them.", labels=["reader", "event"])
        for event in ("asked", "received", "resent", "hedged", "cached", "not_cached", "delivered"):
            rows.add_metric([self._name, event], getattr(stats, f"rows_{event}"))
        yield rows
        yield _one(
            CounterMetricFamily, "edl_reader_wait_seconds", "Training waited for labels.", self._name, stats.wait_s
        )
        yield _one(GaugeMetricFamily, "edl_reader_bytes_held", "Inputs and answers held.", self._name, stats.bytes_held)
        yield _one(GaugeMetricFamily, "edl_reader_rows_buffered", "Rows read ahead.", self._name, stats.rows_buffered)
        yield _one(
            GaugeMetricFamily,
            "edl_reader_cache_queue_bytes",
            "Labels on their way into the cache.",
            self._name,
            stats.cache_queue_bytes,
        )
        yield _one(
            CounterMetricFamily, "edl_reader_hedges", "Late requests, sent twice.", self._name, stats.requests_hedged
        )
        aside = CounterMetricFamily(
            "edl_reader_set_aside", "A teacher was given nothing for a while.", labels=["reader", "reason"]
        )
        for kind in FailureKind:
            aside.add_metric([self._name, kind.value], stats.set_aside.get(kind.value, 0))
        yield aside
        yield _one(GaugeMetricFamily, "edl_reader_teachers", "Teachers in use.", self._name, stats.teachers_live)
        yield _one(
            GaugeMetricFamily, "edl_reader_discovery_up", "Discovery answers.", self._name, float(not stats.discovery)
        )
        labels = ["reader", "teacher"]
        served = CounterMetricFamily("edl_reader_teacher_rows", "Rows delivered from this teacher.", labels=labels)
        failed = CounterMetricFamily("edl_reader_teacher_failures", "Requests that failed.", labels=labels)
        latency = GaugeMetricFamily("edl_reader_teacher_latency_seconds", "Median of the last answers.", labels=labels)
        flight = GaugeMetricFamily("edl_reader_teacher_in_flight", "Requests at this teacher now.", labels=labels)
        # A label for each teacher that ever was would grow without an end where pods come and go.
        if stats.departed.requests or stats.departed.failures:
            served.add_metric([self._name, _DEPARTED], stats.departed.rows)
            failed.add_metric([self._name, _DEPARTED], stats.departed.failures)
        for teacher, each in stats.teachers.items():
            if each.state == "gone":
                continue
            served.add_metric([self._name, teacher], each.rows)
            failed.add_metric([self._name, teacher], each.failures)
            latency.add_metric([self._name, teacher], each.median_s)
            flight.add_metric([self._name, teacher], each.in_flight)
        yield from (served, failed, latency, flight)


def export(reader: _HasStats, name: str = "reader", registry: CollectorRegistry = REGISTRY) -> Collector:
    """Let Prometheus see a reader's `stats()`; `prometheus_client.start_http_server(port)` serves them.

    Args:
        reader: A `DistillReader`, or a loader returned by `distill`. It is not kept alive.
        name: Value of the label `reader`, to distinguish several readers.
        registry: Prometheus registry to register with.

    Returns:
        The collector, for `registry.unregister`.
    """
    collector = _ReaderCollector(reader, name)
    registry.register(collector)
    return collector


def _one(
    family: type[CounterMetricFamily] | type[GaugeMetricFamily], name: str, text: str, reader: str, value: float
) -> Metric:
    metric = family(name, text, labels=["reader"])
    metric.add_metric([reader], value)
    return metric
