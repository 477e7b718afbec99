"""`edl teachers SERVICE`: what teachers compute, what students ask, and how many would do."""

from __future__ import annotations

import io
import json
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from edl.cli import main
from edl.cli.output import printable
from edl.cli.teachers import LoadView, brief_meta
from edl.discovery import Instance, Registry, Store, open_store
from edl.errors import DiscoveryError
from edl.load_reporting import read_service


@pytest.fixture
def registry(registry: Registry) -> Registry:
    for number in range(3):
        registry.register(Instance("s", f"t{number}", "127.0.0.1", 8000 + number), 600)
    return registry


def student(name: str, **fields: Any) -> dict[str, Any]:
    since = {"t": 0.0, "rows_asked": 0, "wait_s": 0.0, "source_wait_s": 0.0}
    return {"v": 1, "id": name, "job": "j", **since, "t": 10.0, "since": since, **fields}


def teacher(name: str, **fields: Any) -> dict[str, Any]:
    since = {"t": 0.0, "rows": 0, "compute_s": 0.0}
    now = {"t": 10.0, "rows": 920, "compute_s": 9.2, "workers": 1, "state": "ready", "queue_rows": 7}
    return {"v": 1, "id": f"p{name}", "teacher": name, **now, "since": since, **fields}


def publish(url: str, *records: dict[str, Any]) -> None:
    with open_store(url) as store:
        for record in records:
            kind = "teachers" if "workers" in record else "students"
            store.put(f"load/s/{kind}/{record['id']}", json.dumps(record).encode())


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["teachers", "s", *arguments]) == 0
    return capsys.readouterr().out


def test_line_says_how_many_would_do(registry: Registry, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    waits = {"rows_asked": 1380, "wait_s": 3.1}
    publish(url, student("a", **waits), student("b", **waits), student("c"), *map(teacher, ("t0", "t1", "t2")))
    text = shown(capsys, "--discovery", url)
    assert "3 live; 2 students wait 31% of their time; 5 would do" in text
    (row,) = (line.split() for line in text.splitlines() if line.split()[:1] == ["t1"])
    assert row == ["t1", "ready", "92", "100", "92%", "7"]
    (row,) = (line.split() for line in text.splitlines() if line.split()[:1] == ["a"])
    assert row == ["a", "j", "138", "200", "31%", "0%"]
    assert "idle" in text
    (service,) = json.loads(shown(capsys, "--discovery", url, "--json"))["services"]
    assert (service["load"]["would_do"], service["wanted"]) == (5, None)
    assert [part["demand"] for part in service["load"]["students"]] == [pytest.approx(200), pytest.approx(200), 0.0]
    assert [part["rate"] for part in service["load"]["teachers"]] == [pytest.approx(100)] * 3
    assert service["text"] == "3 live; 2 students wait 31% of their time; 5 would do"


@pytest.mark.parametrize(
    ("records", "line"),
    [
        ([], "3 live; no student publishes its load"),
        ([student("a")], "3 live; 1 student asks for nothing"),
        (
            [student("a", rows_asked=10)],
            "1 student waits 0% of its time; how many would do is unknown: no teacher's",
        ),
        ([student("a", wait_s=10.0)], "waits 100% of its time; how many would do is unknown: no student could ask"),
        ([student("a", rows_asked=900, wait_s=9.7), teacher("t0")], "waits 97% of its time; 2 or more would do"),
        ([teacher("t0", rows=None, compute_s=None, note="no statistics")], "no statistics"),
        ([teacher("t3", state="starting")], "3 live, 1 starting; no student"),
    ],
)
def test_line_says_what_is_not_known(
    registry: Registry, url: str, capsys: pytest.CaptureFixture[str], records: list[dict[str, Any]], line: str
) -> None:
    publish(url, *records)
    assert line in shown(capsys, "--discovery", url)


def test_masters_number_and_reason_are_shown(
    registry: Registry, store: Store, url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [1000.0]
    monkeypatch.setattr("edl.cli.teachers.time", SimpleNamespace(time=lambda: now_s[0]))
    record = {"v": 1, "count": 5, "now": 3, "since": 1.0, "decisions": [], "time": 990.0}
    store.put("wanted/teachers/s", json.dumps({**record, "reason": "students\x1b[2J wait"}).encode())
    text = shown(capsys, "--discovery", url)
    assert "wanted: 5; students" in text
    assert "\x1b" not in text
    assert json.loads(shown(capsys, "--discovery", url, "--json"))["services"][0]["wanted"]["count"] == 5
    now_s[0] += 3600.0
    assert "60 min ago, with no update from a master since: 5" in shown(capsys, "--discovery", url)


def test_unreadable_load_hides_no_teacher(
    registry: Registry, url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Consul token may allow reading services, but not the KV store."""

    def deny(*_: object) -> None:
        raise DiscoveryError("permission denied")

    monkeypatch.setattr("edl.cli.teachers.read_wanted", deny)
    text = shown(capsys, "--discovery", url)
    assert "127.0.0.1:8002" in text
    assert "the load of students is unknown: permission denied" in text
    (service,) = json.loads(shown(capsys, "--discovery", url, "--json"))["services"]
    assert (len(service["instances"]), service["load"]) == (3, None)
    assert service["load_error"].endswith("permission denied")


def test_lapsed_teacher_has_one_state(store: Store, url: str) -> None:
    """The record that it published last says "ready", and a rate."""
    publish(url, teacher("t0"), teacher("t1"))
    view = LoadView(read_service(store, "s"), None, 1, lapsed=frozenset({"t0"}))
    assert [part["state"] for part in view.as_dict()["load"]["teachers"]] == ["lapsed", "ready"]
    output = io.StringIO()
    Console(file=output, width=200).print(*view.renderables())
    rows = [line.split() for line in output.getvalue().splitlines() if line.split()[:1] in (["t0"], ["t1"])]
    assert rows == [["t0", "lapsed", *4 * "-"], ["t1", "ready", "92", "100", "92%", "7"]]


def test_metadata_is_brief() -> None:
    assert printable("a\x1b[2Jb\rc\x07") == "a�[2Jb�c�", "escape sequences do not reach the terminal"
    assert brief_meta({"b": "2", "a": "1"}) == "a=1 b=2"
    assert len(brief_meta({"key": "x" * 500})) == 48
