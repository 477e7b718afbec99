"""How much the operator loads a Kubernetes cluster, and how long it takes to reconcile jobs.

200 `ElasticJob`s are created at once in a real cluster without room for most of them. `condition_s` is the 99th
percentile of the time to a job's first condition, and `reconcile_p99_s` that of a reconciliation's duration.
`idle_requests_per_s` counts requests to the API server once everything has settled. `KUBECONFIG` names the cluster.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import secrets
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import yaml

from benchmarks._api_proxy import ApiProxy, write_json_kubeconfig
from benchmarks._child import ROOT
from benchmarks._harness import Goal, Options, main, note, progress
from edl.errors import EDLError, SettingsError
from edl.kube.client import KubeClient
from edl.kube.resource_types import CUSTOM_RESOURCE_DEFINITIONS, ELASTIC_JOBS, NAMESPACES, PODS
from edl.kube.settings import KubeSettings
from edl.kube.watch import KubeWatch
from edl.master.kube.operator import OperatorSettings

GOALS = [
    Goal("idle_requests_per_s", 1.0, "at most"),
    Goal("reconcile_p99_s", 1.0, "at most"),
]
_JOBS = 200
_QUICK_JOBS = 5
_IMAGE = "registry.k8s.io/pause:3.6"
"""An image of a container that does nothing. Every node has a version of it."""
_CPU = "400m"
"""CPU request of a worker: a node with two cores has room for four workers."""
_REST_S = 60.0
"""Seconds for which requests at rest are counted. A resync of all jobs is spread over about ten minutes."""
_LOOK_REQUESTS = 2
"""Requests of a reconciliation that finds nothing to do: for the resource, and for its pods."""
_QUIET_S = 10.0
_SETTLED_S = 600.0
_ROUNDS = 3
"""Fewer rounds than the other benchmarks' five, which would take an hour."""


def measure(options: Options) -> dict[str, list[float]]:
    """Return the requests per second and the seconds of every round."""
    try:
        client = KubeClient(KubeSettings(timeout_s=30.0))
    except SettingsError as exc:
        note(f"Not measured: there is no Kubernetes cluster ({exc}).\n")
        return {}
    figures: dict[str, list[float]] = {"idle_requests_per_s": [], "reconcile_p99_s": [], "condition_s": []}
    with client:
        try:
            note(f"- Kubernetes {client.server_version()}, {_QUICK_JOBS if options.quick else _JOBS} jobs.")
        except EDLError as exc:
            note(f"Not measured: the Kubernetes cluster does not answer ({exc}).\n")
            return {}
        for path in sorted((ROOT / "serving/kube/chart/files").glob("*.yaml")):
            client.apply(CUSTOM_RESOURCE_DEFINITIONS, yaml.safe_load(path.read_text()))
        for number in range(min(options.repeats, _ROUNDS)):
            progress(f"round {number + 1}")
            for key, value in _measure_round(client, options).items():
                figures[key].append(value)
    note("")
    return figures


def _measure_round(client: KubeClient, options: Options) -> dict[str, float]:
    count, rest_s = (_QUICK_JOBS, 5.0) if options.quick else (_JOBS, _REST_S)
    with _namespace(client) as namespace, tempfile.TemporaryDirectory() as folder:
        proxy = ApiProxy(write_json_kubeconfig(Path(folder)), Path(folder))
        try:
            with _operator(proxy, namespace, Path(folder)) as port, _Conditions(client, namespace) as conditions:
                with ThreadPoolExecutor(16) as pool:
                    for name in [f"job-{number}" for number in range(count)]:
                        pool.submit(conditions.make, name)
                conditions.wait_all(count)
                progress("waiting until all have settled")
                _wait_quiet(proxy)
                seconds = _read_quantile(port, 0.99)
                progress("counting requests at rest")
                before = len(proxy.requests)
                time.sleep(rest_s)
                made = len(proxy.requests) - before
                pods = client.list(PODS, namespace).items
                running = sum(pod.get("status", {}).get("phase") == "Running" for pod in pods)
                note(
                    f"- {count} jobs: {running} of {len(pods)} workers run; first condition after "
                    f"{_quantile(conditions.seconds, 0.5):.2f} s (median) and at most "
                    f"{max(conditions.seconds):.2f} s; "
                    f"{before} requests until all had settled."
                )
                looks = min(OperatorSettings.resync_rate, count / OperatorSettings.resync_s)
                return {
                    "idle_requests_per_s": made / rest_s + _LOOK_REQUESTS * looks,
                    "reconcile_p99_s": seconds,
                    "condition_s": _quantile(conditions.seconds, 0.99),
                }
        finally:
            proxy.close()


