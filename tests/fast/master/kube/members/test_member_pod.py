"""Reading member pods: what a pod's JSON says, and what is none."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edl.errors import SettingsError
from edl.kube.objects import Object
from edl.master.kube.members.pod_policy import PodPolicy
from edl.master.kube.members.pod_template import build_member_pod, has_memory_quantity
from edl.master.kube.members.pods import MemberPod, build_member_name, read_member_pod, read_member_pods, shorten_name
from edl.master.kube.members.records import (
    ExcludedNode,
    MemberOutcome,
    MemberRecord,
    find_end,
    format_member_records,
    read_member_records,
    record_end,
    relax_exclusions,
)
from edl.master.kube.resources import ElasticJob
from edl.master.scaling.terminations import TerminationCause, TerminationReport, find_termination_cause


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


@pytest.mark.parametrize(
    ("end", "words"),
    [
        (
            {"exitCode": 1, "reason": "Error", "message": "Traceback\nNameError: predictt\n"},
            "exit code 1: NameError: predictt",
        ),
        (
            {"exitCode": 128, "reason": "StartError", "message": 'exec: "edll"'},
            'exit code 128 (StartError): exec: "edll"',
        ),
        ({"exitCode": 137, "reason": "OOMKilled"}, "exit code 137 (OOMKilled)"),
        ({"exitCode": 2, "message": '{"cause": "user_error", "message": "a\\nb"}'}, "exit code 2: b"),
        ({}, ""),
    ],
)
def test_end_before_a_restart(end: dict[str, Any], words: str) -> None:
    waiting = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 40s"}}
    for state, last in (
        ({"terminated": end}, {}),
        (waiting, {"terminated": end}),
        ({"running": {}}, {"terminated": end}),
    ):
        container = {"name": "worker", "state": state, "lastState": last}
        assert read_member_pod(build_pod(phase="Running", containerStatuses=[container])).container_end == words


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
    assert "lack" in reasons[1]


def build_job(container: Mapping[str, Any] | None = None, spec: Mapping[str, Any] | None = None) -> ElasticJob:
    main = {"name": "train", "image": "img", **(container or {})}
    template = {"metadata": {"labels": {"team": "a"}}, "spec": {"containers": [main], **(spec or {})}}
    return ElasticJob(
        name="digits",
        namespace="ns",
        uid="0123456789abcdef",
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


def build(job: ElasticJob, resources: dict[str, Any] | None = None, **record: Any) -> Object:
    before = copy.deepcopy(job.template)
    pod = build_member_pod(
        job, "worker", 3, MemberRecord(2, **record), ["run", "train.py"], labels={}, resources=resources
    )
    assert job.template == before, "the template is not changed"
    return pod


def get_main(pod: Object) -> dict[str, Any]:
    return pod["spec"]["containers"][0]


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
    pod = build(
        build_job(spec={"affinity": affinity}),
        excluded_nodes=tuple(ExcludedNode(node, 0.0, "") for node in ("node1", "node2")),
    )
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


BASELINE_EXCESS = [
    ({"hostPID": True}, {}, "hostPID"),
    ({"hostNetwork": True}, {}, "hostNetwork"),
    ({"volumes": [{"name": "root", "hostPath": {"path": "/"}}]}, {}, "hostPath"),
    ({"securityContext": {"sysctls": [{"name": "kernel.msgmax", "value": "1"}]}}, {}, "kernel.msgmax"),
    ({"securityContext": {"seccompProfile": {"type": "Unconfined"}}}, {}, "seccompProfile"),
    ({"securityContext": {"windowsOptions": {"hostProcess": True}}}, {}, "hostProcess"),
    ({"initContainers": [{"name": "i", "securityContext": {"privileged": True}}]}, {}, "privileged"),
    ({}, {"securityContext": {"privileged": True}}, "privileged"),
    ({}, {"securityContext": {"capabilities": {"add": ["SYS_ADMIN"]}}}, "SYS_ADMIN"),
    ({}, {"securityContext": {"procMount": "Unmasked"}}, "procMount"),
    ({}, {"securityContext": {"seLinuxOptions": {"type": "spc_t"}}}, "seLinuxOptions"),
    ({}, {"ports": [{"containerPort": 80, "hostPort": 80}]}, "hostPort"),
]


@pytest.mark.parametrize(("spec", "container", "word"), BASELINE_EXCESS, ids=[word for *_, word in BASELINE_EXCESS])
def test_excess_of_baseline(spec: dict[str, Any], container: dict[str, Any], word: str) -> None:
    job = build_job(container, spec)
    (problem,) = PodPolicy().find_problems(job)
    assert problem.reason == "PodNotAllowed"
    assert word in problem.message
    assert "--pod-security privileged" in problem.message
    assert PodPolicy("privileged").find_problems(job) == ()


@pytest.mark.parametrize("accounts", [(), ("other",), ("elsewhere/mine",)])
@pytest.mark.parametrize("spec", [{"serviceAccountName": "mine"}, {"serviceAccount": "mine"}])
def test_accounts_of_members(spec: dict[str, Any], accounts: tuple[str, ...]) -> None:
    (problem,) = PodPolicy("privileged", accounts).find_problems(build_job(spec=spec))
    assert "--allow-service-account ns/mine" in problem.message
    for allowed in ("mine", "ns/mine"):
        assert PodPolicy(service_accounts=(*accounts, allowed)).find_problems(build_job(spec=spec)) == ()


def test_token_of_the_default_account() -> None:
    projected = {"name": "t", "projected": {"sources": [{"serviceAccountToken": {"path": "t"}}]}}
    for spec in ({"automountServiceAccountToken": True}, {"volumes": [projected]}):
        (problem,) = PodPolicy().find_problems(build_job(spec=spec))
        assert "ns/default" in problem.message
        assert PodPolicy(service_accounts=("default",)).find_problems(build_job(spec=spec)) == ()
    usual = {"volumes": [{"name": "s", "secret": {"secretName": "keys"}}], "securityContext": {"runAsUser": 0}}
    assert PodPolicy().find_problems(build_job(spec=usual)) == (), "as any pod of the namespace"


def test_labels_of_the_store() -> None:
    """A member with them would be asked in place of the chart's store."""
    job = build_job()
    template = {**job.template, "metadata": {"labels": {"app.kubernetes.io/name": "edl"}}}
    (problem,) = PodPolicy("privileged").find_problems(replace(job, template=template))
    assert "app.kubernetes.io/name" in problem.message


