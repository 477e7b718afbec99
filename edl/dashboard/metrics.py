"""The state as Prometheus metrics: https://prometheus.io/docs/practices/naming/.

Labels contain the names of existing jobs, datasets, services, teachers and students, but never names of samples or
shards. When one of these objects is deleted, its series end. The label for a job is `job_name`, since Prometheus itself
uses `job`. During an outage of the store, jobs and services have no series: Prometheus shows a gap instead of an old
figure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Final, Literal, NamedTuple

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from edl.dashboard.state.records import SHARD_STATES
from edl.dashboard.state.schema import DashboardState, JobStatus, MasterStatus, ServiceStatus


class MetricSpec(NamedTuple):
    """A metric on the page: its exported name, its label names, and its help text."""

    name: str
    kind: Literal["counter", "gauge"]
    labels: tuple[str, ...]
    text: str


_JOB: Final = ("job_name",)
_DATASET: Final = ("job_name", "dataset")
_TEACHER: Final = ("service", "teacher")
_STUDENT: Final = ("service", "student", "job_name")
_JOB_STATES: Final = ("forming", "running", "done", "failed", "down", "gave up", "unknown")
_RESTARTED: Final = 0.5
"""A counter below this share of its peak has restarted: a new job begins near 0; a rollback costs only minutes."""
_TEACHER_STATES: Final = ("starting", "ready", "draining", "lapsed")

METRICS: Final = (
    MetricSpec("edl_dashboard_store_up", "gauge", (), "1 if the last read of the Store and the registry succeeded."),
    MetricSpec("edl_dashboard_unreadable_records", "gauge", (), "Records in Store or registry that cannot be read."),
    MetricSpec("edl_job_state", "gauge", (*_JOB, "state"), "1 for the current state of the job."),
    MetricSpec("edl_job_generation", "gauge", _JOB, "Current generation; increases by 1 at each restart."),
    MetricSpec("edl_job_world_size", "gauge", _JOB, "Ranks that train."),
    MetricSpec("edl_job_wanted_workers", "gauge", _JOB, "Workers that the job's master wants, if it decides."),
    MetricSpec("edl_job_nodes", "gauge", (*_JOB, "state"), "Live nodes, by state."),
    MetricSpec("edl_job_left_out_hosts", "gauge", _JOB, "Hosts excluded because one of their GPUs failed."),
    MetricSpec("edl_job_step", "gauge", _JOB, "The last step that was finished."),
    MetricSpec("edl_job_steps_per_second", "gauge", _JOB, "Steps finished per second, over the last 15 s."),
    MetricSpec("edl_job_samples_per_second", "gauge", _JOB, "Samples trained per second, over the last 15 s."),
    MetricSpec("edl_job_goodput_ratio", "gauge", _JOB, "Share of the job's time spent on steps, without repetitions."),
    MetricSpec("edl_job_seconds_total", "counter", (*_JOB, "category"), "The job's time by category."),
    MetricSpec("edl_master_up", "gauge", _JOB, "1 if a master leads and has reported recently."),
    MetricSpec("edl_master_shards", "gauge", (*_DATASET, "state"), "Shards by state: todo, doing, done, poisoned."),
    MetricSpec("edl_master_shards_done_total", "counter", _DATASET, "Shards done, in all epochs."),
    MetricSpec("edl_master_units_per_second", "gauge", _DATASET, "Units of the dataset done per second, recently."),
    MetricSpec("edl_master_eta_seconds", "gauge", _DATASET, "Time until the dataset is done, at its current rate."),
    MetricSpec("edl_master_holders", "gauge", _DATASET, "Readers that hold shards or held some recently."),
    MetricSpec("edl_pool_replicas", "gauge", ("service",), "Teachers that are ready or starting."),
    MetricSpec("edl_pool_wanted_replicas", "gauge", ("service",), "Teachers that an advisor wants, if there is one."),
    MetricSpec("edl_service_teachers", "gauge", ("service", "state"), "Teachers by state."),
    MetricSpec("edl_service_students", "gauge", ("service",), "Students that report."),
    MetricSpec("edl_service_teacher_rows_total", "counter", _TEACHER, "Rows that the teacher has computed."),
    MetricSpec("edl_service_teacher_compute_seconds_total", "counter", _TEACHER, "Time spent in model calls."),
    MetricSpec("edl_service_teacher_queue_rows", "gauge", _TEACHER, "Rows in the teacher's queue."),
    MetricSpec("edl_service_teacher_rows_per_second", "gauge", _TEACHER, "Rows computed per second, recently."),
    MetricSpec("edl_service_student_rows_total", "counter", _STUDENT, "Rows that the student has requested."),
    MetricSpec("edl_service_student_wait_seconds_total", "counter", _STUDENT, "Time spent waiting for labels."),
    MetricSpec("edl_service_student_wait_ratio", "gauge", _STUDENT, "Share of time that the student waited, recently."),
)
"""All metrics; a master's page also has the metrics in its own registry (`edl_master_journal_commit_seconds`)."""


