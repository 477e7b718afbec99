"""`edl operator` on a real cluster: jobs of workers that sleep, and all that may go wrong around the operator."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks._api_proxy import ApiProxy
from tests.cluster.api import Cluster
from tests.cluster.operator_process import OperatorFactory, OperatorProcess

MakeJob = Callable[..., dict[str, Any]]
KILLS = 30
MOST_ROUNDS = 90


def read_condition(cluster: Cluster, namespace: str, name: str, kind: str) -> dict[str, Any]:
    job = cluster.get("elasticjobs", name, namespace) or {}
    conditions = job.get("status", {}).get("conditions", [])
    return next((found for found in conditions if found["type"] == kind), {})


def live_pods(cluster: Cluster, namespace: str, name: str = "") -> list[str]:
    pods = cluster.list_pods(namespace, f"edl.io/job={name}" if name else "edl.io/job")
    return sorted(pod["metadata"]["name"] for pod in pods if "deletionTimestamp" not in pod["metadata"])


def scale(cluster: Cluster, namespace: str, name: str, count: int) -> None:
    cluster.kubectl("-n", namespace, "scale", "ej", name, f"--replicas={count}")


def test_job_comes_scales_and_goes(
    cluster: Cluster, namespace: str, operator: OperatorFactory, make_job: MakeJob
) -> None:
    process = operator("--http-port", "0")
    cluster.apply(make_job("sleepy", minReplicas=1, maxReplicas=4, replicas=2))
    cluster.wait("two workers", lambda: len(live_pods(cluster, namespace)) == 2, namespace)
    scale(cluster, namespace, "sleepy", 3)
    cluster.wait("three workers", lambda: len(live_pods(cluster, namespace)) == 3, namespace)
    scale(cluster, namespace, "sleepy", 9)
    cluster.wait("four at most", lambda: len(live_pods(cluster, namespace)) == 4, namespace)
    scale(cluster, namespace, "sleepy", 1)
    cluster.wait("one worker", lambda: len(cluster.list_pods(namespace)) == 1, namespace)
    table = cluster.kubectl("-n", namespace, "get", "ej", "sleepy")
    assert table.split()[:8] == ["NAME", "PHASE", "READY", "WANTED", "MIN", "MAX", "PROGRESS", "AGE"]
    assert json.loads(cluster.kubectl("-n", namespace, "get", "--raw", scale_path(namespace, "sleepy")))["status"][
        "selector"
    ]
    cluster.kubectl("-n", namespace, "patch", "ej", "sleepy", "--type=merge", "-p", '{"spec":{"suspend":true}}')
    cluster.wait("no worker", lambda: not cluster.list_pods(namespace), namespace)
    cluster.kubectl("-n", namespace, "patch", "ej", "sleepy", "--type=merge", "-p", '{"spec":{"suspend":false}}')
    cluster.wait("a worker again", lambda: len(live_pods(cluster, namespace)) == 1, namespace)
    assert "edl-operator" in cluster.kubectl("-n", namespace, "describe", "ej", "sleepy")
    cluster.kubectl("-n", namespace, "delete", "ej", "sleepy", "--wait=false")
    cluster.wait("nothing left", lambda: not cluster.list_pods(namespace), namespace)

    def list_left() -> list[str]:  # the garbage collector, who takes all of it, takes its own time for each
        left = cluster.kubectl("-n", namespace, "get", "pdb,services,configmaps", "-o", "name").split()
        return [name for name in left if "sleepy" in name]

    cluster.wait("nothing left beside the pods", lambda: not list_left(), namespace)
    assert process.stop() == 143


def scale_path(namespace: str, name: str) -> str:
    return f"/apis/edl.io/v1alpha1/namespaces/{namespace}/elasticjobs/{name}/scale"


GARBAGE: dict[str, tuple[dict[str, Any], str]] = {
    "bounds": ({"minReplicas": 5, "maxReplicas": 2}, "MinAboveMax"),
    "no-container": ({"template": {"spec": {}}}, "NoContainer"),
    "own-args": (
        {"template": {"spec": {"containers": [{"name": "m", "image": "i", "args": ["x"]}]}}},
        "ArgsInTemplate",
    ),
    "bad-port": (
        {"template": {"spec": {"containers": [{"name": "m", "image": "i", "ports": [{"containerPort": 99999999}]}]}}},
        "ObjectRefused",
    ),
    "not-a-pod": (
        {"template": {"spec": {"containers": [{"name": "m", "image": "i"}], "nodeName": 7}}},
        "ObjectRefused",
    ),
}


def test_garbage_is_refused_in_words(
    cluster: Cluster, namespace: str, operator: OperatorFactory, make_job: MakeJob
) -> None:
    operator()
    cluster.apply(*(make_job(name, **spec) for name, (spec, _) in GARBAGE.items()), make_job("good"))
    cluster.wait("the good job's worker", lambda: live_pods(cluster, namespace, "good"), namespace)
    for name, (_, reason) in GARBAGE.items():
        found = cluster.wait(
            f"{name} is refused",
            lambda name=name: (
                accepted  # type: ignore[misc]
                if (accepted := read_condition(cluster, namespace, name, "Accepted")).get("status") == "False"
                else None
            ),
            namespace,
        )
        assert found["reason"] == reason, found
        assert found["message"]
        assert reason in cluster.kubectl("-n", namespace, "describe", "ej", name)
    for name in GARBAGE:
        assert live_pods(cluster, namespace, name) == []
    cluster.kubectl("-n", namespace, "patch", "ej", "bounds", "--type=merge", "-p", '{"spec":{"maxReplicas":5}}')
    cluster.wait("the mended job's workers", lambda: len(live_pods(cluster, namespace, "bounds")) == 5, namespace)


def test_two_operators_do_no_harm(
    cluster: Cluster, namespace: str, operator: OperatorFactory, make_job: MakeJob
) -> None:
    first, second = operator(), operator()
    for process in (first, second):
        process.wait_for("watched")
    with PodRecorder(cluster, namespace) as recorder:
        cluster.apply(*(make_job(f"job-{number}", maxReplicas=3, replicas=2) for number in range(5)))
        cluster.wait("ten workers", lambda: len(live_pods(cluster, namespace)) == 10, namespace)
        for number in range(5):
            scale(cluster, namespace, f"job-{number}", 3)
        cluster.wait("fifteen workers", lambda: len(live_pods(cluster, namespace)) == 15, namespace)
        first.kill()
        scale(cluster, namespace, "job-0", 1)
        cluster.wait("one worker", lambda: len(live_pods(cluster, namespace, "job-0")) == 1, namespace)
    recorder.check()
    assert len(recorder.names) == 15


@pytest.mark.slow
def test_operator_killed_between_calls(
    cluster: Cluster,
    namespace: str,
    operator: OperatorFactory,
    proxy: ApiProxy,
    make_job: MakeJob,
) -> None:
    """At 30 random points: before a call arrives, or when it was carried out and not answered.

    A round in which the operator has fewer calls left to make than it was to make counts as none.
    """
    chance = random.Random(12)
    killer = OperatorKiller(proxy)
    process = operator("--kubeconfig", str(proxy.kubeconfig), "--no-capacity")
    wanted = {"a": 2, "b": 1}
    with PodRecorder(cluster, namespace) as recorder:
        cluster.apply(*(make_job(name, maxReplicas=4, replicas=count) for name, count in wanted.items()))
        for number in range(MOST_ROUNDS):
            if killer.count == KILLS:
                break
            killer.arm(process, chance.randint(1, 9), after=chance.random() < 0.5)
            name = chance.choice(sorted(wanted))
            wanted[name] = chance.choice([count for count in range(1, 5) if count != wanted[name]])
            scale(cluster, namespace, name, wanted[name])
            if not process.running:
                process.start()
            cluster.wait(f"kill {number}", lambda: killer.killed(cluster, namespace, wanted), namespace)
            process.kill()
            if number % 3 == 0:
                process.start()
        killer.disarm()
        if not process.running:
            process.start()
        for name, count in wanted.items():
            cluster.wait(
                f"{name} has {count}",
                lambda name=name, count=count: len(live_pods(cluster, namespace, name)) == count,  # type: ignore[misc]
                namespace,
            )
        settled = live_pods(cluster, namespace)
        time.sleep(2.0)
        assert live_pods(cluster, namespace) == settled
    recorder.check()
    assert killer.count == KILLS, f"in {MOST_ROUNDS} rounds only {killer.count} times a call was left to kill at"
    indexes = [name.rsplit("-", 1)[0] for name in settled]
    assert len(set(indexes)) == len(indexes), f"a member has two pods: {settled}"


@pytest.mark.slow
def test_api_server_away(
    cluster: Cluster, namespace: str, operator: OperatorFactory, proxy: ApiProxy, make_job: MakeJob
) -> None:
    process = operator("--kubeconfig", str(proxy.kubeconfig), "--no-capacity", "--timeout", "3")
    cluster.apply(make_job("sleepy", maxReplicas=4, replicas=2))
    cluster.wait("two workers", lambda: count_running(cluster, namespace) == 2, namespace)
    before = {pod["metadata"]["uid"]: pod["status"]["startTime"] for pod in cluster.list_pods(namespace)}
    proxy.go_away()
    scale(cluster, namespace, "sleepy", 3)
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        assert process.running, process.text[-3000:]
        after = {pod["metadata"]["uid"]: pod["status"].get("startTime") for pod in cluster.list_pods(namespace)}
        assert after == before
        time.sleep(1.0)
    proxy.come_back()
    cluster.wait("the third worker", lambda: len(live_pods(cluster, namespace)) == 3, namespace)
    assert before.keys() < {pod["metadata"]["uid"] for pod in cluster.list_pods(namespace)}
    # Of a call of its own, if it had any to make; else of its watches.
    assert re.search("the API server does not answer|Request attempt .* failed", process.text), process.text


def test_missing_resource_definitions(
    cluster: Cluster, namespace: str, operator: OperatorFactory, proxy: ApiProxy, make_job: MakeJob
) -> None:
    proxy.hidden = "/apis/edl.io"
    process = operator("--kubeconfig", str(proxy.kubeconfig), "--no-capacity", "--http-port", "0")
    process.wait_for("install the CRD")
    process.wait_for("metrics on port ")  # another thread says so
    port = int(process.text.partition("metrics on port ")[2].split()[0])
    assert ask(port, "/livez") == (200, "ok\n")
    status, text = ask(port, "/readyz")
    assert status == 503
    assert "elasticjobs.edl.io" in text
    proxy.hidden = ""
    cluster.wait("readiness", lambda: ask(port, "/readyz")[0] == 200, namespace)
    cluster.apply(make_job("sleepy"))
    cluster.wait("a worker", lambda: live_pods(cluster, namespace), namespace)
    proxy.hidden = "/apis/edl.io"
    proxy.go_away()  # so that the watches that are open end, as they do when a CRD is deleted
    proxy.come_back()
    cluster.wait("unreadiness", lambda: ask(port, "/readyz")[0] == 503, namespace)
    assert ask(port, "/livez")[0] == 200
    proxy.hidden = ""
    cluster.apply(make_job("later"))
    cluster.wait("a worker of the second", lambda: live_pods(cluster, namespace, "later"), namespace)
    cluster.wait("readiness again", lambda: ask(port, "/readyz")[0] == 200, namespace)


def test_forbidden_namespace_is_left_out(
    cluster: Cluster, namespace: str, operator: OperatorFactory, make_job: MakeJob
) -> None:
    process = operator("--namespace", "kube-system", "--no-capacity")
    process.wait_for("namespace kube-system is left out")
    cluster.apply(make_job("sleepy"))
    cluster.wait("a worker", lambda: live_pods(cluster, namespace), namespace)


def test_rest_costs_few_requests(
    cluster: Cluster, namespace: str, operator: OperatorFactory, proxy: ApiProxy, make_job: MakeJob
) -> None:
    """Scenario 9 at a smaller scale; `benchmarks/kube_operator.py` has 200 jobs."""
    operator("--kubeconfig", str(proxy.kubeconfig))
    names = [f"job-{number}" for number in range(12)]
    cluster.apply(*(make_job(name) for name in names))
    for name in names:
        cluster.wait(
            f"a condition of {name}", lambda name=name: read_condition(cluster, namespace, name, "Accepted"), namespace
        )  # type: ignore[misc]
    cluster.wait("all workers", lambda: count_running(cluster, namespace) == len(names), namespace)
    wait_quiet(proxy)
    before = len(proxy.requests)
    time.sleep(15.0)
    made = proxy.requests[before:]
    assert len(made) <= 12, f"{len(made)} requests in 15 s at rest: {made}"


def wait_quiet(proxy: ApiProxy, seconds: float = 4.0, timeout_s: float = 150.0) -> None:
    deadline = time.monotonic() + timeout_s
    seen, since_s = len(proxy.requests), time.monotonic()
    while time.monotonic() - since_s < seconds:
        assert time.monotonic() < deadline, f"requests go on: {proxy.requests[-20:]}"
        if len(proxy.requests) - seen > 2:
            seen, since_s = len(proxy.requests), time.monotonic()
        time.sleep(0.1)


def count_running(cluster: Cluster, namespace: str) -> int:
    return sum(pod["status"].get("phase") == "Running" for pod in cluster.list_pods(namespace))


def ask(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as exc:
        return exc.code, exc.read().decode()


class OperatorKiller:
    """Kills an operator at its k-th call from now, before the call arrives or before it is answered."""

    def __init__(self, proxy: ApiProxy) -> None:
        self._proxy = proxy
        self._lock = threading.Lock()
        self._left = 0
        self._after = False
        self._process: OperatorProcess | None = None
        self.count = 0
        proxy.before = lambda line: self._look(line, False)
        proxy.after = lambda line: self._look(line, True)

    def arm(self, process: OperatorProcess, calls: int, *, after: bool) -> None:
        with self._lock:
            self._process, self._left, self._after = process, calls, after

    def disarm(self) -> None:
        with self._lock:
            self._process = None

    def killed(self, cluster: Cluster, namespace: str, wanted: dict[str, int]) -> bool:
        """Whether it was; or nothing is left to do, so that no call comes any more."""
        with self._lock:
            if self._process is None:
                return True
        return all(len(live_pods(cluster, namespace, name)) == count for name, count in wanted.items())

    def _look(self, line: str, after: bool) -> None:
        if "watch=" in line or not line.endswith(" edl"):
            return  # kopf's own, which decide nothing
        with self._lock:
            if self._process is None or after != self._after:
                return
            self._left -= 1
            if self._left > 0:
                return
            process, self._process = self._process, None
            self.count += 1
        process.kill()
        raise ConnectionError("the operator is dead")


WATCH = """
import sys
from edl.kube.client import KubeClient
from edl.kube.resource_types import PODS
from edl.kube.settings import KubeSettings
from edl.kube.watch import KubeWatch
client = KubeClient(KubeSettings(kubeconfig=sys.argv[1], namespace=sys.argv[2]))
def show(change, pod):
    if pod is not None:
        print(change, pod["metadata"]["name"], pod["metadata"]["uid"], flush=True)
    else:
        print(change, "-", "-", flush=True)
