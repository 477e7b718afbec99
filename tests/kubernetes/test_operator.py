"""`edl operator` on a real cluster: jobs of workers that sleep, and all that may go wrong around the operator."""

from __future__ import annotations

import contextlib
import json
import random
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks._api_proxy import ApiProxy
from edl.kube.resource_types import PODS
from edl.kube.watch import KubeWatch
from tests.cluster.api import Cluster
from tests.cluster.operator_process import ACCOUNT, OperatorFactory, OperatorProcess, install_account

MakeJob = Callable[..., dict[str, Any]]
KILLS = 8
MOST_ROUNDS = 30


@pytest.fixture
def proxy(cluster: Cluster, namespace: str, tmp_path: Path) -> Iterator[ApiProxy]:
    """Between an operator with the chart's rights and the API server: `operator("--kubeconfig", proxy.kubeconfig)`."""
    install_account(cluster, namespace, capacity=False)
    account = tmp_path / "account.json"
    cluster.write_account_kubeconfig(namespace, ACCOUNT, account)
    with contextlib.closing(ApiProxy(account, tmp_path)) as found:
        yield found


@pytest.fixture
def make_job(namespace: str, pod_template: Callable[..., dict[str, Any]], tmp_path: Path) -> MakeJob:
    """An ElasticJob whose workers sleep."""

    def make(name: str, **spec: Any) -> dict[str, Any]:
        common = {"scaling": "external", "store": f"sqlite://{tmp_path}/store.sqlite", "gracePeriodSeconds": 1}
        template = pod_template(["sh", "-c", "sleep 100000"], cpu="1m", memory="32Mi")
        return {
            "apiVersion": "edl.io/v1alpha1",
            "kind": "ElasticJob",
            "metadata": {"name": name, "namespace": namespace},
            "spec": {"run": ["train.py"], "template": template, **common, **spec},
        }

    return make


def read_accepted(cluster: Cluster, namespace: str, name: str) -> dict[str, Any]:
    job = cluster.get("elasticjobs", name, namespace) or {}
    conditions = job.get("status", {}).get("conditions", [])
    return next((found for found in conditions if found["type"] == "Accepted"), {})


def live_pods(cluster: Cluster, namespace: str, name: str = "") -> list[str]:
    pods = cluster.list_pods(namespace, f"edl.io/job={name}" if name else "edl.io/job")
    return sorted(pod["metadata"]["name"] for pod in pods if "deletionTimestamp" not in pod["metadata"])


def wait_live(cluster: Cluster, namespace: str, name: str, count: int) -> None:
    cluster.wait(f"{count} pods of {name}", lambda: len(live_pods(cluster, namespace, name)) == count, namespace)


def scale(cluster: Cluster, namespace: str, name: str, count: int) -> None:
    cluster.kubectl("-n", namespace, "scale", "ej", name, f"--replicas={count}")


def patch(cluster: Cluster, namespace: str, name: str, **spec: Any) -> None:
    cluster.kubectl("-n", namespace, "patch", "ej", name, "--type=merge", "-p", json.dumps({"spec": spec}))


def test_job_comes_scales_and_goes(
    cluster: Cluster, namespace: str, operator: OperatorFactory, make_job: MakeJob
) -> None:
    process = operator("--namespace", "kube-system", "--no-capacity")
    process.wait_for("namespace kube-system is left out")
    broken = {"spec": {"containers": [{"name": "m", "image": "i", "ports": [{"containerPort": 99999999}]}]}}
    cluster.apply(
        make_job("sleepy", maxReplicas=4, replicas=2),
        make_job("bounds", minReplicas=5, maxReplicas=2),
        make_job("refused", template=broken),
    )
    wait_live(cluster, namespace, "sleepy", 2)
    for count, found in ((3, 3), (9, 4), (1, 1)):
        scale(cluster, namespace, "sleepy", count)
        wait_live(cluster, namespace, "sleepy", found)
    table = cluster.kubectl("-n", namespace, "get", "ej", "sleepy")
    assert table.split()[:8] == ["NAME", "PHASE", "READY", "WANTED", "MIN", "MAX", "PROGRESS", "AGE"]
    path = f"/apis/edl.io/v1alpha1/namespaces/{namespace}/elasticjobs/sleepy/scale"
    assert cluster.ask(path)["status"]["selector"]
    patch(cluster, namespace, "sleepy", suspend=True)
    wait_live(cluster, namespace, "sleepy", 0)
    patch(cluster, namespace, "sleepy", suspend=False)
    wait_live(cluster, namespace, "sleepy", 1)

    for name, reason in (("bounds", "MinAboveMax"), ("refused", "ObjectRefused")):
        found = cluster.wait("a refusal", lambda name=name: read_accepted(cluster, namespace, name), namespace)  # type: ignore[misc]
        assert (found["status"], found["reason"]) == ("False", reason), found
        assert reason in cluster.kubectl("-n", namespace, "describe", "ej", name)
        assert live_pods(cluster, namespace, name) == []
    patch(cluster, namespace, "bounds", maxReplicas=5)
    wait_live(cluster, namespace, "bounds", 5)

    cluster.kubectl("-n", namespace, "delete", "ej", "sleepy", "--wait=false")

    def list_left() -> list[str]:  # the garbage collector, who takes all of it, takes its own time for each
        left = cluster.kubectl("-n", namespace, "get", "pods,pdb,services,configmaps", "-o", "name").split()
        return [name for name in left if "sleepy" in name]

    cluster.wait("nothing left", lambda: not list_left(), namespace)
    assert process.stop() == 143


def test_operator_killed_between_calls(
    cluster: Cluster, namespace: str, operator: OperatorFactory, proxy: ApiProxy, make_job: MakeJob
) -> None:
    """At random points: before a call arrives, or when it was carried out and not answered.

    A round in which the operator has fewer calls left to make than it was to make counts as none.
    """
    chance = random.Random(12)
    killer = OperatorKiller(proxy)
    process = operator("--kubeconfig", str(proxy.kubeconfig), "--no-capacity")
    second = operator("--no-capacity")  # two do no harm
    wanted = {"a": 2, "b": 1}
    uids: dict[str, set[str]] = {}

    def note(change: str, pod: Any) -> None:
        if pod is not None:
            uids.setdefault(pod["metadata"]["name"], set()).add(pod["metadata"]["uid"])

    with contextlib.closing(KubeWatch(cluster.client, PODS, namespace, on_change=note)) as watch:
        assert watch.wait_listed(60)
        cluster.apply(*(make_job(name, maxReplicas=4, replicas=count) for name, count in wanted.items()))
        for name, count in wanted.items():
            wait_live(cluster, namespace, name, count)
        second.kill()
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
        killer.disarm()
        process.start()
        for name, count in wanted.items():
            wait_live(cluster, namespace, name, count)
        settled = live_pods(cluster, namespace)
        cluster.wait("the watch", lambda: set(settled) <= uids.keys())
    assert killer.count == KILLS, f"in {MOST_ROUNDS} rounds only {killer.count} times a call was left to kill at"
    assert {name: found for name, found in uids.items() if len(found) > 1} == {}, "a name was given twice"
    indexes = [name.rsplit("-", 1)[0] for name in settled]
    assert len(set(indexes)) == len(indexes), f"a member has two pods: {settled}"


class OperatorKiller:
    """Kills an operator at its k-th call from now, before the call arrives or before it is answered."""

    def __init__(self, proxy: ApiProxy) -> None:
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


def ask(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as exc:
        return exc.code, exc.read().decode()
