"""When a command that waits for a job takes it as ended."""

from __future__ import annotations

from typing import Any

import pytest

from edl.cli.kube.phases import FINAL_PHASES, PhaseObserver
from edl.cli.kube.targets import Target


def job(phase: str, ready: int = 0, reason: str = "") -> dict[str, Any]:
    accepted = {"type": "Accepted", "status": "False", "reason": reason, "message": "no such account"}
    conditions = [accepted] if reason else [{"type": "Accepted", "status": "True"}]
    status = {"phase": phase, "readyReplicas": ready, "conditions": conditions}
    return {"metadata": {"name": "a", "namespace": "n", "uid": "u"}, "spec": {}, "status": status}


def observer(notes: list[str]) -> PhaseObserver:
    return PhaseObserver(Target("job", "a", job("Pending")), notes.append)


@pytest.mark.parametrize("reason", ["ObjectRefused", "AccessDenied", "QuotaExceeded", "MinAboveMax"])
def test_job_that_runs_has_not_ended(reason: str) -> None:
    notes: list[str] = []
    seen = observer(notes)
    assert seen.check(job("Running", 3, reason)) == "Running"
    assert seen.check(job("Pending", 1, reason)) == "Pending", "a worker of two waits for the other"
    assert sum("no such account" in words for words in notes) == 1, "why it does not grow is told, once"
    assert seen.check(job("Succeeded", 0, reason)) == "Succeeded"


def test_refused_spec_ends() -> None:
    assert observer([]).check(job("Pending", 0, "MinAboveMax")) in FINAL_PHASES
    assert observer([]).check(job("", 0, "MinAboveMax")) == "Rejected"


def test_former_spec_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slip in an edit ends no job, though its only worker is replaced just then and gets no node for long."""
    now = [0.0]
    monkeypatch.setattr("edl.cli.kube.phases.time.monotonic", lambda: now[0])
    found = job("Pending", 0, "MinAboveMax")
    found["status"]["formerSpec"] = True
    notes: list[str] = []
    seen = observer(notes)
    for now[0] in (0.0, 130.0, 1e6):
        assert seen.check(found) == "Pending"
    assert sum("MinAboveMax" in words for words in notes) == 1


def test_refused_pod_ends_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator tries again, so a moment's refusal ends nothing; one that stays must not be waited for."""
    now = [0.0]
    monkeypatch.setattr("edl.cli.kube.phases.time.monotonic", lambda: now[0])
    notes: list[str] = []
    seen = observer(notes)
    assert seen.check(job("Pending", 0, "ObjectRefused")) == "Pending"
    now[0] = 100.0
    assert seen.check(job("Pending", 0, "ObjectRefused")) == "Pending"
    assert seen.check(job("Pending")) == "Pending"
    now[0] = 200.0
    assert seen.check(job("Pending", 0, "ObjectRefused")) == "Pending"
    now[0] = 321.0
    assert seen.check(job("Pending", 0, "ObjectRefused")) == "Rejected"
    assert "no such account" in notes[-1]


def test_quota_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("edl.cli.kube.phases.time.monotonic", lambda: now[0])
    seen = observer([])
    for now[0] in (0.0, 1e6):
        assert seen.check(job("Pending", 0, "QuotaExceeded")) == "Pending"
