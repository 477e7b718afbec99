"""Member pods out of templates: what is the user's stays, what is the operator's is set."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edl.kube.objects import Object
from edl.master.kube.members import MemberLaunch, build_member_pod
from edl.master.kube.members.naming import build_member_name, shorten_name
from edl.master.kube.members.pod_template import has_memory_quantity
from edl.master.kube.resources import ElasticJob


def build_job(container: Mapping[str, Any] | None = None, spec: Mapping[str, Any] | None = None) -> ElasticJob:
    """Return a job whose template has a container and a spec."""
    main = {"name": "train", "image": "img", **(container or {})}
    template = {"metadata": {"labels": {"team": "a"}}, "spec": {"containers": [main], **(spec or {})}}
    return ElasticJob(
        name="digits",
        namespace="ns",
        uid="0123456789abcdef",
        resource_version="1",
        generation=1,
        created_s=0.0,
        min_replicas=1,
        max_replicas=4,
        store="consul://10.0.0.1:8500",
        priority_class_name="high",
        grace_period_s=45,
        template=template,
        run=("train.py",),
    )


def build(job: ElasticJob, **fields: Any) -> Object:
    before = copy.deepcopy(job.template)
    pod = build_member_pod(job, MemberLaunch("worker", 3, 2, ["run", "train.py"], **fields))
    assert job.template == before, "the template is not changed"
    return pod


def get_main(pod: Object) -> dict[str, Any]:
    main = pod["spec"]["containers"][0]
    assert isinstance(main, dict)
    return main


def get_env(pod: Object) -> dict[str, Any]:
    return {item["name"]: item.get("value", item.get("valueFrom")) for item in get_main(pod)["env"]}


def test_environment() -> None:
    env = get_env(build(build_job()))
    assert env["EDL_DISCOVERY"] == "consul://10.0.0.1:8500"
    assert env["EDL_POD_IP"] == {"fieldRef": {"fieldPath": "status.podIP"}}
    assert env["EDL_TERMINATION_LOG"] == "/dev/termination-log"
    theirs = [{"name": "EDL_DISCOVERY", "value": "etcd://e:2379"}, {"name": "EDL_POD_IP", "value": "spoilt"}]
    env = get_env(build(build_job({"env": theirs, "terminationMessagePath": "/log/end"})))
    assert env["EDL_DISCOVERY"] == "etcd://e:2379", "the template's own wins"
    assert env["EDL_POD_IP"] == {"fieldRef": {"fieldPath": "status.podIP"}}, "args rely on it"
    assert env["EDL_TERMINATION_LOG"] == "/log/end"


def test_memory_is_multiplied() -> None:
    resources = {"requests": {"memory": "1Gi", "cpu": "1"}, "limits": {"memory": "1500M", "nvidia.com/gpu": 1}}
    job = build_job({"resources": resources})
    assert has_memory_quantity(job)
    assert get_main(build(job))["resources"] == resources
    raised = get_main(build(job, memory_factor=1.5))["resources"]
    assert raised["requests"] == {"memory": "1536Mi", "cpu": "1"}
    assert raised["limits"] == {"memory": "2250000000", "nvidia.com/gpu": 1}
    bare = build_job()
    assert not has_memory_quantity(bare)
    assert not any(get_main(build(bare, memory_factor=1.5))["resources"].values())


@pytest.mark.parametrize("terms", [[], [{"matchExpressions": [{"key": "a"}]}, {"matchFields": [{"key": "b"}]}]])
def test_excluded_nodes(terms: list[dict[str, Any]]) -> None:
    kind = "requiredDuringSchedulingIgnoredDuringExecution"
    affinity = {"nodeAffinity": {kind: {"nodeSelectorTerms": terms}}, "podAffinity": {}} if terms else {}
    pod = build(build_job(spec={"affinity": affinity}), excluded_nodes=["node1", "node2"])
    found = pod["spec"]["affinity"]["nodeAffinity"][kind]["nodeSelectorTerms"]
    assert len(found) == max(1, len(terms)), "terms are alternatives: each must leave the nodes out"
    for term, before in zip(found, terms or [{}], strict=True):
        without = [item["values"] for item in term["matchFields"] if item.get("operator") == "NotIn"]
        assert without == [["node1"], ["node2"]], "the API takes one name in each"
        assert term.get("matchExpressions") == before.get("matchExpressions")
        assert all(item in term["matchFields"] for item in before.get("matchFields", []))


def test_security_context() -> None:
    pod = build(build_job())
    assert pod["spec"]["securityContext"] == {"seccompProfile": {"type": "RuntimeDefault"}}
    assert get_main(pod)["securityContext"] == {"allowPrivilegeEscalation": False}
    own, theirs = {"capabilities": {"add": ["IPC_LOCK"]}}, {"runAsUser": 7}
    pod = build(build_job({"securityContext": own}, {"securityContext": theirs}))
    assert (get_main(pod)["securityContext"], pod["spec"]["securityContext"]) == (own, theirs)


def test_shared_memory_and_tmp() -> None:
    pod = build(build_job())
    assert pod["spec"]["volumes"] == [{"name": "edl-shm", "emptyDir": {"medium": "Memory"}}]
    mounted = {"volumeMounts": [{"name": "mine", "mountPath": "/dev/shm/"}]}
    assert build(build_job(mounted))["spec"]["volumes"] == []
    read_only = build(build_job({"securityContext": {"readOnlyRootFilesystem": True}}))
    assert [item["mountPath"] for item in get_main(read_only)["volumeMounts"]] == ["/dev/shm", "/tmp"]


def test_named_container_among_others() -> None:
    containers = [{"name": "log", "image": "l"}, {"name": "edl", "image": "e", "command": ["python", "-m", "edl"]}]
    job = build_job(spec={"containers": containers})
    log, main = build(job)["spec"]["containers"]
    assert log == {"name": "log", "image": "l"}
    assert (main["command"], main["args"]) == (["python", "-m", "edl"], ["run", "train.py"])
    alone = build(job, resources={"requests": {"cpu": "100m"}})["spec"]["containers"]
    assert [(item["name"], item["resources"]) for item in alone] == [("edl", {"requests": {"cpu": "100m"}})]


def test_service_account() -> None:
    spec = build(build_job())["spec"]
    assert (spec.get("serviceAccountName"), spec["automountServiceAccountToken"]) == (None, False)
    named = build(build_job(spec={"serviceAccountName": "mine"}))["spec"]
    assert (named["serviceAccountName"], "automountServiceAccountToken" in named) == ("mine", False)
    in_cluster = replace(build_job(), store="kubernetes://ns")
    assert build(in_cluster)["spec"]["serviceAccountName"] == "edl-member"


@pytest.mark.parametrize("value", [{"LR": "0.1"}, "x", 3, ["x", 3, None]])
def test_garbage_is_left_to_the_server(value: Any) -> None:
    """A mapping where Kubernetes wants a list is a common slip: left out, the script would run without it."""
    pod = build(build_job({"env": value, "volumeMounts": value}, {"tolerations": value, "volumes": value}))
    places = [(get_main(pod), "env"), (get_main(pod), "volumeMounts"), (pod["spec"], "tolerations")]
    for parent, key in [*places, (pod["spec"], "volumes")]:
        if isinstance(value, list):
            assert all(item in parent[key] for item in value)
        else:
            assert parent[key] == value


LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
NAMES = st.from_regex(r"[a-z0-9]([-a-z0-9.]{0,120}[a-z0-9])?", fullmatch=True)


def test_short_names_stay() -> None:
    assert build_member_name("digits", "worker", 3, 0) == "digits-worker-3-0"
    assert build_member_name("a.b", "worker", 3, 0).startswith("a-b-"), "a dot would make the host name end there"


@settings(max_examples=30)
@given(NAMES, st.sampled_from(["worker", "teacher", "master"]), st.integers(0, 10**6), st.integers(0, 10**9))
def test_names_are_labels(name: str, role: str, index: int, try_number: int) -> None:
    built = build_member_name(name, role, index, try_number)
    assert len(built) <= 63
    assert LABEL.fullmatch(built)


@settings(max_examples=30)
@given(NAMES, NAMES)
def test_cut_names_differ(first: str, second: str) -> None:
    assert (shorten_name(first, 30) == shorten_name(second, 30)) == (first == second)
    assert shorten_name(f"{'n' * 62}a", 40) != shorten_name(f"{'n' * 62}b", 40)
