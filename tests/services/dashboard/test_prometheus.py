"""A real Prometheus scrapes the page, and answers each query of the Grafana dashboard; promtool checks the metrics."""

from __future__ import annotations

import contextlib
import json
import re
import time
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Histogram

import edl.dashboard
from edl.background import BackgroundLoop
from edl.dashboard.metrics import METRICS
from edl.dashboard.server import DashboardServer, DashboardSettings
from edl.discovery import Instance, Registry, Store
from tests.fast.dashboard.server import ask, put_job, put_master, put_teacher, put_wanted, samples
from tests.plugins_prometheus import PrometheusServer, check_metrics
from tests.waiting import wait_until

GRAFANA = Path(edl.dashboard.__file__).parent / "grafana.json"
SERVICE = "digits"


def put_student(store: Store, age_s: float) -> None:
    """A student's record, of a process that lives for `age_s` seconds."""
    counters = [
        {"t": t, "rows_asked": int(100 * t), "wait_s": 0.25 * t, "source_wait_s": 0.0} for t in (age_s, age_s - 10)
    ]
    record = {"v": 1, "id": "s-1", "job": "resnet", "host": "h", "pid": 1, "teachers": ["t1"], **counters[0]}
    store.put(f"load/{SERVICE}/students/s-1", json.dumps(record | {"since": counters[1]}).encode())


@pytest.fixture
def busy_page(url: str, store: Store, registry: Registry, stack: contextlib.ExitStack) -> str:
    """A page whose job, master, teacher and student go on."""
    metrics = CollectorRegistry()
    commits = Histogram("edl_master_journal_commit_seconds", "How long a group commit took.", registry=metrics)
    began = time.monotonic() - 60

    def go_on() -> float:
        age_s = time.monotonic() - began
        put_job(store, "resnet", "ab")
        put_master(store, "resnet", units_done=int(10 * age_s))
        put_teacher(store, age_s)
        put_student(store, age_s)
        put_wanted(store, f"teachers/{SERVICE}", 5, "2 students wait")
        put_wanted(store, "workers/resnet", 5, "2 students wait")
        commits.observe(0.003)
        return 0.3

    stack.enter_context(registry.register(Instance(SERVICE, "t1", "127.0.0.1", 1)))
    go_on()
    stack.callback(BackgroundLoop("edl-test-changes", go_on).close)
    return stack.enter_context(DashboardServer(DashboardSettings(url, port=0), [metrics])).url


def expressions() -> list[tuple[str, str]]:
    """The queries of the dashboard's panels, with what Grafana would put for its variables."""
    found = []
    for panel in json.loads(GRAFANA.read_text())["panels"]:
        for target in panel.get("targets", ()):
            text = target["expr"].replace("$__rate_interval", "10s")
            found.append((panel["title"], re.sub(r"\$(job_name|service)", ".*", text)))
    return found


def test_prometheus_and_grafana_s_queries(busy_page: str, tmp_path: Path) -> None:
    """promtool finds nothing amiss; each query is understood, and gives data of a job that runs."""
    text = ask(busy_page, "/metrics").body
    assert check_metrics(text) == ""
    names = {re.split(r"[{ ]", series)[0] for series in samples(text.decode())}
    assert {spec.name for spec in METRICS} <= names, "some metrics have no samples here, and are not checked"
    assert check_metrics(b"# TYPE edl_x counter\nedl_x 1\n"), "promtool says nothing at all"
    labels = set(re.findall(r'(\w+)="', text.decode()))
    known = {"job_name", "state", "category", "dataset", "service", "teacher", "student", "le"}
    assert labels == known, "a label whose values have no bound would fill Prometheus"
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
