"""Logs of members: lines that come again after a broken connection, and which pods are shown."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edl.background import start_call
from edl.cli.kube import cmd_logs
from edl.cli.kube.member_logs.follower import FollowOptions, LogFollower
from edl.cli.kube.member_logs.lines import LineCutter, terminal_safe
from edl.cli.kube.member_logs.pod_log import PodLog
from edl.cli.kube.member_logs.selection import read_pod, select_present, select_previous, sort_pods
from edl.cli.kube.targets import Target
from edl.errors import AccessDeniedError, ConflictError, EDLError, KubernetesError
from edl.kube.client import KubeClient
from edl.kube.objects import Object
from edl.kube.resource_types import PODS, ResourceType


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
    for _ in range(data.draw(st.integers(1, 4))):
        cutter.restart()
        since = cutter.since
        start = int(since[14:16]) * 60 + int(since[17:19]) if since else 0
        if since and since.startswith("2026-01-31T11"):
            start = 0
        rest = b"".join(line for at, line in log if at >= start)
        whole = rest[: data.draw(st.integers(0, len(rest)))]
        cut = data.draw(st.integers(0, len(whole)))
        for piece in (whole[:cut], whole[cut:]):
            seen += list(cutter.cut(piece))
    cutter.restart()
    since = cutter.since
    start = 0 if not since or since.startswith("2026-01-31T11") else int(since[14:16]) * 60 + int(since[17:19])
    seen += list(cutter.cut(b"".join(line for at, line in log if at >= start)))
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


def pod(index: int, attempt: int, phase: str = "Running", **status: Any) -> dict[str, Any]:
    labels = {"edl.io/role": "worker", "edl.io/index": str(index), "edl.io/try": str(attempt)}
    return {
        "metadata": {"name": f"a-worker-{index}-{attempt}", "uid": f"{index}-{attempt}", "labels": labels},
        "spec": {"containers": [{"name": "side"}, {"name": "edl"}]},
        "status": {"phase": phase, **status},
    }


def test_pods_are_chosen() -> None:
    running = {"containerStatuses": [{"name": "side", "state": {}}, {"name": "edl", "state": {"running": {}}}]}
    pods = [
        pod(10, 0),
        pod(2, 1, **running),
        pod(2, 0, "Failed"),
        pod(2, 10, "Pending"),
        {"metadata": {}, "spec": None},
    ]
    found = sort_pods(pods, None, None)
    assert [item.pod for item in found] == [f"a-worker-{end}" for end in ("2-0", "2-1", "2-10", "10-0")]
    assert found[1].started
    assert found[1].container == "edl"
    assert found[0].ended
    assert [item.attempt for item in select_present(found)] == [10, 0]
    assert [(item.member, item.attempt) for item in select_previous(found)] == [("worker-2", 1)]
    assert sort_pods(pods, "teacher", None) == []
    assert [item.index for item in sort_pods(pods, "worker", 10)] == [10]


POD: Object = {
    "metadata": {"name": "p", "uid": "p", "labels": {"edl.io/role": "worker", "edl.io/index": "0"}},
    "spec": {"containers": [{"name": "edl"}]},
    "status": {"phase": "Running", "containerStatuses": [{"name": "edl", "state": {"running": {}}}]},
}

JOB: Object = {"metadata": {"name": "a", "namespace": "n", "uid": "u"}, "spec": {}, "status": {"phase": "Running"}}


class FakeCluster:
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