class DashboardMetrics(Collector):
    """Collects the latest state (None before the first read) at each scrape; its registry includes other registries."""

    def __init__(
        self, latest: Callable[[], DashboardState | None], registries: Iterable[CollectorRegistry] = ()
    ) -> None:
        self.registry = CollectorRegistry()
        self._latest = latest
        self._counters = _Counters()
        self.registry.register(self)
        for registry in registries:
            self.registry.register(registry)  # a registry has `collect`, like a collector

    def describe(self) -> Iterator[Metric]:
        """Yield nothing: the metrics are known only at a scrape."""
        yield from ()

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics for a scrape."""
        samples = _Samples()
        state = self._latest()
        samples.add("edl_dashboard_store_up", state is not None and not state.stale)
        if state is not None and not state.stale:
            samples.add("edl_dashboard_unreadable_records", len(state.unreadable))
            for job in state.jobs:
                _add_job(samples, job, self._counters, state.time)
                if job.master is not None:
                    _add_master(samples, job.job, job.master, self._counters)
            for service in state.services:
                _add_service(samples, service, state.time)
            self._counters.forget_unseen()
        yield from samples.families()


class _Samples:
    """The samples of a scrape, by metric."""

    def __init__(self) -> None:
        self._families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        for spec in METRICS:
            family = CounterMetricFamily if spec.kind == "counter" else GaugeMetricFamily
            self._families[spec.name] = family(spec.name, spec.text, labels=spec.labels)

    def add(self, name: str, value: float | None, *labels: str) -> None:
        if value is not None:
            self._families[name].add_metric(labels, float(value))

    def families(self) -> Iterator[Metric]:
        yield from (family for family in self._families.values() if family.samples)


class _Counters:
    """Prevents slight decreases in counters: Prometheus takes a decrease for a restart, and would count all again.

    A counter may decrease slightly when a late record from a node moves seconds between categories, or when a worker
    that returns to its checkpoint gives shards back. A counter that falls below half of its highest value has
    restarted.
    """

    def __init__(self) -> None:
        self._highest: dict[tuple[str, ...], float] = {}
        self._seen: set[tuple[str, ...]] = set()

    def held(self, value: float, *key: str) -> float:
        """Return the value, or the previous maximum if the value decreased slightly."""
        before = self._highest.get(key, 0.0)
        self._highest[key] = value if value > before or value < before * _RESTARTED else before
        self._seen.add(key)
        return self._highest[key]

    def forget_unseen(self) -> None:
        """Forget the counters that this scrape did not use."""
        self._highest = {key: value for key, value in self._highest.items() if key in self._seen}
        self._seen = set()


def _add_job(samples: _Samples, job: JobStatus, counters: _Counters, now_s: float) -> None:
    name = job.job
    for state in _JOB_STATES:
        samples.add("edl_job_state", job.state == state, name, state)
    wanted = job.wanted_workers
    if wanted is not None and not wanted.is_old(now_s) and job.state not in ("done", "failed"):
        samples.add("edl_job_wanted_workers", wanted.count, name)
    if job.master_only:
        return
    samples.add("edl_job_generation", max(0, job.generation), name)
    samples.add("edl_job_world_size", job.world_size, name)
    alive = Counter(node.state for node in job.nodes if node.state not in ("left", "lost"))
    for node_state, count in sorted(alive.items()):
        samples.add("edl_job_nodes", count, name, node_state)
    samples.add("edl_job_left_out_hosts", len(job.left_out), name)
    running = job.state == "running"
    if job.step >= 0:
        samples.add("edl_job_step", job.step, name)
        samples.add("edl_job_steps_per_second", job.steps_per_s if running else 0.0, name)
        unknown = job.samples_per_s is None
        samples.add("edl_job_samples_per_second", job.samples_per_s if running or unknown else 0.0, name)
    samples.add("edl_job_goodput_ratio", job.goodput, name)
    for category, seconds in job.seconds.items():
        samples.add("edl_job_seconds_total", counters.held(seconds, "seconds", name, category), name, category)


def _add_master(samples: _Samples, job: str, master: MasterStatus, counters: _Counters) -> None:
    samples.add("edl_master_up", master.state == "leading", job)
    for dataset in master.datasets:
        labels = job, dataset.name
        for state in SHARD_STATES:
            samples.add("edl_master_shards", dataset.shards[state], *labels, state)
        done = counters.held(dataset.shards["done"], "shards", *labels)
        samples.add("edl_master_shards_done_total", done, *labels)
        samples.add("edl_master_units_per_second", dataset.units_per_s, *labels)
        samples.add("edl_master_eta_seconds", dataset.eta_s, *labels)
        samples.add("edl_master_holders", len(dataset.holders), *labels)


def _add_service(samples: _Samples, service: ServiceStatus, now_s: float) -> None:
    name = service.service
    states = Counter(teacher.state for teacher in service.teachers)
    for state in _TEACHER_STATES:
        samples.add("edl_service_teachers", states[state], name, state)
    samples.add("edl_pool_replicas", states["ready"] + states["starting"], name)
    if service.wanted is not None and not service.wanted.is_old(now_s):
        samples.add("edl_pool_wanted_replicas", service.wanted.count, name)
    samples.add("edl_service_students", len(service.students), name)
    for teacher in service.teachers:
        labels = name, teacher.id
        samples.add("edl_service_teacher_rows_total", teacher.rows, *labels)
        samples.add("edl_service_teacher_compute_seconds_total", teacher.compute_s, *labels)
        samples.add("edl_service_teacher_queue_rows", teacher.queue_rows, *labels)
        samples.add("edl_service_teacher_rows_per_second", teacher.rows_per_s, *labels)
    for student in service.students:
        student_labels = name, student.id, student.job
        samples.add("edl_service_student_rows_total", student.rows_asked, *student_labels)
        samples.add("edl_service_student_wait_seconds_total", student.wait_s, *student_labels)
        samples.add("edl_service_student_wait_ratio", student.wait_share, *student_labels)
