"""A pytest plugin with a real Kubernetes cluster.

`cluster` is the one that KUBECONFIG names, or the one of `../shared/kube` on this machine, which is brought up if it is
not, and taken down by the last test process that uses it. `namespace` is a namespace of the test's own, `operator`
starts `edl operator` in it, `pod_template` makes pods that run this project, `gpus` advertises GPUs that do not exist,
and `stoppable_nodes` stops nodes; a test with one of the last two is alone with it, and one that stops nodes runs among
those that run one by one.

`helm` is the program, in both versions.

    KUBECONFIG=FILE [EDL_TEST_IMAGE=IMAGE] pytest tests/kubernetes

An image is needed where the nodes are other machines: one with this version of EDL, and `python -m edl`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.cluster import pods
from tests.cluster.locks import exclusive_lock, is_free, shared_lock
from tests.cluster.machine import SCRIPT, KubeMachine

if TYPE_CHECKING:
    from tests.cluster.api import Cluster
    from tests.cluster.operator_process import OperatorFactory

TEST_S = 900
PROCESS_LABEL = "edl.io/test-process"
DELETED_S = 240.0
KILLED_S = 5.0
"""After so long a pod's containers have ended, if its node's kubelet says nothing else."""
KUBECONFIG = os.environ.get("KUBECONFIG", "")
IMAGE = os.environ.get("EDL_TEST_IMAGE", "")
CHART = Path(__file__).parent.parent / "serving/kube/chart"
DESCRIPTIONS = pytest.StashKey[dict[str, Callable[[], str]]]()
"""What a failed test's report shows, by its title; fixtures fill it, also those that a test has by way of others."""


def _skip(reason: str) -> None:
    # In CI, nothing may be skipped where the cluster can be built.
    if os.environ.get("CI") == "true" and SCRIPT.exists():
        pytest.fail(f"{reason}; in CI nothing may be skipped")
    pytest.skip(reason)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "cluster" in getattr(item, "fixturenames", ()):
            if "stoppable_nodes" in item.fixturenames:  # else both processes would wait for each other
                item.add_marker(pytest.mark.alone)
            if item.get_closest_marker("timeout") is None:
                # A test waits for its turn with what others use; that is in its fixtures.
                item.add_marker(pytest.mark.timeout(TEST_S, func_only=True))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    outcome: Any = yield
    report = outcome.get_result()
    if report.when == "call" and report.failed:
        for title, describe in item.stash.get(DESCRIPTIONS, {}).items():
            try:
                text = describe()
            except Exception as exc:  # noqa: BLE001 - the test's own failure is what the report is about
                text = f"not to be had: {exc!r}"
            report.sections.append((title, text))


@pytest.fixture(params=[3, 4], ids=["helm3", "helm4"])
def helm(request: pytest.FixtureRequest) -> str:
    """Helm's program, of both versions that people use."""
    fetched = CHART.parent.parent.parent / f".tools/helm/helm{request.param}"
    if not fetched.exists():
        _skip(f"{fetched} is not there: tools/kubernetes.sh fetches it")
    return str(fetched)


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The cluster, with EDL's resources; the same for all tests and test processes of this machine."""
    if importlib.util.find_spec("kubernetes") is None:
        _skip("the package kubernetes is not installed: pip install 'elastic-distill[kubernetes]'")
    from tests.cluster.api import Cluster, helm_program, kubectl_program

    if not kubectl_program() or not helm_program():
        _skip("kubectl or helm is neither in .tools/helm nor on PATH: tools/kubernetes.sh fetches them")
    machine = KubeMachine() if SCRIPT.exists() and os.getuid() == 0 else None
    if KUBECONFIG and not (machine and Path(KUBECONFIG).resolve() == machine.home / "run/kubeconfig"):
        found = Cluster(Path(KUBECONFIG), image=IMAGE)
        try:
            install_resources(found)
            yield found
        finally:
            found.close()
        return
    if machine is None:
        _skip(
            "no Kubernetes cluster: KUBECONFIG names none, and the one that ../shared/kube builds is not here, or needs"
            " root"
        )
        return
    folder = tmp_path_factory.mktemp("kube")
    with contextlib.ExitStack() as stack:
        with exclusive_lock("up"):
            machine.up()
            stack.enter_context(shared_lock("use"))
            image = machine.load_image(pods.make_root(folder / "image"))
            machine.write_kubeconfig(folder / "kubeconfig.json")
            found = Cluster(folder / "kubeconfig.json", machine, image)
            stack.callback(found.close)
            _clear_killed_tests(found)
            install_resources(found)
        yield found
        for name in _list_namespaces(found, str(os.getpid())):
            wait_for_deletion(found, name)
    with exclusive_lock("up"):
        if machine.started_by_tests and is_free("use"):
            machine.down()