watch = KubeWatch(client, PODS, sys.argv[2], on_change=show)
sys.stdin.read()
"""
LAST = "last-of-all"


class PodRecorder:
    """Records all pods that there ever were in a namespace."""

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        self._cluster = cluster
        self._namespace = namespace
        self._command = [sys.executable, "-c", WATCH, str(cluster.kubeconfig), namespace]
        self._output = tempfile.NamedTemporaryFile()  # noqa: SIM115 - closed by __exit__
        self.lines: list[list[str]] = []

    def __enter__(self) -> PodRecorder:
        self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=self._output, text=True)
        self._cluster.wait("the watch", self._read)
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        try:
            if kind is None:
                self._read_to_end()
        finally:
            self._process.communicate("", timeout=60)
            self._output.close()

    def _read_to_end(self) -> None:
        """Read until a pod that is made now: what was made before has been seen by then."""
        template = {"spec": {"nodeSelector": {"none": "such"}, "containers": [{"name": "last", "image": "none"}]}}
        self._cluster.run_pod(self._namespace, LAST, template)
        self._cluster.wait("the last pod", lambda: any(name == LAST for _, name, _ in self._read()))
        self.lines = [line for line in self._read() if line[1] != LAST]

    def _read(self) -> list[list[str]]:
        text = Path(self._output.name).read_text()
        return [line.split() for line in text.splitlines(keepends=True) if line.endswith("\n")]

    @property
    def names(self) -> set[str]:
        return {name for change, name, _ in self.lines if change == "ADDED"}

    def check(self) -> None:
        """No name was ever used by two pods."""
        uids: dict[str, set[str]] = {}
        for _, name, uid in self.lines:
            uids.setdefault(name, set()).add(uid)
        twice = {name: found for name, found in uids.items() if len(found) > 1}
        assert not twice, f"made twice: {twice}"
