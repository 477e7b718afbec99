"""A real Prometheus scrapes the page, and answers each query of the Grafana dashboard."""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Histogram

import edl.dashboard
from edl.background import BackgroundLoop
from edl.dashboard.metrics import METRICS
from edl.dashboard.server import DashboardServer, DashboardSettings
from edl.discovery import Instance, Store, open_registry
from tests.fast.dashboard.server import ask, put_job, put_master, samples
from tests.plugins_prometheus import PrometheusServer, check_metrics
from tests.waiting import wait_until

ROOT = Path(__file__).parents[3]
GRAFANA = Path(edl.dashboard.__file__).parent / "grafana.json"
SERVICE = "digits"


def put_load(store: Store, age_s: float) -> None:
    """A teacher's and a student's record, of processes that live for `age_s` seconds."""
    since_s = age_s - 10
    teacher = {
        "v": 1, "id": "t-1", "teacher": "t1", "model": "m", "version": "1", "endpoint": "127.0.0.1:1",
        "state": "ready", "t": age_s, "rows": int(100 * age_s), "compute_s": 0.5 * age_s, "workers": 1,
        "queue_rows": 3, "note": "",
        "since": {"t": since_s, "rows": int(100 * since_s), "compute_s": 0.5 * since_s},
    }  # fmt: skip
    student = {
        "v": 1, "id": "s-1", "job": "resnet", "host": "h", "pid": 1, "t": age_s, "rows_asked": int(100 * age_s),
        "wait_s": 0.25 * age_s, "source_wait_s": 0.0, "teachers": ["t1"],
        "since": {"t": since_s, "rows_asked": int(100 * since_s), "wait_s": 0.25 * since_s, "source_wait_s": 0.0},
    }  # fmt: skip
    store.put(f"load/{SERVICE}/teachers/t-1", json.dumps(teacher).encode())
    store.put(f"load/{SERVICE}/students/s-1", json.dumps(student).encode())
    now = time.time()
    for kind, name in (("teachers", SERVICE), ("workers", "resnet")):
        wanted = {
            "v": 1, "count": 5, "now": 3, "reason": "2 students wait", "since": now, "time": now,
            "decisions": [{"time": now, "from": 3, "count": 5, "reason": "2 students wait"}],
        }  # fmt: skip
        store.put(f"wanted/{kind}/{name}", json.dumps(wanted).encode())


@pytest.fixture
def busy_page(url: str, store: Store) -> Iterator[str]:
    """A master's page whose job, teacher and student go on."""
    registry = CollectorRegistry()
    commits = Histogram("edl_master_journal_commit_seconds", "How long a group commit took.", registry=registry)
    began = time.monotonic() - 60

    def go_on() -> float:
        put_job(store, "resnet", "ab")
        put_master(store, "resnet", datasets=[_dataset(time.monotonic() - began)])
        put_load(store, time.monotonic() - began)
        commits.observe(0.003)
        return 0.3

    with open_registry(url) as teachers, teachers.register(Instance(SERVICE, "t1", "127.0.0.1", 1)):
        go_on()
        changes = BackgroundLoop("edl-test-changes", go_on)
        try:
            with DashboardServer(DashboardSettings(url, port=0), [registry]) as server:
                yield server.url
        finally:
            changes.close()


def _dataset(age_s: float) -> dict[str, object]:
    return {
        "name": "train", "kind": "range", "epoch": 0, "epochs": 2, "units": 10_000, "units_done": int(10 * age_s),
        "units_per_s": 10.0, "eta_s": 60.0, "shards": {"todo": 100, "doing": 2, "done": int(age_s), "poisoned": 1},
        "poisoned": [], "holders": [{"holder": "h1", "leases": 2, "units_done": 5, "units_per_s": 1.0, "seen_s": 0.1}],
    }  # fmt: skip


def expressions() -> list[tuple[str, str]]:
    """The queries of the dashboard's panels, with what Grafana would put for its variables."""
    found = []
    for panel in json.loads(GRAFANA.read_text())["panels"]:
        for target in panel.get("targets", ()):
            text = target["expr"].replace("$__rate_interval", "10s")
            found.append((panel["title"], re.sub(r"\$(job_name|service)", ".*", text)))
    return found


def test_promtool_finds_nothing_amiss(busy_page: str) -> None:
    text = ask(busy_page, "/metrics").body
    assert check_metrics(text) == ""
    names = {re.split(r"[{ ]", series)[0] for series in samples(text.decode())}
    assert {spec.name for spec in METRICS} <= names, "some metrics have no samples here, and are not checked"
    assert check_metrics(b"# TYPE edl_x counter\nedl_x 1\n"), "promtool says nothing at all"
    labels = set(re.findall(r'(\w+)="', text.decode()))
    known = {"job_name", "state", "category", "dataset", "service", "teacher", "student", "le"}
    assert labels == known, "a label whose values have no bound would fill Prometheus"


def test_prometheus_and_grafana_s_queries(busy_page: str, tmp_path: Path) -> None:
    """Each query is understood, and gives data of a job that runs."""
    queries = expressions()
    assert len(queries) > 15
    with PrometheusServer(tmp_path / "prometheus", [busy_page.split("/")[2]]) as prometheus:
        wait_until(lambda: bool(prometheus.query("up == 1")), "nothing was scraped")
        wait_until(lambda: bool(prometheus.query("rate(edl_job_seconds_total[10s]) > 0")), "no rate yet")
        (target,) = prometheus.targets()
        assert (target["health"], target["lastError"]) == ("up", "")
        empty = set(queries)

        def all_have_data() -> bool:
            empty.intersection_update({pair for pair in empty if not prometheus.query(pair[1])})
            return not empty

        with contextlib.suppress(TimeoutError):  # the assertion names what is missing
            wait_until(all_have_data, "data for each query")
        assert not empty, f"queries without data: {sorted(empty)}"
        (goodput,) = prometheus.query('edl_job_goodput_ratio{job_name="resnet"}')
        assert float(goodput["value"][1]) == pytest.approx(59 / 60, abs=0.02)
        rows = f'sum(rate(edl_service_teacher_rows_total{{service="{SERVICE}"}}[10s]))'
        # Once there are points for all of the window.
        wait_until(lambda: bool(prometheus.query(f"{rows} > 70 < 130")), "the teacher computes 100 rows a second")
