"""How many of a pod fit: what is free, and who comes first."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from edl.kube.client import KubeClient
from edl.kube.settings import KubeSettings
from edl.master.kube.capacity import CapacityWatch, ClusterCapacity, parse_allocatable, pod_requests
from tests.fast.kube.conftest import write_kubeconfig
from tests.fast.kube.server import ApiServer, Reply, Request, status
from tests.fast.master.kube.capacity.objects import node, pod
from tests.waiting import wait_until


def fitting(nodes: list[dict[str, Any]], pods: list[dict[str, Any]], asking: dict[str, Any] | None = None) -> int:
    return ClusterCapacity.of(nodes, pods).count_fitting(asking or pod(1))


TWO = [node("n1", 2)]
SSD = {"nodeSelector": {"disk": "ssd"}}
GATED = {"schedulingGates": [{"name": "kueue"}]}


@pytest.mark.parametrize(
    ("nodes", "pods", "asking", "count"),
    [
        ([node("n1", 2), node("n2", 3)], [], pod(1), 5),
        ([node("n1", 2), node("n2", 3)], [pod(1, node="n1"), pod(2, node="n2")], pod(1), 2),
        ([node("n1", 3), node("n2", 3)], [], pod(2), 2),  # a pod's devices are of one node
        ([node("n1", 1), node("n2", 1)], [], pod(2), 0),
        (TWO, [pod(2, node="n1", phase="Succeeded")], pod(1), 2),
        (TWO, [pod(2, node="n1", phase="Failed")], pod(1), 2),
        (TWO, [pod(2, node="n1", deleting=True)], pod(1), 0),  # until it has ended
        (TWO, [pod(1, deleting=True)], pod(1), 2),  # it gets no node any more
        (TWO, [pod(1)], pod(1), 1),  # what waits comes first
        (TWO, [pod(1), pod(1), pod(1)], pod(1), 0),
        (TWO, [pod(3)], pod(1), 2),  # what fits nowhere must not keep GPUs idle for ever
        (TWO, [pod(1, spec=SSD)], pod(1), 2),
        (TWO, [pod(1, spec=GATED)], pod(1), 2),
        (TWO, [pod(1, priority=-1000)], pod(1, priority=-100), 2),
        (TWO, [pod(1, priority=-100)], pod(1, priority=-100), 1),
        (TWO, [pod(1, priority=-1000)], pod(1), 1),  # a template's priority is not known yet
        ([node("n1", 4)], [], pod(1, requests={"memory": "20Gi"}), 1),
        ([node("n1", 4)], [pod(0, node="n1", requests={"memory": "16Gi"})], pod(1, requests={"memory": "20Gi"}), 0),
        ([node("n1", 4)], [], pod(0, requests={"amd.com/gpu": "1"}), 0),
        ([node("n1", 1)], [pod(1, node="gone"), pod(1, node="gone", deleting=True)], pod(1), 1),
    ],
)
def test_pods_that_fit(nodes: list[Any], pods: list[Any], asking: dict[str, Any], count: int) -> None:
    assert fitting(nodes, pods, asking) == count


def test_nominated_pods_come_first() -> None:
    nodes = [node("n1", 2), node("n2", 2)]
    assert fitting(nodes, [pod(2, node="n1", deleting=True), pod(1, nominated="n1")]) == 2, "n1 is short of one already"
    assert fitting(nodes, [pod(1, node="n1"), pod(1, nominated="n1")]) == 2
    assert fitting(nodes, [pod(1, nominated="gone")]) == 3, "a node that is gone: it waits like others"


def test_own_pending_pod_can_be_left_out() -> None:
    capacity = ClusterCapacity.of([node("n1", 1)], [pod(1, uid="mine")])
    assert capacity.count_fitting(pod(1)) == 0
    assert capacity.count_fitting(pod(1), ignored=["mine"]) == 1


@pytest.mark.parametrize(
    "fields", [{"ready": "False"}, {"ready": "Unknown"}, {"unschedulable": True}, {"pods": "0"}, {"cpu": "0"}]
)
def test_nodes_that_take_no_pods(fields: dict[str, Any]) -> None:
    assert fitting([node("n1", 2, **fields)], [], pod(1, requests={"cpu": "1"})) == 0
    young = node("n1", 2)
    young["status"]["conditions"] = []
    assert fitting([young], []) == 0


TAINT = {"key": "gpu", "value": "yes", "effect": "NoSchedule"}


@pytest.mark.parametrize(
    ("tolerations", "fits"),
    [
        ([], 0),
        ([{"key": "gpu", "operator": "Exists"}], 1),
        ([{"key": "gpu", "operator": "Equal", "value": "yes", "effect": "NoSchedule"}], 1),
        ([{"key": "gpu", "value": "no"}], 0),
        ([{"key": "gpu", "operator": "Exists", "effect": "NoExecute"}], 0),
        ([{"operator": "Exists"}], 1),
    ],
)
def test_taints(tolerations: list[dict[str, Any]], fits: int) -> None:
    asking = pod(1, spec={"tolerations": tolerations})
    assert fitting([node("n1", 1, taints=[TAINT])], [], asking) == fits
    assert fitting([node("n1", 1, taints=[{**TAINT, "effect": "PreferNoSchedule"}])], [], asking) == 1


@pytest.mark.parametrize(
    ("rule", "fits"),
    [
        ({"operator": "In", "values": ["a100", "h100"]}, 1),
        ({"operator": "In", "values": ["h100"]}, 0),
        ({"operator": "NotIn", "values": ["a100"]}, 0),
        ({"operator": "NotIn", "values": ["h100"]}, 1),
        ({"operator": "Exists"}, 1),
        ({"operator": "DoesNotExist"}, 0),
        ({"key": "gpus", "operator": "Gt", "values": ["7"]}, 1),
        ({"key": "gpus", "operator": "Lt", "values": ["8"]}, 0),
        ({"operator": "Gt", "values": ["7"]}, 0),
        ({"key": "gpus", "operator": "Gt", "values": []}, 0),
        ({"operator": "Near", "values": []}, 0),
        ({"key": "missing", "operator": "NotIn", "values": ["x"]}, 1),
    ],
)
def test_node_affinity(rule: dict[str, Any], fits: int) -> None:
    found = [node("n1", 1, labels={"model": "a100", "gpus": "8"})]
    assert fitting(found, [], affine({"matchExpressions": [{"key": "model", **rule}]})) == fits


def affine(*terms: dict[str, Any]) -> dict[str, Any]:
    required = {"nodeSelectorTerms": list(terms)}
    return pod(1, spec={"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}})


def test_terms_are_alternatives() -> None:
    def on(name: str) -> dict[str, Any]:
        return {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [name]}]}

    nodes = [node("n1", 1), node("n2", 1), node("n3", 1)]
    assert fitting(nodes, [], affine(on("n1"))) == 1
    assert fitting(nodes, [], affine(on("n1"), on("n3"))) == 2
    assert fitting(nodes, [], affine({})) == 0, "a term without requirements matches nothing"


def test_devices_for_jobs() -> None:
    """Jobs share what is idle, what they hold, and what is lent; not what others hold or wait for."""
    job, lent = {"edl.io/job": "j"}, {"edl.io/pool": "p"}
    pods = [pod(1, node="n1"), pod(2, node="n1", labels=job), pod(2, node="n2", labels=lent), pod(1), pod(9)]
    pods.append(pod(1, labels=job))
    capacity = ClusterCapacity.of([node("n1", 4), node("n2", 2), node("n3", 2, unschedulable=True)], pods)
    devices = capacity.list_gpus(
        lambda claim: bool(claim.labels.keys() & {"edl.io/job", "edl.io/pool"}),
        lambda claim: "edl.io/job" in claim.labels,
    )
    assert devices == {"n1": 2, "n2": 2}


def container(restart: str = "", **requests: str) -> dict[str, Any]:
    return {"resources": {"requests": requests}, **({"restartPolicy": restart} if restart else {})}


INIT = [container(cpu="5"), container("Always", cpu="1"), container(cpu="4.5")]
"""The worked example of KEP-753: a sidecar runs beside the init containers after it, and the main ones."""
GPUS = {"resources": {"limits": {"nvidia.com/gpu": 2, "cpu": "4"}, "requests": {"cpu": "1"}}}


def main(*cpus: str, **fields: Any) -> dict[str, Any]:
    return {"containers": [container(cpu=cpu) for cpu in cpus], **fields}


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({}, {}),
        ({"containers": [{"resources": None}], "initContainers": None}, {}),
        ({"containers": [container(cpu="100m", memory="1Ki"), container(cpu="1")]}, {"cpu": 1100, "memory": 1024_000}),
        (main("2", initContainers=[container(cpu="3"), container(cpu="1")]), {"cpu": 3000}),
        (main("2", "2", initContainers=[container(cpu="3")]), {"cpu": 4000}),
        (main("2", initContainers=INIT), {"cpu": 5500}),
        (main("6", initContainers=INIT), {"cpu": 7000}),
        (main("1", overhead={"cpu": "250m", "memory": "1Ki"}), {"cpu": 1250, "memory": 1024_000}),
        ({"containers": [GPUS]}, {"nvidia.com/gpu": 2000, "cpu": 1000}),
        (main("1", resources={"requests": {"cpu": "3"}}), {"cpu": 3000}),
        (main("100u"), {"cpu": 1}),
    ],
)
def test_requests_of_a_pod(spec: dict[str, Any], expected: dict[str, int]) -> None:
    assert pod_requests(spec) == {**expected, "pods": 1000}


def test_quantities_of_nodes_round_down() -> None:
    assert parse_allocatable({"cpu": "1999999u", "memory": "1.5"}) == {"cpu": 1999, "memory": 1500}
    with pytest.raises(ValueError, match="much"):
        pod_requests({"containers": [container(cpu="much")]})


ALL_TAKEN = [pod(node="n1"), pod(node="n1")]


class Lists:
    def __init__(self) -> None:
        self.open = threading.Event()
        self.refused = False

    def answer(self, request: Request) -> Reply:
        if "watch=" in request.path:
            return Reply(200, pieces=((60.0, b""),))
        assert self.open.wait(60)
        if self.refused:
            return status(403, "Forbidden", 'User "me" cannot list')
        items: list[dict[str, Any]] = [node(gpus=2)] if urlsplit(request.path).path.endswith("/nodes") else ALL_TAKEN
        return Reply(200, {"items": items, "metadata": {"resourceVersion": "10"}})


@pytest.fixture
def lists() -> Lists:
    return Lists()


@pytest.fixture
def watch(lists: Lists, tmp_path: Path) -> Iterator[CapacityWatch]:
    server = ApiServer()
    server.answer = lists.answer
    settings = KubeSettings(kubeconfig=write_kubeconfig(tmp_path / "config", server.url), timeout_s=60.0)
    try:
        with KubeClient(settings) as client, contextlib.closing(CapacityWatch(client)) as found:
            yield found
    finally:
        lists.open.set()
        server.close()


def count_idle(watch: CapacityWatch) -> int | None:
    capacity = watch.current()
    return None if capacity is None else capacity.count_fitting(pod(gpus=1))


def test_listed_is_not_taken_yet(lists: Lists, watch: CapacityWatch) -> None:
    """Pods that were listed a moment ago, and are not counted yet, must not look like idle GPUs."""
    watch._ready.clear()
    lists.open.set()
    wait_until(lambda: watch._node_watch.listed and watch._pod_watch.listed, "both lists")
    assert watch.current() is None
    watch._ready.set()
    wait_until(lambda: watch.current() is not None)
    assert count_idle(watch) == 0
    assert watch.reason == ""


def test_refused_is_not_idle(lists: Lists, watch: CapacityWatch) -> None:
    """Without the role `edl-capacity` nothing is known, which is no zero; with it, a while later, all is."""
    lists.refused = True
    lists.open.set()
    wait_until(lambda: "nodes" in watch.reason or "pods" in watch.reason, "the reason")
    assert watch.current() is None
    lists.refused = False
    wait_until(lambda: watch.current() is not None and watch.reason == "", "no reason")
    assert count_idle(watch) == 0
