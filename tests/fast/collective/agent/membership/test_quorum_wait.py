"""What is said while nodes are missing, and how often."""

from __future__ import annotations

from edl.collective.agent.membership.quorum_wait import QuorumWait


def test_shortage_is_reported_on_change() -> None:
    """It is said at once and again when the number changes."""
    wait = QuorumWait(3, 600.0)
    words = wait.record_nodes(1, 100.0)
    assert words == "1 of at least 3 nodes are here: waiting up to 600 s for more (--rdzv-conf join_timeout=SECONDS)"
    assert wait.record_nodes(1, 130.0) == ""
    assert wait.record_nodes(2, 140.0).startswith("2 of at least 3 nodes are here: waiting up to 560 s")
    assert wait.record_nodes(1, 141.0).startswith("1 of at least 3 nodes are here")


def test_time_left_is_reported_each_minute() -> None:
    """Every minute it is said how long is left."""
    wait = QuorumWait(2, 600.0)
    said = [words for second in range(190) if (words := wait.record_nodes(1, float(second)))]
    assert said[1:] == [f"still 1 of at least 2 nodes: waiting {left} s more" for left in (540, 480, 420)]


def test_beginning_nodes_are_no_wait() -> None:
    """Enough nodes that are about to begin are no wait."""
    wait = QuorumWait(2, 600.0)
    assert wait.record_nodes(2, 0.0) == ""
    assert wait.record_nodes(1, 1.0), "one has gone again"
    assert wait.record_nodes(2, 2.0) == ""
    assert "up to 600 s" in wait.record_nodes(1, 3.0)
    assert wait.waited_s(4.0) == 1.0, "another wait"


def test_timely_nodes_wait_for_the_last() -> None:
    """Nodes that came in time are not given up while they wait for the last ones."""
    wait = QuorumWait(2, 600.0)
    wait.record_nodes(1, 0.0)
    wait.record_nodes(2, 599.0)
    wait.record_nodes(2, 604.0)
    assert wait.waited_s(604.0) == 0.0


def test_each_wait_has_its_own_time() -> None:
    wait = QuorumWait(2, 600.0)
    wait.record_nodes(1, 0.0)
    wait.end_wait()
    assert wait.waited_s(5000.0) == 0.0
    assert "up to 600 s" in wait.record_nodes(1, 5000.0)
