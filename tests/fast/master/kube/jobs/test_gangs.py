"""What other schedulers are told: a contract of labels and objects. None of them runs in these tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from edl.kube.objects import Object
from edl.kube.resource_types import ResourceType
from edl.master.kube.jobs import shares_cluster
from edl.master.kube.resources import ElasticJob, parse_elastic_job
from tests.fast.master.kube.jobs.simulated_cluster import SimulatedCluster


def build_cluster(scheduler: str = "", **spec: Any) -> SimulatedCluster:
    cluster = SimulatedCluster(minReplicas=2, maxReplicas=4, **spec)
    if scheduler:
        cluster.resource["spec"]["template"]["spec"]["schedulerName"] = scheduler
    return cluster


def create(cluster: SimulatedCluster) -> list[Object]:
    """Return all the pods that are made until nothing changes."""
    cluster.settle()
    return [cluster.pods[name] for name in sorted(cluster.pods)]


def shares(cluster: SimulatedCluster) -> bool:
    job = parse_elastic_job(cluster.resource)
    assert isinstance(job, ElasticJob)
    return shares_cluster(job)


def test_kueue() -> None:
    cluster = build_cluster(queue="team-a")
    assert not shares(cluster)
    pods = create(cluster)
    assert len(pods) == 4
    for index, pod in enumerate(pods):
        labels, annotations = pod["metadata"]["labels"], pod["metadata"]["annotations"]
        assert labels["kueue.x-k8s.io/queue-name"] == "team-a"
        if index < 2:
            assert labels["kueue.x-k8s.io/pod-group-name"] == "job-01234567"
            assert annotations["kueue.x-k8s.io/pod-group-total-count"] == "2"
            assert "kueue.x-k8s.io/priority-class" not in labels
        else:
            assert "kueue.x-k8s.io/pod-group-name" not in labels
            assert labels["kueue.x-k8s.io/priority-class"] == "edl-growth"


def read_definition(kind: ResourceType) -> dict[str, Any]:
    """Return the fields of a kind's spec that its scheduler's definition has."""
    definitions = yaml.safe_load_all((Path(__file__).parent / "podgroups.yaml").read_text())
    (spec,) = (item["spec"] for item in definitions if item["spec"]["group"] == kind.group)
    (version,) = spec["versions"]
    assert (spec["scope"], version["name"]) == ("Namespaced", kind.version)
    assert (spec["names"]["kind"], spec["names"]["plural"]) == (kind.kind, kind.plural)
    fields = version["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
    assert isinstance(fields, dict)
    return fields


@pytest.mark.parametrize(
    ("scheduler", "api_version", "annotation"),
    [
        ("volcano", "scheduling.volcano.sh/v1beta1", "scheduling.k8s.io/group-name"),
        ("kai-scheduler", "scheduling.run.ai/v2alpha2", "pod-group-name"),
    ],
)
def test_pod_groups(scheduler: str, api_version: str, annotation: str) -> None:
    """By the fields of the scheduler's own definition: another is dropped without a word."""
    cluster = build_cluster(scheduler, queue="q", priorityClassName="high")
    assert not shares(cluster)
    _, (kind, group) = cluster.reconcile().apply
    assert (kind.plural, group["apiVersion"]) == ("podgroups", api_version)
    assert set(group) == {"apiVersion", "kind", "metadata", "spec"}
    assert group["spec"] == {"minMember": 2, "queue": "q", "priorityClassName": "high"}
    assert group["metadata"]["ownerReferences"][0]["uid"] == "0123456789ab"
    fields = read_definition(kind)
    for name, value in group["spec"].items():
        assert fields[name]["type"] == {int: "integer", str: "string"}[type(value)], name
        assert not isinstance(value, int) or value >= fields[name].get("minimum", value)
    for pod in create(cluster):
        assert pod["metadata"]["annotations"][annotation] == group["metadata"]["name"]
        assert not any(label.startswith("kueue") for label in pod["metadata"]["labels"])
    _, (_, plain) = build_cluster(scheduler).reconcile().apply
    assert plain["spec"] == {"minMember": 2}


def test_pending_growth_is_left_to_the_queue() -> None:
    cluster = build_cluster(queue="team-a")
    cluster.nodes = {"node1": 2}
    cluster.settle()
    assert len(cluster.list_live()) == 3
    made = cluster.made
    cluster.now_s += 1000
    cluster.settle()
    assert cluster.made == made, "a queue admits what it holds: it is not taken away from it"


def test_group_goes_with_the_job() -> None:
    cluster = build_cluster("volcano")
    cluster.settle()
    cluster.end("job-worker-0-0", 0)
    cluster.end("job-worker-1-0", 0)
    cluster.end("job-worker-2-0", 0)
    cluster.end("job-worker-3-0", 0)
    plan = cluster.reconcile()
    assert {kind.plural for kind, _ in plan.remove} == {"podgroups", "poddisruptionbudgets"}


def test_default_scheduler_shares() -> None:
    assert shares(build_cluster())
    assert shares(build_cluster("default-scheduler"))
    assert not shares(build_cluster("another")), "what it does is not known"
    assert len(build_cluster("another").reconcile().apply) == 1


def test_gang_keeps_its_group() -> None:
    """The pods of the group are the last to go, however long the others run."""
    cluster = build_cluster(queue="team-a")
    cluster.settle()
    cluster.end("job-worker-0-0", 137)
    cluster.settle()
    cluster.wanted = 2
    cluster.settle()
    assert sorted(cluster.pods) == ["job-worker-0-1", "job-worker-1-0"]
