"""Exports a reader's counters to Prometheus; they are read at each scrape."""

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


_DEPARTED = "departed"  # the label of all teachers that left, so that sums over teachers never decrease


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
        stats, name = reader.stats(), self._name
        rows = CounterMetricFamily("edl_reader_rows", "Rows by event.", labels=["reader", "event"])
        for event in ("asked", "received", "resent", "hedged", "cached", "not_cached", "delivered"):
            rows.add_metric([name, event], getattr(stats, f"rows_{event}"))
        aside = CounterMetricFamily("edl_reader_set_aside", "Pauses of teachers.", labels=["reader", "reason"])
        for kind in FailureKind:
            aside.add_metric([name, kind.value], stats.set_aside.get(kind.value, 0))
        yield from (rows, aside)
        counter, gauge = CounterMetricFamily, GaugeMetricFamily
        for family, metric, text, value in (
            (counter, "wait_seconds", "Seconds that training waited for labels.", stats.wait_s),
            (counter, "hedges", "Late requests sent a second time.", stats.requests_hedged),
            (gauge, "bytes_held", "Bytes of inputs and answers held.", stats.bytes_held),
            (gauge, "rows_buffered", "Rows read ahead.", stats.rows_buffered),
            (gauge, "cache_queue_bytes", "Bytes of labels queued for the cache.", stats.cache_queue_bytes),
            (gauge, "teachers", "Teachers in use.", stats.teachers_live),
            (gauge, "discovery_up", "1 if discovery answers and no registration lapsed, else 0.", not stats.discovery),
        ):
            found = family(f"edl_reader_{metric}", text, labels=["reader"])
            found.add_metric([name], float(value))
            yield found
        for family, metric, text, field in (
            (counter, "rows", "Rows delivered from this teacher.", "rows"),
            (counter, "failures", "Requests that failed.", "failures"),
            (gauge, "latency_seconds", "Median latency of the last answers.", "median_s"),
            (gauge, "in_flight", "Requests now pending at this teacher.", "in_flight"),
        ):
            found = family(f"edl_reader_teacher_{metric}", text, labels=["reader", "teacher"])
            # A label for every teacher that ever joined would grow without bound as pods come and go.
            if family is counter and (stats.departed.requests or stats.departed.failures):
                found.add_metric([name, _DEPARTED], getattr(stats.departed, field))
            for teacher, each in stats.teachers.items():
                if each.state != "gone":
                    found.add_metric([name, teacher], getattr(each, field))
            yield found


def export(reader: _HasStats, name: str = "reader", registry: CollectorRegistry = REGISTRY) -> Collector:
    """Export a reader's `stats()` to Prometheus; `prometheus_client.start_http_server(port)` serves them.

    Args:
        reader: A `DistillReader`, or a loader returned by `distill`. The collector does not keep it alive.
        name: Value of the label `reader`, to distinguish several readers.
        registry: Prometheus registry to register with.

    Returns:
        The collector, for `registry.unregister`.
    """
    collector = _ReaderCollector(reader, name)
    registry.register(collector)
    return collector
