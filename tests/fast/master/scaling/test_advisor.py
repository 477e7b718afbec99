"""The loop that reads loads and writes what is wanted, over a real store."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from typing import Any

import pytest

from edl.discovery import Store
from edl.errors import DiscoveryError
from edl.load_reporting import read_all_wanted, read_wanted
from edl.master.scaling import advisor as module
from edl.master.scaling.advisor import ScalingAdvisor, WorkerAdvice
from edl.master.scaling.teachers import TeacherScalingSettings
from edl.master.scaling.workers import WorkerDecision
from tests.waiting import wait_until

QUICK = TeacherScalingSettings(up_s=0.2, down_s=0.6)
PATIENT = replace(QUICK, down_s=60.0)
"""Goes on from what was written a minute ago: a starved machine takes long from one advisor to the next."""


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "INTERVAL_S", 0.05)
    monkeypatch.setattr(module, "_REFRESH_S", 0.1)


def publish(store: Store, demand: float, teachers: int = 1, service: str = "s") -> None:
    """Teachers of 100 rows/s, and a student that asks for so many."""
    since = {"t": 0.0, "rows_asked": 0, "wait_s": 0.0, "source_wait_s": 0.0}
    student = {"v": 1, "id": "a", **since, "rows_asked": 10 * demand, "t": 10.0, "since": since}
    store.put(f"load/{service}/students/a", json.dumps(student).encode())
    before = {"t": 0.0, "rows": 0, "compute_s": 0.0}
    for number in range(teachers):
        now = {"t": 10.0, "rows": 100, "compute_s": 1.0, "workers": 1, "state": "ready"}
        teacher = {"v": 1, "id": f"t{number}", **now, "since": before}
        store.put(f"load/{service}/teachers/t{number}", json.dumps(teacher).encode())


def wanted(store: Store, service: str = "s") -> dict[str, Any]:
    return read_wanted(store, "teachers", service) or {"count": None}


def test_another_advisor_goes_on(store: Store) -> None:
    publish(store, demand=400.0, teachers=3)
    first = ScalingAdvisor(store, PATIENT)
    wait_until(lambda: wanted(store)["count"] == 5)
    publish(store, demand=400.0, teachers=5)
    with ScalingAdvisor(store, PATIENT) as second:
        assert first.is_leader
        assert not second.is_leader
        before = wanted(store)
        first.close()
        wait_until(lambda: second.is_leader and wanted(store)["time"] > before["time"])
        found = wanted(store)
        assert (found["count"], found["since"], found["decisions"]) == (5, before["since"], before["decisions"])
        assert found["now"] == 5


@pytest.mark.parametrize(("own", "warnings"), [(TeacherScalingSettings(), 0), (TeacherScalingSettings(least=2), 1)])
def test_bounds_without_effect_are_warned_of(
    store: Store, caplog: pytest.LogCaptureFixture, own: TeacherScalingSettings, warnings: int
) -> None:
    """A default operator, and a default master or one that was given bounds."""
    with ScalingAdvisor(store) as operator:
        wait_until(lambda: operator.is_leader)
        with ScalingAdvisor(store, own) as master:
            wait_until(lambda: master._compare_at_s > 0)
            master._compare_at_s = 0.0
            wait_until(lambda: master._compare_at_s > 0)  # for the second time, so the first is over
            wait_until(lambda: caplog.text.count("have no effect") == warnings)
            assert not master.is_leader


OLD = {"v": 1, "count": 50, "now": 50, "reason": "", "since": 1.0, "time": 1.0, "decisions": []}


@pytest.mark.parametrize("value", [b"garbage", b'{"v":1,"count":"50"}', json.dumps(OLD).encode()])
def test_garbage_and_old_numbers_count_not(store: Store, value: bytes) -> None:
    store.put("wanted/teachers/s", value)
    publish(store, demand=10.0, teachers=2)
    with ScalingAdvisor(store, QUICK):
        wait_until(lambda: wanted(store)["count"] == 2)


def test_service_that_is_gone_is_forgotten(store: Store) -> None:
    publish(store, demand=100.0, service="s")
    publish(store, demand=100.0, service="other")
    with ScalingAdvisor(store, QUICK):
        wait_until(lambda: set(read_all_wanted(store)) == {("teachers", "s"), ("teachers", "other")})
        for entry in store.list("load/other/"):
            store.delete(entry.key)
        wait_until(lambda: set(read_all_wanted(store)) == {("teachers", "s")})


def test_workers_of_another_master_go_on(store: Store) -> None:
    """A master that leads again goes on from what was written meanwhile, and one that takes over from the last."""
    counts: list[int | None] = [4]

    def decide() -> WorkerAdvice | None:
        return None if counts[0] is None else WorkerAdvice("job", 2, WorkerDecision(counts[0], "enough"))

    def found() -> dict[str, Any]:
        return read_wanted(store, "workers", "job") or {"count": None}

    with ScalingAdvisor(store, PATIENT, workers=decide) as first:
        wait_until(lambda: bool(first.wanted()))  # the store has it a moment before
        assert found()["count"] == 4
        counts[0] = None
        wait_until(lambda: not first.wanted())
        with ScalingAdvisor(store, PATIENT, workers=lambda: WorkerAdvice("job", 2, WorkerDecision(6, "more"))):
            wait_until(lambda: found()["count"] == 6)
        assert [part["count"] for part in found()["decisions"]] == [4, 6]
        counts[0] = 5
        wait_until(lambda: found()["count"] == 5)
        assert [(part["from"], part["count"]) for part in found()["decisions"]] == [(2, 4), (4, 6), (6, 5)]


def test_outage_is_logged_once_and_passes(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    publish(store, demand=100.0, teachers=2)
    away = True

    def read(store: Store) -> Any:
        if away:
            raise DiscoveryError("the store is away")
        return read_services(store)

    read_services = module.read_services
    monkeypatch.setattr(module, "read_services", read)
    with caplog.at_level(logging.INFO, "edl.master"), ScalingAdvisor(store, QUICK) as advisor:
        wait_until(lambda: advisor._backoff.failures > 2)
        assert wanted(store)["count"] is None
        away = False
        wait_until(lambda: wanted(store)["count"] == 2)
        wait_until(lambda: "read again" in caplog.text)
    assert caplog.text.count("cannot be read") == 1
