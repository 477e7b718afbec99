"""`edl operator` on a real cluster: jobs of workers that sleep, and all that may go wrong around the operator."""

from __future__ import annotations

import contextlib
import json
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks._api_proxy import ApiProxy
from edl.kube.resource_types import PODS
from edl.kube.watch import KubeWatch
from tests.cluster.api import Cluster
from tests.cluster.operator_process import ACCOUNT, OperatorProcess, install_account
from tests.kubernetes.scenarios.scene import Scene, find_condition

CreateJob = Callable[..., None]
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
def create_job(scene: Scene, tmp_path: Path) -> CreateJob:
    """Creates an ElasticJob whose workers sleep."""
    common: dict[str, Any] = {
        "scaling": "external",
        "store": f"sqlite://{tmp_path}/store.sqlite",
        "gracePeriodSeconds": 1,
    }
    common["template"] = scene.pod_template(["sh", "-c", "sleep 100000"], cpu="1m", memory="32Mi")
    return lambda name, **spec: scene.create_job(name, ["train.py"], **{**common, **spec})


def read_accepted(scene: Scene, name: str) -> dict[str, Any]:
    return find_condition(scene.cluster.get("elasticjobs", name, scene.namespace), "Accepted")


def live_pods(scene: Scene, *names: str) -> list[str]:
    """Names of the pods of jobs that are not asked to end."""
    pods = [pod["metadata"] for name in names for pod in scene.pods(name)]
    return sorted(metadata["name"] for metadata in pods if "deletionTimestamp" not in metadata)


def wait_live(scene: Scene, name: str, count: int) -> None:
    scene.wait(f"{count} pods of {name}", lambda: len(live_pods(scene, name)) == count)


def scale(scene: Scene, name: str, count: int) -> None:
    scene.cluster.kubectl("-n", scene.namespace, "scale", "ej", name, f"--replicas={count}")


def patch(scene: Scene, name: str, **spec: Any) -> None:
    patch = json.dumps({"spec": spec})
    scene.cluster.kubectl("-n", scene.namespace, "patch", "ej", name, "--type=merge", "-p", patch)


def test_job_comes_scales_and_goes(scene: Scene, create_job: CreateJob) -> None:
    cluster, namespace = scene.cluster, scene.namespace
    process = scene.operator("--namespace", "kube-system", "--no-capacity")
    process.wait_for("namespace kube-system is left out")
    broken = {"spec": {"containers": [{"name": "m", "image": "i", "ports": [{"containerPort": 99999999}]}]}}
    create_job("sleepy", maxReplicas=4, replicas=2)
    create_job("bounds", minReplicas=5, maxReplicas=2)
    create_job("refused", template=broken)
    wait_live(scene, "sleepy", 2)
    for count, found in ((3, 3), (9, 4), (1, 1)):
        scale(scene, "sleepy", count)
        wait_live(scene, "sleepy", found)
    table = cluster.kubectl("-n", namespace, "get", "ej", "sleepy")
    assert table.split()[:8] == ["NAME", "PHASE", "READY", "WANTED", "MIN", "MAX", "PROGRESS", "AGE"]
    path = f"/apis/edl.io/v1alpha1/namespaces/{namespace}/elasticjobs/sleepy/scale"
    assert cluster.ask(path)["status"]["selector"]
    patch(scene, "sleepy", suspend=True)
    wait_live(scene, "sleepy", 0)
    patch(scene, "sleepy", suspend=False)
    wait_live(scene, "sleepy", 1)

    for name, reason in (("bounds", "MinAboveMax"), ("refused", "ObjectRefused")):
        found = scene.wait("a refusal", lambda name=name: read_accepted(scene, name))  # type: ignore[misc]
        assert (found["status"], found["reason"]) == ("False", reason), found
        assert reason in cluster.kubectl("-n", namespace, "describe", "ej", name)
        assert live_pods(scene, name) == []
    patch(scene, "bounds", maxReplicas=5)
    wait_live(scene, "bounds", 5)

    cluster.kubectl("-n", namespace, "delete", "ej", "sleepy", "--wait=false")

    def list_left() -> list[str]:  # the garbage collector, who takes all of it, takes its own time for each
        left = cluster.kubectl("-n", namespace, "get", "pods,pdb,services,configmaps", "-o", "name").split()
        return [name for name in left if "sleepy" in name]

    scene.wait("nothing left", lambda: not list_left())
    assert process.stop() == 143


