"""Reading member pods: what a pod's JSON says, and what is none."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edl.errors import ProtocolError
from edl.master.kube.members import read_member_pod, read_member_pods
from edl.master.scaling.terminations import TerminationCause, find_termination_cause


def build_pod(name: str = "job-worker-0-0", **status: Any) -> dict[str, Any]:
    """Return the JSON of a member pod: index 0, try 0, of the owner `uid-of-owner`."""
    return {
        "metadata": {
            "name": name,
            "uid": f"uid-of-{name}",
            "resourceVersion": "7",
            "creationTimestamp": "2026-03-01T12:00:00Z",
            "labels": {
                "edl.io/owner-uid": "uid-of-owner",
                "edl.io/role": "worker",
                "edl.io/index": "0",
                "edl.io/try": "0",
            },
            "ownerReferences": [{"kind": "ElasticJob", "uid": "uid-of-owner", "controller": True}],
        },
        "spec": {"containers": [{"name": "worker", "image": "i", "resources": {"limits": {"memory": "1Gi"}}}]},
        "status": {"phase": "Pending", **status},
    }


def build_ended(exit_code: int, message: str = "", reason: str = "Error", **status: Any) -> dict[str, Any]:
    """Return the JSON of a member pod whose container has ended."""
    terminated = {
        "exitCode": exit_code,
        "reason": reason,
        "message": message,
        "startedAt": "2026-03-01T12:00:10Z",
        "finishedAt": "2026-03-01T12:05:10Z",
    }
    pod = build_pod(phase="Failed" if exit_code else "Succeeded", **status)
    pod["spec"]["nodeName"] = "node1"
    pod["status"]["containerStatuses"] = [{"name": "worker", "state": {"terminated": terminated}}]
    return pod


@pytest.mark.parametrize("text", ["Killed", "[1]", "{", '{"cause": 3, "oom_kills": true}', "[" * 10_000])
def test_other_programs_words(text: str) -> None:
    report = read_member_pod(build_ended(137, text)).termination
    assert (report.agent_cause, report.oom_kills) == ("", None)
    assert find_termination_cause(report).cause is TerminationCause.KILLED


INITIALIZING = [{"name": "worker", "state": {"waiting": {"reason": "PodInitializing"}}}]


def test_init_container_that_fails() -> None:
    """It has the words of a pod that only says Failed; what it ends with is not `edl run`'s code."""
    state = {"terminated": {"exitCode": 74, "reason": "Error", "message": "no such bucket"}}
    inits = [{"name": "copy", "state": {"terminated": {"exitCode": 0}}}, {"name": "get", "state": state}]
    pod = build_pod(phase="Failed", initContainerStatuses=inits, containerStatuses=INITIALIZING)
    verdict = find_termination_cause(read_member_pod(pod).termination)
    assert verdict.cause is TerminationCause.LAUNCH_FAILED
    assert read_member_pod(pod).termination.message == "init container get: Error, exit code 74: no such bucket"
    pod["metadata"]["deletionTimestamp"] = "2026-03-01T12:00:30Z"
    assert find_termination_cause(read_member_pod(pod).termination).cause is TerminationCause.UNKNOWN


def test_init_container_without_its_image() -> None:
    inits = [{"name": "get", "state": {"waiting": {"reason": "ErrImagePull", "message": "denied"}}}]
    pod = read_member_pod(build_pod(initContainerStatuses=inits, containerStatuses=INITIALIZING))
    assert (pod.waiting, pod.waiting_message) == ("ErrImagePull", "init container get: denied")
    assert find_termination_cause(pod.termination).cause is TerminationCause.LAUNCH_FAILED


def test_silent_node_is_a_lost_node() -> None:
    """The node controller writes `Ready` alone: seen on Kubernetes 1.20 once a kubelet is stopped."""
    conditions = [{"type": "Ready", "status": "False"}, {"type": "ContainersReady", "status": "True"}]
    pod = build_pod(phase="Running", conditions=conditions)
    pod["metadata"]["deletionTimestamp"] = "2026-03-01T12:01:00Z"
    pod["spec"]["nodeName"] = "node2"
    read = read_member_pod(pod)
    assert read.node_silent
    assert read.deleting
    assert not read.live
    assert find_termination_cause(read.termination).cause is TerminationCause.NODE_LOST
    pod["spec"]["readinessGates"] = [{"conditionType": "load-balancer"}]
    assert not read_member_pod(pod).node_silent, "with a gate, the kubelet writes the same"


def test_pod_that_is_not_a_member() -> None:
    other, copied, numberless = build_pod("a"), build_pod("b"), build_pod("c")
    other["metadata"]["labels"]["edl.io/owner-uid"] = "another"
    copied["metadata"]["ownerReferences"] = []
    numberless["metadata"]["labels"]["edl.io/try"] = "²"
    pods, reasons = read_member_pods([other, copied, numberless, build_pod()], "uid-of-owner")
    assert [pod.name for pod in pods] == ["job-worker-0-0"]
    assert len(reasons) == 2
    assert "not controlled" in reasons[0]
    assert "missing" in reasons[1]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
PATHS = ["metadata", "spec", "status", "status.conditions", "status.containerStatuses", "spec.containers"]
MORE = ["metadata.labels", "metadata.ownerReferences", "status.phase", "metadata.creationTimestamp", "spec.priority"]


@settings(max_examples=50)
@given(st.sampled_from(PATHS + MORE), JSON)
def test_garbage_is_read_or_refused(path: str, value: Any) -> None:
    pod = build_ended(1)
    *parents, last = path.split(".")
    place: Any = pod
    for parent in parents:
        place = place[parent]
    place[last] = value
    with suppress(ProtocolError):
        assert read_member_pod(pod).name == "job-worker-0-0"