def _clear_killed_tests(cluster: Cluster) -> None:
    """Remove what tests have left that were killed: stopped programs, stopped nodes, and namespaces."""
    assert cluster.machine is not None
    if is_free("nodes"):
        cluster.machine.continue_api_server()
        _start_stopped_nodes(cluster.machine)
    for name, process in _list_namespaces(cluster).items():
        if not Path(f"/proc/{process}").exists():
            delete_namespace(cluster, name)


def _list_namespaces(cluster: Cluster, process: str = "") -> dict[str, str]:
    """Namespaces of a test process, or of all, with the process."""
    query = {"labelSelector": f"{PROCESS_LABEL}={process}" if process else PROCESS_LABEL}
    found = [item["metadata"] for item in cluster.ask("/api/v1/namespaces", query=query)["items"]]
    return {metadata["name"]: metadata["labels"][PROCESS_LABEL] for metadata in found}


def install_resources(cluster: Cluster) -> None:
    """Install EDL's resources and the priority of its teachers."""
    for path in sorted((CHART / "files").glob("*.yaml")):
        cluster.kubectl("apply", "-f", str(path))
    shutil.rmtree(cluster.kubeconfig.parent / "kubectl", ignore_errors=True)  # kubectl's cache knows no short names yet
    cluster.apply(
        {
            "apiVersion": "scheduling.k8s.io/v1",
            "kind": "PriorityClass",
            "metadata": {"name": "edl-teacher"},
            "value": -100,
            "preemptionPolicy": "Never",
        }
    )


@pytest.fixture
def _cluster_lock(request: pytest.FixtureRequest, cluster: Cluster) -> Iterator[None]:
    lock = exclusive_lock if "stoppable_nodes" in request.fixturenames else shared_lock
    with lock("nodes"):
        yield


@pytest.fixture
def machine(cluster: Cluster) -> KubeMachine:
    """The cluster's machine: skips where the cluster is another's."""
    if cluster.machine is None:
        pytest.skip("the cluster that KUBECONFIG names has nodes that this test could not stop or give GPUs")
    return cluster.machine


@pytest.fixture
def gpus(machine: KubeMachine, cluster: Cluster, _cluster_lock: None) -> Iterator[Callable[[str, int], None]]:
    """`gpus("node1", 2)` advertises two `nvidia.com/gpu`; no other test has any meanwhile."""
    given: set[str] = set()

    def set_gpus(node: str, count: int) -> None:
        given.add(node)
        machine.set_gpus(node, count)
        cluster.wait(f"{node} with {count} GPUs", lambda: _count_gpus(cluster, node) == count)

    with exclusive_lock("gpus"):
        for node in cluster.nodes():
            if _count_gpus(cluster, node):  # of a test that was killed
                set_gpus(node, 0)
        yield set_gpus
        for node in given:
            machine.set_gpus(node, 0)


def _count_gpus(cluster: Cluster, node: str) -> int:
    return int(cluster.ask(f"/api/v1/nodes/{node}")["status"]["allocatable"].get("nvidia.com/gpu", 0))


@pytest.fixture
def stoppable_nodes(machine: KubeMachine, _cluster_lock: None) -> Iterator[KubeMachine]:
    """`stoppable_nodes.stop_node("node2")`; no other test uses the cluster meanwhile."""
    yield machine
    _start_stopped_nodes(machine)