def test_operator_killed_between_calls(scene: Scene, proxy: ApiProxy, create_job: CreateJob) -> None:
    """At random points: before a call arrives, or when it was carried out and not answered.

    A round in which the operator has fewer calls left to make than it was to make counts as none.
    """
    chance = random.Random(12)
    killer = OperatorKiller(proxy)
    process = scene.operator("--kubeconfig", str(proxy.kubeconfig), "--no-capacity")
    second = scene.operator("--no-capacity")  # two do no harm
    wanted = {"a": 2, "b": 1}
    uids: dict[str, set[str]] = {}

    def note(change: str, pod: Any) -> None:
        if pod is not None:
            uids.setdefault(pod["metadata"]["name"], set()).add(pod["metadata"]["uid"])

    with contextlib.closing(KubeWatch(scene.cluster.client, PODS, scene.namespace, on_change=note)) as watch:
        assert watch.wait_listed(60)
        for name, count in wanted.items():
            create_job(name, maxReplicas=4, replicas=count)
        for name, count in wanted.items():
            wait_live(scene, name, count)
        second.kill()
        for number in range(MOST_ROUNDS):
            if killer.count == KILLS:
                break
            killer.arm(process, chance.randint(1, 9), after=chance.random() < 0.5)
            name = chance.choice(sorted(wanted))
            wanted[name] = chance.choice([count for count in range(1, 5) if count != wanted[name]])
            scale(scene, name, wanted[name])
            if not process.running:
                process.start()
            scene.wait(f"kill {number}", lambda: killer.killed(scene, wanted))
            process.kill()
        killer.arm(None, 0, after=False)
        process.start()
        for name, count in wanted.items():
            wait_live(scene, name, count)
        settled = live_pods(scene, *wanted)
        scene.wait("the watch", lambda: set(settled) <= uids.keys())
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

    def arm(self, process: OperatorProcess | None, calls: int, *, after: bool) -> None:
        with self._lock:
            self._process, self._left, self._after = process, calls, after

    def killed(self, scene: Scene, wanted: dict[str, int]) -> bool:
        """Whether it was; or nothing is left to do, so that no call comes any more."""
        with self._lock:
            if self._process is None:
                return True
        return all(len(live_pods(scene, name)) == count for name, count in wanted.items())

    def _look(self, line: str, after: bool) -> None:
        if "watch=" in line or not line.endswith(" edl"):
            return  # they decide nothing
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


def test_missing_resource_definitions(scene: Scene, proxy: ApiProxy, create_job: CreateJob) -> None:
    proxy.hidden = "/apis/edl.io"
    process = scene.operator("--kubeconfig", str(proxy.kubeconfig), "--no-capacity", "--http-port", "0")
    process.wait_for("install the CRD")
    assert process.ask("/livez") == (200, "[+]operator ok\nlivez check passed\n")
    status, text = process.ask("/readyz")
    assert status == 503
    assert "elasticjobs.edl.io" in text
    proxy.hidden = ""
    scene.wait("readiness", lambda: process.ask("/readyz")[0] == 200)
    create_job("sleepy")
    scene.wait("a worker", lambda: live_pods(scene, "sleepy"))
    proxy.hidden = "/apis/edl.io"
    proxy.go_away()  # so that the watches that are open end, as they do when a CRD is deleted
    proxy.come_back()
    scene.wait("unreadiness", lambda: process.ask("/readyz")[0] == 503)
    assert process.ask("/livez")[0] == 200
    proxy.hidden = ""
    create_job("later")
    scene.wait("a worker of the second", lambda: live_pods(scene, "later"))
    scene.wait("readiness again", lambda: process.ask("/readyz")[0] == 200)
