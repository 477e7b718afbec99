"""Health and metrics: an API server that is away is not a dead operator."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from edl.cli import main
from edl.errors import SettingsError
from edl.kube.objects import Object
from edl.master.kube.operator import OperatorSettings
from edl.master.kube.operator.monitoring import GiveBackMeter, OperatorHealth, OperatorMetrics
from tests.fast.kube.conftest import write_kubeconfig
from tests.fast.master.kube.capacity import objects


class Times:
    def __init__(self) -> None:
        self.now_s = 1000.0
        self.stuck_s = 0.0
        self.health = OperatorHealth(lambda: self.stuck_s, lambda: self.now_s)


def test_away_is_unready_and_alive() -> None:
    times = Times()
    found = times.health
    assert found.check_ready() == "the watches have not started"
    found.set_waiting("")
    assert found.check_ready() == ""
    assert found.note_request(0) is True
    assert found.note_request(503) is False
    assert found.check_ready() == "", "a short absence is not worth a word"
    times.now_s += 200.0
    found.beat()
    assert "has been unreachable for 200 s" in found.check_ready()
    assert found.check_live() == ""
    assert found.note_request(404) is True
    assert found.check_ready() == ""


def test_stuck_work_and_silent_loop() -> None:
    times = Times()
    assert times.health.check_live() == ""
    times.stuck_s = 1000.0
    assert "1000 s" in times.health.check_live()
    times.stuck_s = 0.0
    times.now_s += 1000.0
    assert "no sign of life for 1000 s" in times.health.check_live()
    times.health.beat()
    assert times.health.check_live() == ""


REFUSED = {"conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}]}


def teacher(**fields: Any) -> Object:
    return objects.pod(1, uid="t", node="n1", labels={"edl.io/pool": "p", "edl.io/owner-uid": "o"}, **fields)


def online(node: str = "", **status: Any) -> Object:
    found = objects.pod(1, uid="o", name="triton")
    found["status"] |= status
    found["spec"] |= {"nodeName": node} if node else {}
    return found


ADDED, WAITS, NOMINATED = (
    ("ADDED", online()),
    ("MODIFIED", online(**REFUSED)),
    ("MODIFIED", online(nominatedNodeName="n1")),
)
LEAVES, GONE = ("MODIFIED", teacher(deleting=True)), ("DELETED", teacher(deleting=True))
BOUND = ("MODIFIED", online("n1"))


@pytest.mark.parametrize(
    ("events", "seconds"),
    [
        ([("ADDED", teacher()), ADDED, LEAVES, WAITS, GONE, BOUND, BOUND], 4.0),
        ([ADDED, NOMINATED, LEAVES, BOUND], 3.0),
        ([ADDED, LEAVES, BOUND], None),  # it found room at once
        ([LEAVES, GONE, ADDED, WAITS, BOUND], None),  # no teacher left while it waited
        ([ADDED, WAITS, LEAVES, ("MODIFIED", online("n2"))], None),
        ([WAITS, LEAVES, BOUND], None),  # it was there before the watch
        ([ADDED, WAITS, ("STALE", None), LEAVES, BOUND], None),  # the watch was interrupted
    ],
)
def test_time_to_give_back(events: list[tuple[str, Object | None]], seconds: float | None) -> None:
    registry, times = CollectorRegistry(), iter(range(100))
    meter = GiveBackMeter(registry, lambda: float(next(times)))
    for event in events:
        meter.record(*event)
    assert registry.get_sample_value("edl_give_back_seconds_count") == (seconds is not None)
    assert registry.get_sample_value("edl_give_back_seconds_sum") == (seconds or 0.0)


def test_failures_are_counted() -> None:
    metrics = OperatorMetrics()
    metrics.count_reconcile("elasticjobs/lab/a", 0.1, ValueError("x"))
    line = 'edl_operator_reconcile_failures_total{error="ValueError",kind="elasticjobs"} 1.0'
    assert line in generate_latest(metrics.registry).decode()


@pytest.mark.parametrize("settings", [{"workers": 0}, {"namespaces": ("*", "a")}])
def test_settings_that_cannot_be(settings: dict[str, object]) -> None:
    with pytest.raises(SettingsError):
        OperatorSettings(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-A", "-n", "lab"], "cannot be combined"),
        (["-n", ""], "expected a name"),
        (["--resync", "nan"], "--resync nan"),
        (["--kubeconfig", "/nowhere/config"], "/nowhere/config"),
    ],
)
def test_what_cannot_be(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["operator", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_port_that_is_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kubeconfig = write_kubeconfig(tmp_path / "config", "http://127.0.0.1:9", namespace="lab")
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        assert main(["operator", "--kubeconfig", kubeconfig, "--http-port", str(port)]) == 2
    assert "cannot listen on" in capsys.readouterr().err
