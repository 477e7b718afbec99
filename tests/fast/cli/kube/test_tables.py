"""What a person sees of jobs and pools, and of their members' logs, which come again after a broken connection."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console, RenderableType

from edl.background import start_call
from edl.cli import main
from edl.cli.kube import logs, submit
from edl.cli.kube.logs import LineCutter, LogFollower, PodLog, select_newest, terminal_safe
from edl.cli.kube.workload_status import (
    WorkloadLook,
    decode_events,
    read_workload,
    workload_view,
    workloads_table,
)
from edl.cli.kube.workloads import Target, parse_target, scale_patch
from edl.cli.output import age
from edl.dashboard.state import as_json
from edl.dashboard.state.cluster import decode_workload
from edl.discovery import open_store
from edl.errors import AccessDeniedError, ConflictError, EDLError, InvalidObjectError, KubernetesError, SettingsError
from edl.kube.client import KubeClient
from edl.kube.objects import Object
from edl.kube.resource_types import PODS, TEACHER_POOLS, ResourceType
from edl.kube.settings import KubeSettings
from edl.master.kube.members.pods import read_member_pods
from tests.fast.kube.conftest import write_kubeconfig
from tests.fast.kube.server import ApiServer, Reply, Request, status

NOW = 1769860800.0  # 2026-01-31T12:00:00Z
TRACEBACK = 'Traceback (most recent call last):\n  File "train.py", line 3\nValueError: no such \x1b[31mcolumn'


def job(**status: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": "first", "namespace": "n", "uid": "u", "creationTimestamp": "2026-01-31T11:50:00Z"},
        "spec": {"minReplicas": 2, "maxReplicas": 8, "run": ["train.py"]},
        "status": status,
    }


def shown(what: RenderableType) -> str:
    console = Console(file=io.StringIO(), width=220, highlight=False)
    console.print(what)
    return console.file.getvalue()  # type: ignore[attr-defined]


def failed_job() -> dict[str, Any]:
    return job(
        phase="Failed",
        jobId="first-12345678",
        readyReplicas=0,
        wantedReplicas=2,
        progressPercentage=45,
        startTime="2026-01-31T11:50:10.123456789Z",
        completionTime="2026-01-31T11:55:10Z",
        conditions=[
            {"type": "Accepted", "status": "True", "reason": "Valid"},
            {"type": "Failed", "status": "True", "reason": "UserError", "message": TRACEBACK},
        ],
        members={
            "worker-10": {"try": 1, "failures": {"node_lost": 1}, "notBefore": "2026-01-31T12:00:30Z"},
            "worker-2": {
                "try": 3,
                "failures": {"out_of_memory": 2},
                "memoryFactor": 2.25,
                "lastEnd": {"try": 2, "cause": "out_of_memory", "exitCode": 137, "node": "node1", "message": "Killed"},
            },
        },
    )


def pod(name: str, index: int, attempt: int, **status: Any) -> dict[str, Any]:
    labels = {"edl.io/job": "first", "edl.io/owner-uid": "u", "edl.io/role": "worker", "edl.io/index": str(index)}
    owners = [{"uid": "u", "controller": True}]
    metadata = {"name": name, "uid": name, "labels": {**labels, "edl.io/try": str(attempt)}, "ownerReferences": owners}
    return {"metadata": metadata, "spec": {"nodeName": "node1", "containers": [{"name": "edl"}]}, "status": status}


def running_pod(index: int, attempt: int = 0) -> dict[str, Any]:
    running = {"name": "edl", "state": {"running": {"startedAt": "2026-01-31T12:00:00Z"}}}
    return pod(f"a-worker-{index}-{attempt}", index, attempt, phase="Running", containerStatuses=[running])


def test_failed_job_is_explained() -> None:
    pods = [
        pod("first-worker-2-3", 2, 3, phase="Running", conditions=[{"type": "Ready", "status": "True"}]),
        pod("first-worker-2-2", 2, 2, phase="Failed", reason="OOMKilled"),
        pod("first-worker-3-0", 3, 0, phase="Failed", message=TRACEBACK),
        pod("other", 0, 0, phase="Running") | {"metadata": {"namespace": "m", "labels": {"edl.io/job": "first"}}},
    ]
    item = decode_workload("job", failed_job(), pods)
    assert [member.name for member in item.members] == ["worker-2", "worker-3", "worker-10"], "numbers, not text"
    assert (item.members[0].state, item.members[0].pod, item.members[0].attempt) == ("ready", "first-worker-2-3", 3)
    assert item.members[2].state == "waiting"
    text = shown(workload_view(item, (), NOW))
    assert "Failed, workers 0/2 (2-8), id first-12345678, 45%" in text
    assert "failed (ValueError: no such" in text, "the last line"
    assert "ran 5m" in text
    assert 'File "train.py", line 3' in text
    assert "\x1b" not in text
    assert "2x out_of_memory; memory x2.25" in text
    assert "out_of_memory, exit code 137 on node1: Killed" in text
    assert "waiting (next try in 30s)" in text
    row = shown(workloads_table([item], NOW, namespaces=True))
    assert "ValueError: no such" in row, "the last line of a traceback says what it is"
    json.dumps(as_json(item), allow_nan=False)


def test_pod_says_what_it_waits_for() -> None:
    waiting = {"name": "edl", "state": {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}}
    words = "0/2 nodes: Insufficient nvidia.com/gpu"
    unscheduled = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": words}
    pods = [
        pod("a", 0, 0, phase="Pending", containerStatuses=[waiting]),
        pod("b", 1, 0, phase="Pending", conditions=[unscheduled]),
        pod("c", 2, 0, phase="Running"),
        pod("d", 3, 0, phase="Pending", conditions=[{**unscheduled, "reason": "SchedulingGated", "message": "gated"}]),
    ]
    del pods[1]["spec"]["nodeName"], pods[3]["spec"]["nodeName"]
    pods[2]["metadata"]["deletionTimestamp"] = "2026-01-31T12:00:00Z"
    item = decode_workload("job", job(phase="Pending"), pods)
    found = [(member.state, member.detail) for member in item.members]
    assert found == [
        ("starting", "ImagePullBackOff: no such image"),
        ("unscheduled", words),
        ("ending", ""),
        ("unscheduled", "gated"),
    ]


def test_phases_that_no_status_says() -> None:
    new = {"metadata": {"name": "a"}, "spec": {}}
    assert decode_workload("job", new).phase == ""
    refused = job(phase="Rejected", conditions=[{"type": "Accepted", "status": "False", "message": "min above max"}])
    assert "min above max" in shown(workloads_table([decode_workload("job", refused)], NOW, namespaces=False))
    refused["status"]["conditions"][0] |= {"reason": "QuotaExceeded", "message": "exceeded quota " * 20}
    assert "QuotaExceeded: exceeded" in shown(workloads_table([decode_workload("job", refused)], NOW, namespaces=False))
    deleted = job(phase="Running")
    deleted["metadata"]["deletionTimestamp"] = "2026-01-31T12:00:00Z"
    assert decode_workload("job", deleted).phase == "Deleting"
    assert "no operator has handled" in shown(workloads_table([decode_workload("job", new)], NOW, namespaces=False))


def test_pool_says_why_it_does_not_grow() -> None:
    growing = {"type": "Growing", "status": "False", "reason": "NoIdleCapacity", "message": "no GPU is idle"}
    found = {
        "metadata": {"name": "digits", "namespace": "n"},
        "spec": {"minReplicas": 0, "maxReplicas": 4},
        "status": {"phase": "Running", "readyReplicas": 2, "wantedReplicas": 4, "borrowed": 2, "conditions": [growing]},
    }
    text = shown(workloads_table([decode_workload("pool", found)], NOW, namespaces=False))
    assert "2/4 (0-4)" in text
    assert "no GPU is idle" in text


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
FIELDS = st.sampled_from(
    [
        *("phase", "members", "conditions", "try", "failures", "lastEnd", "memoryFactor", "message", "type", "status"),
        *("minReplicas", "jobId", "startTime", "progressPercentage", "notBefore", "uid", "name", "namespace", "labels"),
        *("containerStatuses", "state", "waiting"),
    ]
)
NESTED = st.dictionaries(
    FIELDS, st.dictionaries(FIELDS, JSON, max_size=4) | JSON | st.lists(JSON, max_size=2), max_size=6
)


@settings(max_examples=20)
@given(NESTED, NESTED, NESTED, NESTED)
def test_any_object_is_a_row(metadata: Any, spec: Any, status: Any, pod_status: Any) -> None:
    """Whatever somebody wrote into a resource, the others are shown."""
    pods = [{"metadata": metadata, "spec": spec, "status": pod_status}, pod("a", 0, 0) | {"status": pod_status}]
    for kind, name in (("job", metadata), ("job", job()["metadata"]), ("pool", metadata)):
        item = decode_workload(kind, {"metadata": name, "spec": spec, "status": status}, pods)
        json.dumps(as_json(item), allow_nan=False)
        shown(workload_view(item, decode_events([metadata, status]), NOW))
        shown(workloads_table([item], NOW, namespaces=True))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "-"), (-5, "0s"), (119.4, "119s"), (200, "3m20s"), (3600, "60m"), (7500, "2h5m"), (4e5, "4d15h")],
)
def test_age(seconds: float | None, text: str) -> None:
    assert age(seconds) == text


def test_target_is_parsed() -> None:
    assert parse_target("first") == (None, "first")
    assert parse_target("job/first") == parse_target("elasticjob/first") == parse_target("ej/first") == ("job", "first")
    assert parse_target("TeacherPool/digits") == ("pool", "digits")
    for wrong in ("", "job/", "pod/first", "/first"):
        with pytest.raises(SettingsError):
            parse_target(wrong)


def test_scale_keeps_to_bounds() -> None:
    target = Target("job", "first", job())
    assert scale_patch(target, 3, None, None) == {"scaling": "external", "replicas": 3}
    assert scale_patch(target, None, None, None) == {"scaling": "auto", "replicas": None}
    assert scale_patch(target, 12, None, 12) == {"scaling": "external", "replicas": 12, "maxReplicas": 12}
    for count, words in ((9, "--max 9"), (1, "--min 1"), (0, "edl suspend job/first")):
        with pytest.raises(SettingsError, match=words):
            scale_patch(target, count, None, None)
    with pytest.raises(SettingsError, match="are invalid"):
        scale_patch(target, None, 5, 3)
    pool = Target("pool", "digits", {"spec": {"maxReplicas": 4}})
    assert scale_patch(pool, 0, None, None)["replicas"] == 0


@pytest.fixture
def server(stack: ExitStack) -> ApiServer:
    pytest.importorskip("kubernetes", reason="the package kubernetes is not installed")
    return stack.enter_context(closing(ApiServer()))


def look(server: ApiServer, folder: Path, store: str, store_url: str = "") -> WorkloadLook:
    resource: dict[str, Any] = {
        "metadata": {"name": "j", "namespace": "research", "uid": "u"},
        "spec": {"store": store},
        "status": {"jobId": "j-1", "phase": "Running"},
    }

    def answer(request: Request) -> Reply:
        if request.path.endswith("/elasticjobs/j"):
            return Reply(200, resource)
        return Reply(200, {"kind": "List", "metadata": {"resourceVersion": "1"}, "items": []})

    server.answer = answer
    settings = KubeSettings(kubeconfig=write_kubeconfig(folder / "prod", server.url, namespace="research"))
    with KubeClient(replace(settings, timeout_s=2.0)) as client:
        return read_workload(client, Target("job", "j", resource), store_url)


@pytest.fixture(autouse=True)
def _elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The current cluster and the user's own store are others."""
    monkeypatch.setenv("KUBECONFIG", write_kubeconfig(tmp_path / "current", "http://127.0.0.1:9"))
    monkeypatch.setenv("EDL_DISCOVERY", f"sqlite://{tmp_path}/own.sqlite")


