"""Logs of members: lines that come again after a broken connection, and which pods are shown."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from edl.cli.kube.member_logs.lines import LineCutter, terminal_safe
from edl.cli.kube.member_logs.selection import select_present, select_previous, sort_pods


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
