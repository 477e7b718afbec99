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


class Watching:
    """An observer of a job whose clock is the test's."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.notes: list[str] = []
        self._observer = PhaseObserver(Target("job", "a", job("Pending")), self.notes.append, lambda: self.now_s)

    def check(self, found: dict[str, Any], now_s: float = 0.0) -> str:
        self.now_s = now_s
        return self._observer.check(found)


@pytest.mark.parametrize("reason", ["ObjectRefused", "AccessDenied", "QuotaExceeded", "MinAboveMax"])
def test_job_that_runs_has_not_ended(reason: str) -> None:
    seen = Watching()
    assert seen.check(job("Running", 3, reason)) == "Running"
    assert seen.check(job("Pending", 1, reason)) == "Pending", "a worker of two waits for the other"
    assert sum("no such account" in words for words in seen.notes) == 1, "why it does not grow is told, once"
    assert seen.check(job("Succeeded", 0, reason)) == "Succeeded"


def test_refused_spec_ends() -> None:
    assert Watching().check(job("Pending", 0, "MinAboveMax")) in FINAL_PHASES
    assert Watching().check(job("", 0, "MinAboveMax")) == "Rejected"


def test_refused_pod_ends_after_a_while() -> None:
    """The operator tries again, so a moment's refusal ends nothing; one that stays must not be waited for."""
    seen = Watching()
    for now_s, reason in ((0.0, "ObjectRefused"), (100.0, "ObjectRefused"), (100.0, ""), (200.0, "ObjectRefused")):
        assert seen.check(job("Pending", 0, reason), now_s) == "Pending"
    assert seen.check(job("Pending", 0, "ObjectRefused"), 321.0) == "Rejected"
    assert "no such account" in seen.notes[-1]


def test_what_is_waited_for() -> None:
    seen = Watching()
    for now_s in (0.0, 1e6):
        assert seen.check(job("Pending", 0, "QuotaExceeded"), now_s) == "Pending", "quota comes when others end"
    seen, new = Watching(), {"metadata": job("")["metadata"], "spec": {}}
    for now_s in (0.0, 10.0, 20.0, 30.0):
        assert seen.check(new, now_s) == ""
    assert ["no operator has taken it up" in words for words in seen.notes] == [True]