@pytest.mark.parametrize("account", ["edl-operator", "ns/edl-dashboard", "/mine", "a/b/c", ""])
def test_accounts_that_cannot_be_allowed(account: str) -> None:
    with pytest.raises(SettingsError, match="--allow-service-account"):
        PodPolicy(service_accounts=(account,))


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
@given(NAMES, NAMES, st.integers(0, 10**6), st.integers(0, 10**9))
def test_names_are_labels_that_differ(name: str, other: str, index: int, try_number: int) -> None:
    built = build_member_name(name, "teacher", index, try_number)
    assert len(built) <= 63
    assert LABEL.fullmatch(built)
    assert (shorten_name(name, 30) == shorten_name(other, 30)) == (name == other)
    assert shorten_name(f"{'n' * 62}a", 40) != shorten_name(f"{'n' * 62}b", 40)


NOW = 1_000_000.0
OOM = TerminationReport(exit_code=137, container_reason="OOMKilled")


def build_member(report: TerminationReport, try_number: int = 0, **fields: Any) -> MemberPod:
    fields = {"finished": True, "started_s": NOW - 60, "finished_s": NOW, "node": "node1", **fields}
    name = f"job-worker-0-{try_number}"
    return MemberPod(name, "worker", 0, try_number, name, termination=report, scheduled=True, **fields)


def end(record: MemberRecord, report: TerminationReport, **fields: Any) -> MemberOutcome:
    pod = build_member(report, record.try_number, **fields)
    found = find_end(record, pod, NOW)
    assert found is not None
    return record_end(record, found, pod, NOW)


