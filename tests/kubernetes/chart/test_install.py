"""Helm installs the chart on the real cluster, as docs/kubernetes-operators.md says; the operator runs in a pod."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from edl.discovery import open_store
from tests.cluster.api import Cluster, in_namespace, kubectl_program, run_program
from tests.cluster.locks import exclusive_lock
from tests.cluster.machine import ROOT
from tests.kubernetes.scenarios.scene import Scene

PAGE = ROOT / "docs/kubernetes-operators.md"
HELM_S = 180.0
READY_S = 240.0
SLEEP = ("--no-python", "/usr/bin/sleep")
CRDS = ("elasticjobs.edl.io", "teacherpools.edl.io")
OWNED = ("meta.helm.sh/release-name", "meta.helm.sh/release-namespace")


def page_commands(section: str) -> list[list[str]]:
    """The commands of a section of the page."""
    text = PAGE.read_text().split(f"\n## {section}\n")[1].split("\n## ")[0]
    return [
        shlex.split(line) for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL) for line in block.splitlines()
    ]


class Release:
    """Runs the page's commands in a namespace of the test's own."""

    def __init__(self, cluster: Cluster, helm: str, namespace: str, values: Path) -> None:
        self._cluster = cluster
        self._helm = helm
        self._namespace = namespace
        self._values = values

    def run(self, command: list[str], *options: str) -> str:
        """Run a command of the page."""
        words = in_namespace(command, self._namespace)
        if "image.repository=REGISTRY/edl/operator" in words:
            index = words.index("image.repository=REGISTRY/edl/operator")
            words[index - 1 : index + 1] = ["--values", str(self._values)]
        words = [word.replace("release-namespace=edl", f"release-namespace={self._namespace}") for word in words]
        if words[0] == "kubectl":
            return self._cluster.kubectl(*words[1:], *options, timeout_s=HELM_S)
        words = [str(ROOT / word) if word == "serving/kube/chart" else word for word in words[1:]]
        kubeconfig = ["--kubeconfig", str(self._cluster.kubeconfig)]
        return run_program([self._helm, *words, *kubeconfig, *options], timeout_s=HELM_S)


@pytest.fixture
def shared_objects(cluster: Cluster) -> Iterator[None]:
    """Hand the cluster's CRDs over to Helm, and take them back: other tests have resources of them."""
    with exclusive_lock("chart"):
        _remove_user_roles(cluster)  # of a test that was killed
        yield
        _remove_user_roles(cluster)
        for name in CRDS:
            cluster.kubectl("annotate", "crd", name, *(f"{key}-" for key in OWNED), "helm.sh/resource-policy-")
            cluster.kubectl("label", "crd", name, "app.kubernetes.io/managed-by-")


@pytest.fixture
def release(cluster: Cluster, helm: str, namespace: str, values: Path, shared_objects: None) -> Iterator[Release]:
    """A release that is not installed yet, of a namespace of its own."""
    try:
        yield Release(cluster, helm, namespace, values)
    finally:
        for kind in ("clusterrole", "clusterrolebinding"):
            cluster.kubectl("delete", "--ignore-not-found", kind, f"edl-capacity-{namespace}")


def _remove_user_roles(cluster: Cluster) -> None:
    cluster.kubectl("delete", "--ignore-not-found", "clusterrole", "edl-edit", "edl-view")


def _may_list(scene: Scene, resource: str) -> bool:
    """Whether the operator may do so in all namespaces."""
    return scene.cluster.may(f"system:serviceaccount:{scene.namespace}:edl-operator", "list", resource)


@pytest.mark.parametrize("helm", [4], ids=["helm4"], indirect=True)
def test_install_upgrade_uninstall(release: Release, scene: Scene, store_address: str) -> None:
    cluster, namespace = scene.cluster, scene.namespace
    install, *looks = page_commands("Install")[:3]
    *handing_over, upgrade = sorted(page_commands("Upgrade"), key=lambda command: command[0] == "helm")
    (uninstall,) = page_commands("Remove")
    template = {"spec": scene.pod_template()["spec"]}
    # The class is the whole cluster's, and other tests' pods name it.
    own = f"priorityClasses.install=false,storeServer.clusterIP={store_address}"

    with pytest.raises(RuntimeError, match="invalid ownership metadata"):
        release.run(install, "--set", own)
    for command in handing_over:
        release.run(command)
    release.run(install, "--set", own)
    for command in looks:
        release.run(command)
    scene.create_job("first", [*SLEEP, "1"], template)
    scene.wait_success("first")

    assert not _may_list(scene, "nodes")
    assert not _may_list(scene, "pods")
    release.run(upgrade, "--set", f"capacity.enabled=true,capacity.name=edl-capacity-{namespace}")
    # Here and below, the API server hears of roles and bindings by watches of its own.
    scene.wait("rights", lambda: _may_list(scene, "nodes"))
    assert not _may_list(scene, "secrets")
    scene.create_job("second", [*SLEEP, "600"], template)
    scene.wait("the second job's pod", lambda: scene.phase("second") == "Running")

    release.run(uninstall)
    for name in CRDS:
        crd = cluster.ask(f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{name}")
        assert crd["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    scene.wait("no rights", lambda: not _may_list(scene, "nodes"))
    with open_store(f"edl://{store_address}:29400") as store:
        assert store.list("jobs/"), "members still have their store"
    pods = cluster.list_pods(namespace, "edl.io/job=second")
    assert [pod["status"]["phase"] for pod in pods] == ["Running"], "the job goes on without its operator"
    cluster.kubectl("-n", namespace, "delete", "elasticjob", "first", "second", "--wait=true")
    scene.wait("no pods", lambda: not cluster.list_pods(namespace, "edl.io/job"))
    kinds = "deployments,services,rolebindings,roles,poddisruptionbudgets,leases"
    kept = {"deployment.apps/edl-store", "service/edl-store"}

    def list_left() -> set[str]:  # the garbage collector, who takes what belonged to the jobs, takes its time
        return set(cluster.kubectl("-n", namespace, "get", kinds, "-o", "name").split())

    scene.wait("nothing else left", lambda: list_left() <= kept)
    assert list_left() == kept


@pytest.mark.parametrize("new", [False, True], ids=["kubectl", "kubectl-new"])
def test_plain_manifests_are_taken(cluster: Cluster, namespace: str, new: bool) -> None:
    """All that `kubectl apply -f serving/kube/manifests/...` sends passes the API server's checks."""
    for path in sorted((ROOT / "serving/kube/manifests").glob("*.yaml")):
        objects = [item for item in yaml.safe_load_all(path.read_text()) if item and item["kind"] != "Namespace"]
        text = yaml.safe_dump_all(objects).replace("namespace: edl\n", f"namespace: {namespace}\n")
        said = cluster.kubectl("apply", "--dry-run=server", "-f", "-", text=text, program=kubectl_program(new))
        assert said.count("server dry run") == len(objects) > 0, said
