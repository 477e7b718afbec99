"""How long pods wait for what teachers borrowed, out of the events of a watch."""

from __future__ import annotations

from typing import Any

import pytest

from edl.master.kube.pools import GiveBack, GiveBackTracker
from tests.fast.master.kube.capacity.objects import pod

REFUSED = {"conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}]}


def teacher(**fields: Any) -> dict[str, Any]:
    return pod(1, uid="t", node="n1", labels={"edl.io/pool": "p", "edl.io/owner-uid": "o"}, **fields)


def online(**status: Any) -> dict[str, Any]:
    found = pod(1, uid="o", name="triton")
    found["status"] |= status
    return found


def bound(node: str = "n1", **status: Any) -> dict[str, Any]:
    found = online(**status)
    found["spec"]["nodeName"] = node
    return found


def test_time_from_creation_to_node() -> None:
    tracker = GiveBackTracker()
    assert tracker.record("ADDED", teacher(), 0) is None
    assert tracker.record("ADDED", online(), 10.0) is None
    assert tracker.record("MODIFIED", teacher(deleting=True), 10.1) is None
    assert tracker.record("MODIFIED", online(**REFUSED, nominatedNodeName="n1"), 10.2) is None
    assert tracker.record("DELETED", teacher(deleting=True), 11.0) is None
    assert tracker.record("MODIFIED", bound(), 11.25) == GiveBack("default", "triton", "n1", 1.25)
    assert tracker.record("MODIFIED", bound(), 12) is None, "counted once"


ADDED = ("ADDED", online())
WAITS = ("MODIFIED", online(**REFUSED))
LEAVES = ("MODIFIED", teacher(deleting=True))
GONE = ("DELETED", teacher(deleting=True))
BOUND = ("MODIFIED", bound())


@pytest.mark.parametrize(
    "events",
    [
        [ADDED, LEAVES, BOUND],  # it found room at once
        [LEAVES, GONE, ADDED, WAITS, BOUND],  # no teacher left while it waited
        [ADDED, WAITS, LEAVES, ("MODIFIED", bound("n2"))],
        [WAITS, LEAVES, BOUND],  # it was there before the watch
        [ADDED, WAITS, None, LEAVES, BOUND],  # the watch was interrupted
    ],
)
def test_what_does_not_count(events: list[tuple[str, Any] | None]) -> None:
    tracker = GiveBackTracker()
    for second, event in enumerate(events):
        if event is None:
            tracker.reset()
        else:
            assert tracker.record(*event, float(second)) is None
