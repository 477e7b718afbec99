"""Scenario 7: what the chart's service accounts may do, and that it is enough."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from edl.errors import AccessDeniedError
from edl.kube.client import KubeClient
from edl.kube.resource_types import ELASTIC_JOBS, NODES, PODS, SECRETS
from edl.kube.settings import KubeSettings
from tests.cluster.api import Cluster
from tests.cluster.operator_process import ACCOUNT, OperatorFactory, install_account, render_chart
from tests.kubernetes.cli.conftest import Person

READY_S = 240.0
RBAC = "rbac.authorization.k8s.io/v1"
OPERATOR_RIGHTS = {
    "": {"pods": "create delete list watch", "events": "create get list patch"},
    "apps": {"deployments/scale": "get patch", "statefulsets/scale": "get patch"},
    "edl.io": {
        "elasticjobs": "delete get list watch",
        "elasticjobs/status": "patch",
        "teacherpools": "get list watch",
        "teacherpools/status": "patch",
    },
    "policy": {"poddisruptionbudgets": "create delete patch"},
}
"""As documented in docs/kubernetes-operators.md; each is used by `edl.master.kube.operator`."""


@pytest.fixture
def account(cluster: Cluster, namespace: str, tmp_path: Path) -> KubeClient:
    """A client with the operator's rights, without `edl-capacity`."""
    install_account(cluster, namespace, capacity=False)
    path = tmp_path / "kubeconfig.json"
    cluster.write_account_kubeconfig(namespace, ACCOUNT, path)
    return KubeClient(KubeSettings(kubeconfig=str(path)))


def test_own_namespace_only(account: KubeClient, namespace: str) -> None:
    with account:
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


def test_members_have_less(cluster: Cluster, account: KubeClient, namespace: str) -> None:
    account.close()
    member = f"system:serviceaccount:{namespace}:edl-member"
    for verb in ("get", "list", "create", "patch", "delete"):
        assert not cluster.may(member, verb, "elasticjobs", namespace, "edl.io")
        assert not cluster.may(member, verb, "secrets", namespace)
        assert not cluster.may(member, verb, "leases", "default", "coordination.k8s.io")
    assert not cluster.may(member, "create", "pods", namespace)
    assert not cluster.may(member, "delete", "pods", namespace)


@pytest.mark.slow
def test_rights_are_enough(
    cluster: Cluster, namespace: str, operator: OperatorFactory, pod_template: Callable[..., dict[str, Any]]
) -> None:
    """The operator refuses nobody, and is refused nothing but the look at the cluster."""
    process = operator("--store", f"kubernetes://{namespace}")
    template = {"spec": {**pod_template()["spec"], "serviceAccountName": "edl-member"}}
    job = {
        "apiVersion": "edl.io/v1alpha1",
        "kind": "ElasticJob",
        "metadata": {"name": "first"},
        "spec": {
            "run": ["--no-python", "/usr/bin/sleep", "1"],
            "minReplicas": 1,
            "maxReplicas": 2,
            "ttlSecondsAfterFinished": 1,
            "template": template,
        },
    }
    sleeper = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "adopted"}}
    sleeper["spec"] = {
        "replicas": 0,
        "selector": {"matchLabels": {"app": "adopted"}},
        "template": {
            "metadata": {"labels": {"app": "adopted"}},
            "spec": pod_template(["/usr/bin/sleep", "600"])["spec"],
        },
    }
    pool = {
        "apiVersion": "edl.io/v1alpha1",
        "kind": "TeacherPool",
        "metadata": {"name": "adopting"},
        "spec": {
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": "adopted"},
            "scaling": "external",
            "replicas": 1,
            "minReplicas": 0,
            "maxReplicas": 2,
        },
    }
    cluster.apply(job, sleeper, pool, namespace=namespace)
    cluster.wait(
        "the job to be deleted after its end",
        lambda: cluster.get("elasticjobs", "first", namespace) is None,
        namespace,
        READY_S,
    )
    path = f"/apis/apps/v1/namespaces/{namespace}/deployments/adopted/scale"
    cluster.wait("the deployment's scale", lambda: cluster.ask(path)["spec"].get("replicas") == 1, namespace, READY_S)

    def list_reasons() -> set[str]:  # events are written by a thread of their own
        return {event["reason"] for event in cluster.ask(f"/api/v1/namespaces/{namespace}/events")["items"]}

    cluster.wait("the event of the job's end", lambda: "Succeeded" in list_reasons(), namespace)
    assert process.running
    for line in process.text.splitlines():
        if "forbidden" in line.lower() or "403" in line or "not allowed" in line.lower():
            assert re.search(r"list (nodes|pods): .* at the cluster scope", line), line