def test_progress_of_the_job_resets_counts() -> None:
    killed = build_member(TerminationReport(exit_code=137))
    first = record_end(MemberRecord(), killed.termination, killed, NOW, progress=10)
    again = replace(killed, try_number=1)
    assert record_end(first.record, again.termination, again, NOW, progress=10).record.failures == {"killed": 2}
    assert record_end(first.record, again.termination, again, NOW, progress=11).record.failures == {"killed": 1}
    record = end(end(MemberRecord(), OOM).record, OOM, started_s=NOW - 3600).record
    assert record.failures == {"out_of_memory": 1}, "counted anew after an hour"
    assert record.memory_factor == 1.5**2, "what did not suffice then does not now"


def test_image_that_cannot_be_had() -> None:
    report = TerminationReport(container_reason="ImagePullBackOff", message="pull access denied")
    pod = build_member(report, finished=False, waiting="ImagePullBackOff", created_s=NOW)
    assert find_end(MemberRecord(), pod, NOW + 60) is None, "the kubelet still tries"
    assert find_end(MemberRecord(), pod, NOW + 180) == report
    waited = replace(pod, created_s=NOW - 3600, scheduled_s=NOW)
    assert find_end(MemberRecord(), waited, NOW + 60) is None, "it counts from when it got its node"
    assert find_end(MemberRecord(), waited, NOW + 180) == report
    starting = replace(pod, waiting="ContainerCreating", termination=TerminationReport())
    assert find_end(MemberRecord(), starting, NOW + 10_000) is None, "a large image takes its time"


@settings(max_examples=30)
@given(st.lists(st.tuples(st.floats(0, 20), st.sampled_from(["evicted", "preempted", "asked"])), max_size=80))
def test_pods_in_a_minute_are_bounded(ends: list[tuple[float, str]]) -> None:
    record, now_s, made = MemberRecord(), NOW, [NOW]
    for seconds, how in ends:
        now_s = max(now_s + seconds / 10, record.not_before_s or 0.0)
        report = TerminationReport(pod_reason="Evicted") if how == "evicted" else TerminationReport(exit_code=143)
        if how == "asked":
            record = record.begin_try(now_s)
        else:
            pod = build_member(report, record.try_number)
            record = record_end(record, report, pod, now_s, progress=len(made) % 3).record
            record = record.forgive(now_s) if how == "preempted" else record
        if record.ended:
            return
        record = read_member_records({"members": format_member_records({"worker-0": record})})["worker-0"]
        made.append(max(now_s, record.not_before_s or 0.0))
    for number, first_s in enumerate(made):
        assert sum(time_s < first_s + 60 for time_s in made[number:]) <= 12


def test_delays_double() -> None:
    record, delays = MemberRecord(), []
    for _ in range(8):
        outcome = end(record, TerminationReport(exit_code=143))
        record = outcome.record
        delays.append(outcome.decision.delay_s)
    assert delays == [0, 10, 20, 40, 80, 160, 300, 300]
    assert not record.can_start(NOW + 299)
    assert record.can_start(NOW + 300)


@pytest.mark.parametrize(("cause", "left"), [("node_lost", ()), ("hardware", ("node1",))])
def test_last_node_is_used_again(cause: str, left: tuple[str, ...]) -> None:
    """A pod without any node left is let go; a broken GPU is not used for want of another."""
    record = MemberRecord(1, "u", excluded_nodes=(ExcludedNode("node1", NOW + 900, cause),))
    pod = MemberPod("p", "worker", 0, 1, "u", unschedulable="0/1 nodes", created_s=NOW - 30)
    assert relax_exclusions(record, pod, NOW) is record
    relaxed = relax_exclusions(record, replace(pod, created_s=NOW - 90), NOW)
    assert tuple(item.node for item in relaxed.excluded_nodes) == left
    assert relaxed.is_superseded(pod) == (not left)