def _start_stopped_nodes(machine: KubeMachine) -> None:
    for node in machine.list_stopped_nodes():
        machine.start_node(node)


@pytest.fixture
def pod_template(cluster: Cluster) -> Callable[..., dict[str, Any]]:
    """`tests.cluster.pods.pod_template` without its first argument."""
    if not cluster.image:
        pytest.skip("EDL_TEST_IMAGE names no image with this version of EDL for the cluster of KUBECONFIG")
    return functools.partial(pods.pod_template, cluster.image, host=cluster.machine is not None)


@pytest.fixture
def namespace(request: pytest.FixtureRequest, cluster: Cluster, _cluster_lock: None) -> Iterator[str]:
    """A namespace of this test alone; it is deleted, with all that is in it, when the test ends."""
    lent = [name for name in ("stoppable_nodes", "gpus") if name in request.fixturenames]
    for name in lent:
        request.getfixturevalue(name)  # so that it ends after the namespace
    name = f"edl-test-{secrets.token_hex(4)}"
    metadata = {"name": name, "labels": {PROCESS_LABEL: str(os.getpid())}}
    cluster.ask("/api/v1/namespaces", "POST", {"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})
    try:
        cluster.wait("the namespace's service account and its token", lambda: takes_pods(cluster, name))
        request.node.stash.setdefault(DESCRIPTIONS, {})["Kubernetes"] = lambda: cluster.describe(name)
        yield name
    finally:
        delete_namespace(cluster, name)
        if lent:  # the next test with it must find it free
            wait_for_deletion(cluster, name)


def takes_pods(cluster: Cluster, namespace: str) -> bool:
    """Whether pods can be made: a new namespace's service account, and up to 1.23 its token, come a moment later."""
    spec = {"containers": [{"name": "main", "image": "none"}]}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, "spec": spec}
    try:
        cluster.ask(f"/api/v1/namespaces/{namespace}/pods", "POST", pod, query={"dryRun": "All"})
    except RuntimeError as error:
        if "service account" in str(error) or "serviceaccount" in str(error):
            return False
        raise
    return True


def delete_namespace(cluster: Cluster, name: str) -> None:
    """Begin to delete a namespace, and tell its pods to hurry: none is made in it any more."""
    path = f"/api/v1/namespaces/{name}"
    found = cluster.ask(path)
    if found is not None:
        if "deletionTimestamp" not in found["metadata"]:
            cluster.ask(path, "DELETE")
        cluster.ask(f"{path}/pods", "DELETE", {"gracePeriodSeconds": 1})


def wait_for_deletion(cluster: Cluster, name: str) -> None:
    """Wait until a namespace that is deleted has no pods; its other objects go by themselves.

    Up to Kubernetes 1.21 a kubelet deletes a pod long after its containers have ended, so that is not waited for.
    """
    path = f"/api/v1/namespaces/{name}/pods"
    begin = time.monotonic()
    while left := cluster.ask(path)["items"]:
        waited_s = time.monotonic() - begin
        if waited_s > DELETED_S:
            raise AssertionError(f"pods outlived their namespace:\n{cluster.describe(name)}")
        for pod in left if waited_s > KILLED_S else ():
            if not any("running" in found["state"] for found in pod["status"].get("containerStatuses", ())):
                cluster.ask(f"{path}/{pod['metadata']['name']}", "DELETE", {"gracePeriodSeconds": 0})
        time.sleep(0.3)


@pytest.fixture
def operator(
    request: pytest.FixtureRequest, cluster: Cluster, namespace: str, tmp_path: Path
) -> Iterator[OperatorFactory]:
    """`operator(*arguments, capacity=False)` starts `edl operator` here, with the chart's service account's rights."""
    from tests.cluster.operator_process import OperatorFactory

    with contextlib.closing(OperatorFactory(cluster, namespace, tmp_path)) as factory:
        request.node.stash.setdefault(DESCRIPTIONS, {})["edl operator"] = lambda: factory.text
        yield factory