@contextlib.contextmanager
def _namespace(client: KubeClient) -> Iterator[str]:
    name = f"edl-bench-{secrets.token_hex(4)}"
    client.create(NAMESPACES, {"metadata": {"name": name}})
    try:
        yield name
    finally:
        client.delete(NAMESPACES, name)
        deadline = time.monotonic() + 600
        while client.get(NAMESPACES, name) is not None and time.monotonic() < deadline:
            time.sleep(1.0)


@contextlib.contextmanager
def _operator(proxy: ApiProxy, namespace: str, folder: Path) -> Iterator[int]:
    """Run an operator, and yield the port of its metrics."""
    log = folder / "operator.log"
    command = [sys.executable, "-m", "edl", "operator", "--kubeconfig", str(proxy.kubeconfig), "-n", namespace]
    command += ["--http-port", "0", "--store", f"sqlite://{folder}/store.sqlite"]
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output, env=dict(os.environ))
    try:
        deadline = time.monotonic() + 60
        while "watched in" not in (text := log.read_text(errors="replace")):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the operator did not start:\n{text}")
            time.sleep(0.1)
        yield int(text.partition("metrics on port ")[2].split()[0])
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(30)


class _Conditions:
    """Makes jobs, and watches when each gets its first condition."""

    def __init__(self, client: KubeClient, namespace: str) -> None:
        self._client = client
        self._namespace = namespace
        self._lock = threading.Lock()
        self._made_s: dict[str, float] = {}
        self._seen_s: dict[str, float] = {}
        self._listed = threading.Event()
        self._watch: KubeWatch | None = None

    def __enter__(self) -> _Conditions:
        self._watch = KubeWatch(self._client, ELASTIC_JOBS, self._namespace, on_change=self._see)
        if not self._listed.wait(60.0):
            raise SystemExit(f"jobs cannot be watched: {self._watch.stale}")
        return self

    def __exit__(self, *_: object) -> None:
        if self._watch is not None:
            self._watch.close()

    @property
    def seconds(self) -> list[float]:
        """Return the seconds from creation to first condition of all jobs, in ascending order."""
        with self._lock:
            return sorted(seen_s - self._made_s[name] for name, seen_s in self._seen_s.items())

    def make(self, name: str) -> None:
        """Create a job."""
        container = {"name": "main", "image": _IMAGE, "command": ["/pause"], "resources": {"requests": {"cpu": _CPU}}}
        spec = {"run": ["nothing"], "gracePeriodSeconds": 0, "template": {"spec": {"containers": [container]}}}
        with self._lock:
            self._made_s[name] = time.monotonic()
        self._client.create(ELASTIC_JOBS, {"metadata": {"name": name}, "spec": spec}, self._namespace)

    def wait_all(self, count: int) -> None:
        """Wait until `count` jobs have a condition."""
        deadline = time.monotonic() + _SETTLED_S
        while len(self.seconds) < count:
            if time.monotonic() > deadline:
                raise SystemExit(f"{len(self.seconds)} of {count} jobs have a condition after {_SETTLED_S:.0f} s")
            time.sleep(0.2)

    def _see(self, change: str, job: dict[str, Any] | None) -> None:
        if change == "LISTED":
            self._listed.set()
        if job is not None and (job.get("status") or {}).get("conditions"):
            with self._lock:
                self._seen_s.setdefault(job["metadata"]["name"], time.monotonic())


def _wait_quiet(proxy: ApiProxy) -> None:
    """Wait until there have been only a few requests per second for a while."""
    deadline = time.monotonic() + _SETTLED_S
    seen, since_s = len(proxy.requests), time.monotonic()
    while time.monotonic() - since_s < _QUIET_S:
        if time.monotonic() > deadline:
            raise SystemExit(f"requests go on: {proxy.requests[-10:]}")
        if len(proxy.requests) - seen > 2 * _QUIET_S:
            seen, since_s = len(proxy.requests), time.monotonic()
        time.sleep(0.1)


def _read_quantile(port: int, share: float) -> float:
    """Return a quantile of the seconds per reconciliation, interpolated within its bucket as in Prometheus."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    pattern = r'^edl_operator_reconcile_seconds_bucket\{kind="elasticjobs",le="([^"]+)"\} (\S+)$'
    buckets = sorted((math.inf if le == "+Inf" else float(le), float(n)) for le, n in re.findall(pattern, text, re.M))
    rank = share * buckets[-1][1]
    low_s, below = 0.0, 0.0
    for high_s, up_to in buckets:
        if up_to >= rank:
            return low_s if math.isinf(high_s) else low_s + (high_s - low_s) * (rank - below) / max(up_to - below, 1.0)
        low_s, below = high_s, up_to
    return low_s


def _quantile(values: list[float], share: float) -> float:
    return values[min(len(values) - 1, math.ceil(share * len(values)) - 1)]


if __name__ == "__main__":
    main("kube_operator", measure, GOALS, __doc__)
