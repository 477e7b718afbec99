"""What the chart's service accounts and people may do, and that it is enough."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from edl.errors import AccessDeniedError
from edl.kube.client import KubeClient
from edl.kube.resource_types import ELASTIC_JOBS, NODES, PODS, SECRETS
from edl.kube.settings import KubeSettings
from tests.cluster.api import Cluster
from tests.cluster.operator_process import ACCOUNT, install_account, render_chart
from tests.kubernetes.conftest import Person
from tests.kubernetes.scenarios.scene import Scene


def test_own_namespace_only(cluster: Cluster, namespace: str, tmp_path: Path) -> None:
    install_account(cluster, namespace, capacity=False)
    path = tmp_path / "kubeconfig.json"
    cluster.write_account_kubeconfig(namespace, ACCOUNT, path)
    with KubeClient(KubeSettings(kubeconfig=str(path))) as account:
        assert account.namespace == namespace
        assert account.list(PODS).items == []
        assert account.list(ELASTIC_JOBS).items == []
        for refused in (
            lambda: account.list(PODS, "default"),
            lambda: account.list(PODS, ""),
            lambda: account.list(ELASTIC_JOBS, ""),
            lambda: account.create(PODS, {"metadata": {"name": "x"}, "spec": {"containers": []}}, "default"),
            lambda: account.delete(PODS, "x", "default"),
            lambda: account.list(NODES),
            lambda: account.list(SECRETS),
        ):
            with pytest.raises(AccessDeniedError):
                refused()


def test_rights_are_enough(scene: Scene, edl_store: str) -> None:
    """The operator refuses nobody, and is refused nothing but the look at the cluster."""
    cluster, namespace = scene.cluster, scene.namespace
    process = scene.operator("--store", edl_store)
    template = {"spec": scene.pod_template()["spec"]}
    run = ["--no-python", "/usr/bin/sleep", "1"]
    scene.create_job("first", run, template, maxReplicas=2, ttlSecondsAfterFinished=1)
    scene.create_deployment("adopted", scene.pod_template(["/usr/bin/sleep", "600"]))
    cluster.kubectl("-n", namespace, "annotate", "deployment", "adopted", "edl.io/scaled-by=adopting")
    target = {"apiVersion": "apps/v1", "kind": "Deployment", "name": "adopted"}
    pool = {"scaling": "external", "replicas": 1, "maxReplicas": 2}
    scene.create("TeacherPool", "adopting", scaleTargetRef=target, **pool)
    scene.wait("the job's deletion after its end", lambda: cluster.get("elasticjobs", "first", namespace) is None)
    path = f"/apis/apps/v1/namespaces/{namespace}/deployments/adopted/scale"
    scene.wait("the deployment's scale", lambda: cluster.ask(path)["spec"].get("replicas") == 1)
    # Events are written by a thread of their own.
    scene.wait("the event of the job's end", lambda: "Succeeded" in cluster.reasons(namespace))
    assert process.running
    for line in process.text.splitlines():
        if "forbidden" in line.lower() or "403" in line or "not allowed" in line.lower():
            assert re.search(r"list (nodes|pods): .* at the cluster scope", line), line


def test_people_submit_and_look(cluster: Cluster, namespace: str, person: Person) -> None:
    """Kubernetes' own `edit` and `view`, and what the chart adds to them, are all that the commands of people need."""
    become(cluster, person, namespace, "edit")
    (person.folder / "train.py").write_text("print('done')")
    submit = ("submit", "--template", "pod.json", "--name")
    pool = ("--teachers", "digits=0:2", "--serve", "digits=--callable teacher.py:predict")
    person.run(*submit, "mine", "--workers", "1:3", *pool, "train.py")
    person.run(*submit, "more", "--teachers", "digits", "train.py")
    person.run("scale", "pool/digits", "auto", "--max", "3")
    assert cluster.get("teacherpools", "digits", namespace)["spec"]["maxReplicas"] == 3
    assert "job mine in namespace" in person.run("status", "mine")
    person.run("delete", "more", "pool/digits", "--wait")
    maps = ("-n", namespace, "get", "configmaps", "-o", "name")
    cluster.wait("its script is collected", lambda: "more-script" not in cluster.kubectl(*maps), namespace)

    cluster.kubectl("-n", namespace, "delete", "rolebinding,role", "--all")
    user = f"system:serviceaccount:{namespace}:person"
    cluster.wait("no rights", lambda: not cluster.may(user, "delete", "elasticjobs", namespace, "edl.io"), namespace)
    become(cluster, person, namespace, "view")
    assert person.jobs().keys() == {"mine"}
    assert "job mine in namespace" in person.run("status", "mine")
    changes = (("scale", "mine", "1"), ("suspend", "mine"), ("delete", "mine"), (*submit, "third", "train.py"))
    for words in (*changes, ("jobs", "-A")):
        assert "not allowed (403)" in person.run(*words, code=1)
    found = cluster.get("elasticjobs", "mine", namespace)["spec"]
    assert (found["scaling"], found["suspend"]) == ("auto", False)
    assert cluster.get("elasticjobs", "third", namespace) is None


def become(cluster: Cluster, person: Person, namespace: str, role: str) -> None:
    """Give a person the rights of Kubernetes' `edit` or `view` in a namespace, with what the chart adds to it.

    The chart's ClusterRoles are the whole cluster's, so their rules are taken over by a Role here.
    """
    objects = yaml.safe_load_all(
        render_chart("edl", "--set", "operator.enabled=false,store=edl://unused", "--show-only", "templates/users.yaml")
    )
    (rules,) = (item["rules"] for item in objects if item["metadata"]["name"] == f"edl-{role}")
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "person"}}
    added = {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", "metadata": {"name": "edl-people"}}
    cluster.apply(account, {**added, "rules": rules}, namespace=namespace)
    cluster.bind(namespace, "person", role, "ClusterRole")
    cluster.bind(namespace, "person", "edl-people")
    user = f"system:serviceaccount:{namespace}:person"
    # The API server hears of roles and bindings by watches of its own: of Kubernetes' rules, and of the added ones.
    cluster.wait("the rights", lambda: cluster.may(user, "list", "pods", namespace), namespace)
    cluster.wait("the rights", lambda: cluster.may(user, "list", "elasticjobs", namespace, "edl.io"), namespace)
    cluster.write_account_kubeconfig(namespace, "person", Path(person.environ["KUBECONFIG"]))