@pytest.mark.parametrize(
    "store",
    [
        "consul://evil:8500",
        "etcd://evil:2379",
        "edl://edl-store.edl.svc:29400",
        "edl://a.b;rm:1",
        "edl://10.88.0.1:29777",
        "edl://store.example.com:29400",
        "sqlite:///{}/made",
        "kubernetes://x",
    ],
)
def test_store_that_a_stranger_named(
    server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: str
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("opened")

    monkeypatch.setattr("edl.cli.kube.workload_status.open_store", refuse)
    found = look(server, tmp_path, store.format(tmp_path))
    assert found.job is None
    assert "--store" in found.trouble
    forwarded = "`kubectl port-forward -n edl service/edl-store 29400`" in found.trouble
    assert forwarded == ("edl-store" in store)
    assert forwarded == ("port-forward" in found.trouble)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("allowed", [True, False])
def test_missing_namespace_is_an_error(server: ApiServer, tmp_path: Path, capsys: Any, allowed: bool) -> None:
    def answer(request: Request) -> Reply:
        if request.path.endswith("/namespaces/nope"):
            return status(404, "NotFound", "not found", name="nope") if allowed else status(403, "Forbidden", "no")
        return Reply(200, {"kind": "List", "metadata": {"resourceVersion": "1"}, "items": []})

    server.answer = answer
    file = write_kubeconfig(tmp_path / "prod", server.url)
    assert main(["jobs", "-n", "nope", "--kubeconfig", file]) == (2 if allowed else 0)
    assert ("there is no namespace 'nope'" if allowed else "No jobs or pools") in "".join(capsys.readouterr())


@pytest.mark.parametrize("named", ["EDL_DISCOVERY", "--store"])
def test_store_that_the_user_named(
    server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    url = f"sqlite://{tmp_path}/theirs.sqlite"
    opened = []
    monkeypatch.setattr(
        "edl.cli.kube.workload_status.open_store", lambda url, timeout_s: (opened.append(url), open_store(url))[1]
    )
    if named == "EDL_DISCOVERY":
        monkeypatch.setenv(named, url)
        assert look(server, tmp_path, url).trouble == ""
    else:
        assert look(server, tmp_path, "consul://in-the-cluster:8500", url).trouble == ""
    assert opened == [url]


def test_another_job_of_the_same_name(server: ApiServer, tmp_path: Path) -> None:
    """It was deleted and made again: who watches the first does not go on with the second."""
    made = {"metadata": {"name": "j", "namespace": "research", "uid": "second"}, "spec": {}, "status": {}}
    server.answer = lambda request: Reply(200, made if request.path.endswith("/elasticjobs/j") else {"items": []})
    first = Target("job", "j", {"metadata": {"name": "j", "namespace": "research", "uid": "first"}})
    path = write_kubeconfig(tmp_path / "prod", server.url, namespace="research")
    with (
        KubeClient(KubeSettings(kubeconfig=path)) as client,
        pytest.raises(SettingsError, match="deleted and recreated"),
    ):
        read_workload(client, first)


def stamped(second: int, nano: int, text: str) -> bytes:
    return f"2026-01-31T12:{second // 60:02d}:{second % 60:02d}.{nano:09d}Z {text}\n".encode()


@given(st.data())
def test_broken_connection_loses_nothing(data: st.DataObject) -> None:
    """Wherever connections break, each line comes once and in order, also where two streams' times are mixed."""
    times = st.tuples(st.integers(0, 5), st.integers(0, 2))
    steps = data.draw(st.lists(times, max_size=12))
    second, log, texts = 0, [], []
    for number, (step, nano) in enumerate(steps):
        second += step // 2  # many lines of the same second, and of the same nanosecond
        text = f"line {number % 2}"  # the same text again and again
        log.append((second, stamped(second, nano, text)))
        texts.append(text.encode())
    cutter, seen = LineCutter(), []
    for is_last in [*[False] * data.draw(st.integers(1, 4)), True]:
        cutter.restart()
        since = cutter.since
        start = 0 if not since or since.startswith("2026-01-31T11") else int(since[14:16]) * 60 + int(since[17:19])
        rest = b"".join(line for at, line in log if at >= start)
        whole = rest if is_last else rest[: data.draw(st.integers(0, len(rest)))]
        cut = data.draw(st.integers(0, len(whole)))
        for piece in (whole[:cut], whole[cut:]):
            seen += list(cutter.cut(piece))
    assert seen == texts


def test_log_without_end() -> None:
    cutter = LineCutter()
    assert list(cutter.cut(b"2026-01-31T12:00:00Z half")) == []
    assert list(cutter.end()) == [b"half"]
    assert list(cutter.end()) == []
    assert sum(map(len, cutter.cut(b"x" * 3_000_000))) == 3_000_000, "a line that never ends does not fill the memory"
    assert list(cutter.cut(b"\n2026-02-31T12:00:00Z no such day\n\n"))[1:] == [b"2026-02-31T12:00:00Z no such day", b""]


def test_terminal_is_safe() -> None:
    assert terminal_safe("\x1b[31mred\x1b[0m\tand tab") == "\x1b[31mred\x1b[0m\tand tab"
    assert "\x1b" not in terminal_safe("\x1b]0;title\x07 and \x1b[2J")
    assert terminal_safe("10%\r50%\r100%\r") == "100%"


def test_pods_are_chosen() -> None:
    pods = [running_pod(10), running_pod(2, 1), pod("a-worker-2-0", 2, 0, phase="Failed")]
    pods.append(pod("a-worker-2-10", 2, 10, phase="Pending"))
    pods[0]["spec"]["containers"].insert(0, {"name": "side"})
    found, _ = read_member_pods(pods, "u")
    assert {item.container for item in found} == {"edl"}
    assert [item.name for item in select_newest(found)] == ["a-worker-2-10", "a-worker-10-0"]


POD = running_pod(0)

JOB: Object = {"metadata": {"name": "a", "namespace": "n", "uid": "u"}, "spec": {}, "status": {"phase": "Running"}}


class FakeCluster:
    def __init__(self, read_log: Callable[[], Iterator[bytes]]) -> None:
        self._read_log = read_log
        self.job = JOB
        self.pools: Iterator[Object | None] = iter(())
        self.connections = 0

    def get(self, kind: ResourceType, name: str, namespace: str = "") -> Object | None:
        if kind == TEACHER_POOLS:
            return next(self.pools)
        return POD if kind == PODS else self.job

    def list(self, kind: ResourceType, label_selector: str) -> Any:
        class Page:
            items = (POD,)

        return Page

    def read_log(self, name: str, **options: Any) -> Iterator[bytes]:
        self.connections += 1
        return self._read_log()


def refuse(exc: EDLError) -> Callable[[], Iterator[bytes]]:
    def read() -> Iterator[bytes]:
        raise exc

    return read


@pytest.mark.parametrize(
    ("exc", "phase"), [(AccessDeniedError("pods/log is not yours"), "Running"), (ConflictError("odd"), "Failed")]
)
def test_error_of_a_reader_is_told(exc: EDLError, phase: str) -> None:
    cluster = FakeCluster(refuse(exc))
    cluster.job = {**JOB, "status": {"phase": phase}}
    target = Target("job", "a", JOB)
    follower = LogFollower(cast(KubeClient, cluster), target, lambda pod, line: None, lambda words: None)
    with pytest.raises(type(exc), match=str(exc)):
        follower.run()


def test_pool_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that waits for its teachers says nothing itself."""

    def make_pool(reason: str, kind: str = "Ready", message: str = "digits-teacher-0-0: NameError: predictt") -> Object:
        conditions = [{"type": kind, "status": "False", "reason": reason, "message": message}]
        return {"metadata": {"name": "digits", "namespace": "n", "uid": "p"}, "status": {"conditions": conditions}}

    def pools() -> Iterator[Object | None]:
        yield make_pool("Starting")
        yield make_pool("TeacherFailing")
        yield make_pool("TeacherFailing", message="0 of 1: the same, in other words")
        cluster.job = {**JOB, "status": {"phase": "Failed"}}
        yield None
        yield make_pool("InvalidField", "Accepted", "spec.store is 'x'")

    monkeypatch.setattr("edl.cli.kube.logs._LOOK_S", 0.01)
    cluster = FakeCluster(refuse(AssertionError("read")))  # type: ignore[arg-type]
    cluster.pools = pools()
    notes: list[str] = []
    pool = Target("pool", "digits", make_pool(""))
    follower = LogFollower(cast(KubeClient, cluster), Target("job", "a", JOB), None, notes.append, pools=[pool])
    assert follower.run() == "Failed"
    assert [words for words in notes if "pool" in words] == [
        "pool/digits: TeacherFailing: digits-teacher-0-0: NameError: predictt",
        "pool/digits: InvalidField: spec.store is 'x'",
    ]


@pytest.mark.parametrize(("status", "words"), [({}, "has not been handled"), ({"phase": "Pending"}, "has not ended")])
def test_wait_that_is_over(status: Object, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    cluster = FakeCluster(refuse(AssertionError("read")))  # type: ignore[arg-type]
    cluster.job = {**JOB, "status": status}
    options = argparse.Namespace(timeout=0.2, follow=False)
    assert submit._await_end(cast(KubeClient, cluster), Target("job", "a", JOB), [], options) == 124
    assert words in capsys.readouterr().err


class Pauses(threading.Event):
    """Notes for how long it was waited for; set at the fourth time."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.seconds.append(timeout or 0.0)
        if len(self.seconds) == 4:
            self.set()
        return self.is_set()


def test_crashed_container_is_left_in_peace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a container that waits to be restarted, the kubelet sends the last log at once, also to those who follow."""
    cluster = FakeCluster(lambda: iter([b"2026-01-31T12:00:00Z line\n"]))
    (pod,), _ = read_member_pods([POD], "u")
    lines: list[bytes] = []
    reader = PodLog(cast(KubeClient, cluster), pod, None, lambda member, line: lines.append(line), lambda words: None)
    pauses = Pauses()
    monkeypatch.setattr(reader, "_stopping", pauses)
    reader.follow()
    assert lines == [b"line"]
    assert (cluster.connections, len(pauses.seconds)) == (5, 4)
    assert 0.1 < pauses.seconds[0] < pauses.seconds[2] < pauses.seconds[3]


def test_lost_node_hides_no_other_log(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    answers = [refuse(KubernetesError("dial tcp: no route to host")), lambda: iter([b"2026-01-31T12:00:00Z second\n"])]
    cluster = FakeCluster(lambda: answers.pop(0)())
    monkeypatch.setattr(logs, "list_pods", lambda client, target: [POD, running_pod(1)])
    monkeypatch.setattr(logs, "find_target", lambda client, name: Target("job", "a", JOB))
    monkeypatch.setattr(logs, "open_cluster", lambda options: contextlib.nullcontext(cluster))
    assert logs.main(["a"]) == 1
    said = capsys.readouterr()
    assert "second" in said.out
    assert "worker-0: dial tcp: no route to host" in said.err


def test_evicted_pod_is_explained(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    evicted = pod("a-worker-0-0", 0, 0, phase="Failed", reason="Evicted")
    monkeypatch.setattr(logs, "list_pods", lambda client, target: [evicted])
    cluster = FakeCluster(refuse(InvalidObjectError("no container")))
    assert logs._show(cast(KubeClient, cluster), Target("job", "a", JOB), None, None, logs.LogScreen(prefix=True))
    assert "has not started (Evicted)" in capsys.readouterr().err


def test_pod_that_writes_on_holds_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pod of a failed job has its grace period, and writes all the time: the command ends, and says what it left."""
    monkeypatch.setattr("edl.cli.kube.logs._DRAIN_S", 0.5)
    ended = threading.Event()

    def write_on() -> Iterator[bytes]:
        for number in range(1_000_000):
            if ended.wait(0.01):
                return
            yield f"2026-01-31T12:00:00.{number:09d}Z line\n".encode()

    cluster = FakeCluster(write_on)
    cluster.job = {**JOB, "status": {"phase": "Failed"}}
    notes: list[str] = []
    follower = LogFollower(cast(KubeClient, cluster), Target("job", "a", JOB), lambda pod, line: None, notes.append)
    running = start_call("test-follow", follower.run)
    try:
        assert running.result(60) == "Failed"
    finally:
        ended.set()
    assert any("worker-0 may still write" in words for words in notes), notes
