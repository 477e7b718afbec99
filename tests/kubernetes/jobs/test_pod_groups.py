"""PodGroups of jobs on an API server that knows their kinds. No scheduler of them runs: a contract, and no more."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from edl.kube.resource_types import ELASTIC_JOBS
from tests.cluster.api import Cluster
from tests.cluster.locks import exclusive_lock
from tests.cluster.machine import ROOT
from tests.cluster.operator_process import OperatorFactory, install_account

DEFINITIONS = ROOT / "tests/fast/master/kube/jobs/podgroups.yaml"
GROUPS = {
    "volcano": ("scheduling.volcano.sh/v1beta1", "scheduling.k8s.io/group-name"),
    "kai-scheduler": ("scheduling.run.ai/v2alpha2", "pod-group-name"),
}


@pytest.fixture
def definitions(cluster: Cluster) -> Iterator[None]:
    """The least of Volcano's and KAI's definitions, for this test."""
    names = [f"crd/{item['metadata']['name']}" for item in yaml.safe_load_all(DEFINITIONS.read_text())]
    with exclusive_lock("podgroups"):
        cluster.kubectl("apply", "-f", str(DEFINITIONS))
        try:
            cluster.kubectl("wait", "--for=condition=Established", *names)
            yield
        finally:
            cluster.kubectl("delete", "--ignore-not-found", *names)


def test_pod_groups_are_made(
    cluster: Cluster,
    namespace: str,
    definitions: None,
    operator: OperatorFactory,
    pod_template: Callable[..., dict[str, Any]],
    tmp_path: Path,
) -> None:
    """With the chart's rights: a group for each job, before its pods, which name it; it goes with the job."""
    operator("--no-capacity", "--store", f"sqlite://{tmp_path}/store.sqlite")
    install_account(cluster, namespace, capacity=False, schedulers=True)
    for scheduler in GROUPS:
        template = pod_template()
        template["spec"]["schedulerName"] = scheduler
        spec = {"run": ["train.py"], "minReplicas": 2, "maxReplicas": 3, "queue": "q", "template": template}
        body = {"apiVersion": "edl.io/v1alpha1", "kind": "ElasticJob", "metadata": {"name": scheduler}, "spec": spec}
        cluster.client.create(ELASTIC_JOBS, body, namespace)
    for scheduler, (version, annotation) in GROUPS.items():
        path = f"/apis/{version}/namespaces/{namespace}/podgroups"
        listed = cluster.wait(f"the group of {scheduler}", lambda path=path: cluster.ask(path)["items"], namespace)  # type: ignore[misc]
        (group,) = listed
        assert group["spec"] == {"minMember": 2, "queue": "q"}
        cluster.wait(
            f"the pods of {scheduler}",
            lambda scheduler=scheduler: len(list_pods(cluster, namespace, scheduler)) >= 2,  # type: ignore[misc]
            namespace,
        )
        for pod in list_pods(cluster, namespace, scheduler):
            assert pod["metadata"]["annotations"][annotation] == group["metadata"]["name"], json.dumps(pod)
            assert pod["spec"]["schedulerName"] == scheduler
        cluster.client.delete(ELASTIC_JOBS, scheduler, namespace)
        cluster.wait(f"the end of {scheduler}", lambda path=path: not cluster.ask(path)["items"], namespace)  # type: ignore[misc]


def list_pods(cluster: Cluster, namespace: str, job: str) -> list[Any]:
    return cluster.list_pods(namespace, f"edl.io/job={job}")
