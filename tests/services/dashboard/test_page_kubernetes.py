"""The page's section of a Kubernetes cluster, in a real browser."""

from __future__ import annotations

import pytest

from tests.services.dashboard import states
from tests.services.dashboard.conftest import Look, publish

pytestmark = pytest.mark.chromium
OPEN = "document.querySelectorAll('#kubernetes details').forEach((card) => { card.open = true; })"
TEXT = "document.getElementById('kubernetes').innerText"


def test_cluster_is_shown(look: Look) -> None:
    _, page = look(states.kubernetes())
    page.evaluate(OPEN)
    page.wait(f"{TEXT}.includes({states.NO_GPU!r})")
    text = page.evaluate(TEXT)
    for words in (
        "Namespace research", "3 of 4 workers ready · 62% · 2 workers not ready",
        "2\N{MULTIPLICATION SIGN} out of memory, memory",
        "out of memory, exit code 137 on node2: Killed", "next try in 25 s · node lost", "Insufficient nvidia.com/gpu",
        "~13 min", "1 to 8", "MinAboveMax", states.MIN_ABOVE_MAX, 'File "/edl/script/train.py", line 31',
        states.TRACE_END, "No operator has looked at it yet", "2 of 4 teachers ready", "NoIdleCapacity", "borrowed",
        "external", "3 older jobs",
    ):  # fmt: skip
        assert words in text, words
    assert page.evaluate("document.getElementById('sections').innerText").startswith(
        "6 Kubernetes resources ▲ 2 failed"
    )
    assert not page.evaluate("document.getElementById('empty').checkVisibility()")


def test_cluster_away_and_back(look: Look) -> None:
    state = states.kubernetes()
    server, page = look(state)
    state["kubernetes"]["stale"] = "as known last: https://10.0.0.1:6443: list elasticjobs: no answer"
    publish(server, page, state | {"time": states.NOW + 1}, "update")
    assert "no answer" in page.evaluate(TEXT)
    assert page.evaluate("document.querySelectorAll('#kubernetes details').length") == 6, "what was known stays"
    state["kubernetes"] |= {"stale": "", "jobs": [], "pools": [], "more_jobs": 0}
    publish(server, page, state | {"time": states.NOW + 2}, "update")
    text = page.evaluate(TEXT)
    assert "no answer" not in text
    assert "edl submit" in text


def test_two_namespaces(look: Look) -> None:
    state = states.kubernetes()
    state["kubernetes"]["namespaces"] = ["research", "vision"]
    state["kubernetes"]["jobs"].append(states.workload("first", "Running") | {"namespace": "vision"})
    _, page = look(state)
    page.wait(f"{TEXT}.includes('Namespaces research, vision')")
    assert "vision/first" in page.evaluate(TEXT)


@pytest.mark.parametrize("width", [320, 1280])
def test_hostile_names_are_text(look: Look, width: int) -> None:
    state = states.kubernetes()
    for name in states.HOSTILE:
        bad = states.workload(
            name, name, message=name, members=[states.member(name, name, detail=name, failures={name: 1})]
        )
        bad["conditions"].append({"type": "Failed", "status": "True", "reason": name, "message": name, "since": 1e300})
        state["kubernetes"]["jobs"].append(bad)
    state["kubernetes"]["pools"] += [None, 5, {"members": [None], "conditions": {}}]
    _, page = look(state, width, 800)
    page.evaluate(OPEN)
    page.wait(f"{TEXT}.includes('onerror')")
    assert page.evaluate("document.title") == "0 jobs · EDL"
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
