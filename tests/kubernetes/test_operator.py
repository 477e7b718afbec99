"""`edl operator` on a real cluster: jobs of workers that sleep, and all that may go wrong around the operator."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.kubernetes.scenarios.scene import Scene, find_condition

CreateJob = Callable[..., None]


@pytest.fixture
def create_job(scene: Scene) -> CreateJob:
    """Creates an ElasticJob whose workers sleep."""
    common: dict[str, Any] = {
        "scaling": "external",
        "store": "edl://nowhere:29400",
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


def test_typo_in_command_ends_the_job(scene: Scene, create_job: CreateJob) -> None:
    """The runtime reports a start in 1970, which is no steady run: four pods are made, and the job says why."""
    scene.operator("--no-capacity")
    names: set[str] = set()
    template = scene.pod_template(["/usr/bin/pyhton"], cpu="1m", memory="32Mi")
    create_job("typo", template=template)

    def has_failed() -> bool:
        names.update(pod["metadata"]["name"] for pod in scene.pods("typo"))
        return scene.phase("typo") == "Failed"

    scene.wait("the job's failure", has_failed)
    assert names == {f"typo-worker-0-{number}" for number in range(4)}
    failed = find_condition(scene.cluster.get("elasticjobs", "typo", scene.namespace), "Failed")
    assert failed["reason"] == "LaunchFailed"
    assert "pyhton" in failed["message"]


def test_what_an_author_may_not_do(scene: Scene, create_job: CreateJob) -> None:
    """Whoever may create jobs and pools gets neither the operator's account, nor a node, nor others' Deployments."""
    scene.operator("--no-capacity", "--pod-security", "baseline")
    container = {"name": "edl", "image": "i"}
    specs: dict[str, dict[str, Any]] = {
        "hostPID": {"hostPID": True},
        "privileged": {"containers": [{**container, "securityContext": {"privileged": True}}]},
        "hostPath": {"volumes": [{"name": "root", "hostPath": {"path": "/"}}]},
        "edl-operator": {"serviceAccountName": "edl-operator"},
    }
    for word, spec in specs.items():
        create_job(word.lower(), template={"spec": {"containers": [container], **spec}})
    scene.create_deployment("victim", {"spec": {"containers": [container]}})
    scene.cluster.scale(scene.namespace, "victim", 1)
    target = {"apiVersion": "apps/v1", "kind": "Deployment", "name": "victim"}
    scene.create("TeacherPool", "taker", scaleTargetRef=target, scaling="external", store="edl://x", maxReplicas=1)
    for word in specs:
        found = scene.wait(f"the refusal of {word}", lambda word=word: read_accepted(scene, word.lower()))  # type: ignore[misc]
        assert (found["status"], found["reason"]) == ("False", "PodNotAllowed"), found
        assert word in found["message"]
        assert live_pods(scene, word.lower()) == []

    def read_refusal() -> Any:
        return find_condition(scene.cluster.get("teacherpools", "taker", scene.namespace), "Accepted")

    assert "edl.io/scaled-by=taker" in scene.wait("the refusal of the pool", read_refusal)["message"]
    path = f"/apis/apps/v1/namespaces/{scene.namespace}/deployments/victim"
    assert scene.cluster.ask(path)["spec"]["replicas"] == 1


def test_status_by_hand_ends_no_job(scene: Scene, create_job: CreateJob) -> None:
    scene.operator("--no-capacity")
    create_job("sleepy", replicas=2, maxReplicas=2)
    pods = scene.wait_running("sleepy", 2)
    path = f"/apis/edl.io/v1alpha1/namespaces/{scene.namespace}/elasticjobs/sleepy/status"
    forged = {"status": {"phase": "Succeeded", "conditions": []}}
    scene.cluster.ask(path, "PATCH", forged, content_type="application/merge-patch+json")
    scene.wait("what is true", lambda: scene.phase("sleepy") == "Running")
    assert scene.wait_running("sleepy", 2) == pods
