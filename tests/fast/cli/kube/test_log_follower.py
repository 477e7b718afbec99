"""Readers of logs: what ends one ends the command, and a container that waits is not asked without a pause."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

from edl.background import start_call
from edl.cli.kube import cmd_logs
from edl.cli.kube.member_logs.follower import FollowOptions, LogFollower
from edl.cli.kube.member_logs.pod_log import PodLog
from edl.cli.kube.member_logs.selection import read_pod
from edl.cli.kube.targets import Target
from edl.errors import AccessDeniedError, ConflictError, EDLError, KubernetesError
from edl.kube.client import KubeClient
from edl.kube.objects import Object
from edl.kube.resource_types import PODS, ResourceType

POD: Object = {
    "metadata": {"name": "p", "uid": "p", "labels": {"edl.io/role": "worker", "edl.io/index": "0"}},
    "spec": {"containers": [{"name": "edl"}]},
    "status": {"phase": "Running", "containerStatuses": [{"name": "edl", "state": {"running": {}}}]},
}
JOB: Object = {"metadata": {"name": "a", "namespace": "n", "uid": "u"}, "spec": {}, "status": {"phase": "Running"}}


class FakeCluster:
    """A job with a pod; of its log what a function returns.

    Args:
        read_log: called for each connection.
    """

    def __init__(self, read_log: Callable[[], Iterator[bytes]]) -> None:
        self._read_log = read_log
        self.job = JOB
        self.connections = 0

    def get(self, kind: ResourceType, name: str) -> Object | None:
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
    follower = LogFollower(
        cast(KubeClient, cluster), target, FollowOptions(), lambda pod, line: None, lambda words: None
    )
    with pytest.raises(type(exc), match=str(exc)):
        follower.run()


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
    pod = read_pod(POD)
    assert pod is not None
    lines: list[bytes] = []
    reader = PodLog(cast(KubeClient, cluster), pod, None, lambda pod, line: lines.append(line), lambda words: None)
    pauses = Pauses()
    monkeypatch.setattr(reader, "_stopping", pauses)
    reader.run()
    assert lines == [b"line"]
    assert (cluster.connections, len(pauses.seconds)) == (5, 4)
    assert 0.1 < pauses.seconds[0] < pauses.seconds[2] < pauses.seconds[3]


def test_lost_node_hides_no_other_log(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    answers = [refuse(KubernetesError("dial tcp: no route to host")), lambda: iter([b"2026-01-31T12:00:00Z second\n"])]
    cluster = FakeCluster(lambda: answers.pop(0)())
    other = {
        **POD,
        "metadata": {**POD["metadata"], "name": "q", "labels": {"edl.io/role": "worker", "edl.io/index": "1"}},
    }
    monkeypatch.setattr(cmd_logs, "list_pods", lambda client, target: [POD, other])
    monkeypatch.setattr(cmd_logs, "find_target", lambda client, name: Target("job", "a", JOB))
    monkeypatch.setattr(cmd_logs, "open_cluster", lambda options: contextlib.nullcontext(cluster))
    assert cmd_logs.main(["a"]) == 1
    said = capsys.readouterr()
    assert "second" in said.out
    assert "worker-0: dial tcp: no route to host" in said.err


def test_pod_that_writes_on_holds_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pod of a failed job has its grace period, and writes all the time: the command ends, and says what it left."""
    monkeypatch.setattr("edl.cli.kube.member_logs.follower._DRAIN_S", 0.5)
    ended = threading.Event()

    def write_on() -> Iterator[bytes]:
        for number in range(1_000_000):
            if ended.wait(0.01):
                return
            yield f"2026-01-31T12:00:00.{number:09d}Z line\n".encode()

    cluster = FakeCluster(write_on)
    cluster.job = {**JOB, "status": {"phase": "Failed"}}
    notes: list[str] = []
    follower = LogFollower(
        cast(KubeClient, cluster),
        Target("job", "a", JOB),
        FollowOptions(),
        lambda pod, line: None,
        notes.append,
    )
    running = start_call("test-follow", follower.run)
    try:
        assert running.result(60) == "Failed"
    finally:
        ended.set()
    assert any("worker-0 may write on" in words for words in notes), notes
