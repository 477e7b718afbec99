"""Nodes that wait together are checked together, and one that comes later is checked alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from edl.collective.agent.health.node_check import gate
from edl.collective.agent.health.node_check.pairing import NodeCheckResult
from edl.collective.agent.health.node_check.runner import NodeCheckSettings
from edl.discovery import open_store


def test_waiting_nodes_are_checked_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str, tuple[str, ...]]] = []

    def check(
        store: object, prefix: str, node: str, host: str, nodes: list[str], settings: NodeCheckSettings
    ) -> NodeCheckResult:
        asked.append((prefix, node, tuple(nodes)))
        return NodeCheckResult({}, {})

    monkeypatch.setattr(gate, "check_nodes", check)
    with open_store(f"sqlite:///{tmp_path}/store.sqlite") as store:
        for name in "bc":  # wait already when the first one looks
            store.put(f"jobs/job/check/waiting/{name}", b"")
        for name in ("a", "b", "c", "late"):
            gate.check_before_joining(store, "job", name, "127.0.0.1", 0.0, NodeCheckSettings())
    assert asked[:3] == [("jobs/job/check/runs/0", name, ("a", "b", "c")) for name in "abc"]
    assert asked[3] == ("jobs/job/check/runs/1", "late", ("late",))
