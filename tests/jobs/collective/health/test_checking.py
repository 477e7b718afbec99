"""The node check as a step of `edl run`: who waits is tested together, and a faulty node does not join."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from edl.collective.agent.health.node_check import gate
from edl.collective.agent.health.node_check.pairing import NodeCheckResult
from edl.collective.agent.health.node_check.runner import NodeCheckSettings
from edl.discovery import open_store


def test_waiting_nodes_are_checked_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes that wait together are checked together."""
    asked: list[tuple[str, str, tuple[str, ...]]] = []

    def check(
        store: object, prefix: str, node: str, host: str, nodes: list[str], settings: NodeCheckSettings
    ) -> NodeCheckResult:
        asked.append((prefix, node, tuple(nodes)))
        return NodeCheckResult({}, {})

    monkeypatch.setattr(gate, "check_nodes", check)
    url = f"sqlite:///{tmp_path}/store.sqlite"

    together = threading.Barrier(3)

    def take_part(node: str, quiet_s: float, wait: Callable[[], object]) -> None:
        with open_store(url) as store:
            wait()
            gate.check_before_joining(store, "job", node, "127.0.0.1", quiet_s, NodeCheckSettings())

    nodes = [threading.Thread(target=take_part, args=(name, 2.0, lambda: together.wait(30))) for name in "abc"]
    for node in nodes:
        node.start()
    for node in nodes:
        node.join(30)
    assert sorted(asked) == [("jobs/job/check/runs/0", name, ("a", "b", "c")) for name in "abc"]
    take_part("late", 0.1, lambda: None)
    assert asked[-1] == ("jobs/job/check/runs/1", "late", ("late",))