def test_people_submit_with_edit(
    cluster: Cluster, namespace: str, tmp_path: Path, pod_template: Callable[..., dict[str, Any]]
) -> None:
    """Kubernetes' own `edit`, and what the chart adds to it, is all that the commands of people need."""
    person = Person(cluster, namespace, tmp_path, pod_template())
    become(cluster, person, namespace, "edit")
    (tmp_path / "train.py").write_text("print('done')")
    pool = ("--teachers", "digits=0:2", "--serve", "digits=--callable teacher.py:predict")
    person.run("submit", "--template", "pod.json", "--name", "mine", "--workers", "1:3", *pool, "train.py")
    person.run("submit", "--template", "pod.json", "--name", "more", "--teachers", "digits=0:3", "train.py")
    assert cluster.get("teacherpools", "digits", namespace)["spec"]["maxReplicas"] == 3
    assert "job mine in namespace" in person.run("status", "mine")
    person.run("delete", "mine", "more", "pool/digits", "--wait")
    assert "script" not in cluster.kubectl("-n", namespace, "get", "configmaps", "-o", "name"), "with its script"


def test_people_look_with_view(
    cluster: Cluster, namespace: str, tmp_path: Path, pod_template: Callable[..., dict[str, Any]]
) -> None:
    """Who has Kubernetes' own `view`, and what the chart adds to it, sees all of the namespace and changes nothing."""
    person = Person(cluster, namespace, tmp_path, pod_template())
    (tmp_path / "train.py").write_text("print('done')")
    submit = ("submit", "--template", "pod.json", "--name")
    person.run(*submit, "theirs", "train.py")
    become(cluster, person, namespace, "view")
    assert person.jobs().keys() == {"theirs"}
    assert "job theirs in namespace" in person.run("status", "theirs")
    changes = (("scale", "theirs", "1"), ("suspend", "theirs"), ("delete", "theirs"), (*submit, "mine", "train.py"))
    for words in (*changes, ("jobs", "-A")):
        assert "not allowed (403)" in person.run(*words, code=1)
    found = cluster.get("elasticjobs", "theirs", namespace)["spec"]
    assert found["scaling"] == "auto"
    assert not found["suspend"]
    assert cluster.get("elasticjobs", "mine", namespace) is None


def become(cluster: Cluster, person: Person, namespace: str, role: str) -> None:
    """Give a person the rights of Kubernetes' `edit` or `view` in a namespace, with what the chart adds to it.

    The chart's ClusterRoles are the whole cluster's, so their rules are taken over by a Role here.
    """
    objects = yaml.safe_load_all(
        render_chart("edl", "--set", "operator.enabled=false", "--show-only", "templates/users.yaml")
    )
    (rules,) = (item["rules"] for item in objects if item["metadata"]["name"] == f"edl-{role}")
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "person"}}
    added = {"apiVersion": RBAC, "kind": "Role", "metadata": {"name": "edl-people"}, "rules": rules}
    bindings = [
        {
            "apiVersion": RBAC,
            "kind": "RoleBinding",
            "metadata": {"name": f"person-{name}"},
            "subjects": [{"kind": "ServiceAccount", "name": "person", "namespace": namespace}],
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": name},
        }
        for kind, name in (("ClusterRole", role), ("Role", "edl-people"))
    ]
    cluster.apply(account, added, *bindings, namespace=namespace)
    user = f"system:serviceaccount:{namespace}:person"
    # The API server hears of roles and bindings by watches of its own: of Kubernetes' rules, and of the added ones.
    cluster.wait("the rights", lambda: cluster.may(user, "list", "pods", namespace), namespace)
    cluster.wait("the rights", lambda: cluster.may(user, "list", "elasticjobs", namespace, "edl.io"), namespace)
    cluster.write_account_kubeconfig(namespace, "person", Path(person.environ["KUBECONFIG"]))


def test_rights_are_these() -> None:
    """A right that is added or taken back is so on purpose."""
    options = ("--set", "operator.enabled=false", "--show-only", "templates/rbac.yaml")
    objects = yaml.safe_load_all(render_chart("edl", *options))
    (role,) = (item for item in objects if item and item["kind"] == "Role")
    found: dict[str, dict[str, str]] = {}
    for rule in role["rules"]:
        for group, resource in itertools.product(rule["apiGroups"], rule["resources"]):
            verbs = found.setdefault(group, {}).get(resource, "").split()
            found[group][resource] = " ".join(sorted({*verbs, *rule["verbs"]}))
    assert found == OPERATOR_RIGHTS
