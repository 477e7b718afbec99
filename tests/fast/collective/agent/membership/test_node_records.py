"""A node's records in a real store: written until they are, and what others may believe after the store was away."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from edl.collective.agent.membership.node_records import Membership
from edl.collective.job_records import JobState, Member, Node, World
from edl.discovery import open_store
from edl.discovery.common.renewal import RenewedLease
from edl.discovery.store import Store
from edl.errors import DiscoveryError

TTL_S = 3.0  # half of it is longer than a busy machine stalls, else a lease is late again and again
TIMEOUT_S = 1.0  # longer than a busy disk takes for the other store's transaction


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[tuple[Store, Store]]:
    url = f"sqlite:///{tmp_path}/store.sqlite"
    with open_store(url, timeout_s=TIMEOUT_S) as first, open_store(url, timeout_s=TIMEOUT_S) as second:
        yield first, second


@contextmanager
def membership(store: Store, name: str) -> Iterator[Membership]:
    one = Membership(store, "job", Node(name, "host", 1, 1), TTL_S, lambda: None)
    try:
        yield one
    finally:
        one.close()


@contextmanager
def locked(path: Path) -> Iterator[None]:
    connection = sqlite3.connect(path / "store.sqlite", timeout=20)
    connection.execute("BEGIN EXCLUSIVE")
    try:
        yield
    finally:
        connection.rollback()
        connection.close()


def wait_for(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def wait_for_both(first: Membership, second: Membership) -> None:
    """Until the first sees both nodes: where the machine stood still a lease may be over, and the node gets another."""
    wait_for(lambda: bool(second.read_records()) and set(first.read_records().nodes) == {"a", "b"})


def test_untaken_change_is_written_later(stores: tuple[Store, Store], tmp_path: Path) -> None:
    """A change that the store did not take is written by the next read."""
    with membership(stores[0], "a") as one, membership(stores[1], "b") as other:
        one.join()
        with locked(tmp_path), pytest.raises(DiscoveryError):
            one.update_node(finished=3)
        one.read_records()
        assert other.read_records().nodes["a"].finished == 3


def test_first_node_back_waits_for_others(stores: tuple[Store, Store], tmp_path: Path) -> None:
    """The first node that is back gives the others time."""
    with membership(stores[0], "a") as one, membership(stores[1], "b") as other:
        one.join()
        other.join()
        members = tuple(Member(name, "host", 1, 1, rank) for rank, name in enumerate("ab"))
        assert one.propose_world(World(0, JobState.RUNNING, members), None)
        wait_for_both(one, other)
        with locked(tmp_path):
            wait_for(lambda: one.without_lease_s > TTL_S)
            with pytest.raises(DiscoveryError):
                one.read_records()
        wait_for(lambda: stores[0].get("jobs/job/nodes/b") is None)
        records = one.read_records()
        assert (set(records.nodes), records.late) == ({"a", "b"}, {"b"}), "b has not had the time to come back"
        assert one.without_lease_s == pytest.approx(0.0, abs=TTL_S)
        wait_for(lambda: set(one.read_records().nodes) == {"a"})
        assert one.read_records().late == frozenset()
        wait_for_both(one, other)


def test_read_only_store_loses_nobody(stores: tuple[Store, Store], tmp_path: Path) -> None:
    """A store that is only read loses nobody."""
    other = stores[1].lease(TTL_S)
    stores[1].put("jobs/job/nodes/b", Node("b", "host", 1, 1).encode(), other)
    time.sleep(TTL_S / 8)  # so that its lease ends before the other one's
    with contextlib.closing(Membership(stores[0], "job", Node("a", "host", 1, 1), TTL_S, lambda: None)) as first:
        first.join()
        members = tuple(Member(name, "host", 1, 1, rank) for rank, name in enumerate("ab"))
        assert first.propose_world(World(0, JobState.RUNNING, members), None)
        assert set(first.read_records().nodes) == {"a", "b"}
        with locked(tmp_path):
            wait_for(lambda: stores[0].get("jobs/job/nodes/b") is None)
            try:
                assert set(first.read_records().nodes) == {"a", "b"}, "nobody can renew while the file is locked"
            except DiscoveryError:
                pass  # the machine stood still, and both are over
        assert set(first.read_records().nodes) == {"a", "b"}, "its own lease lives, and the other has not had the time"
        wait_for(lambda: set(first.read_records().nodes) == {"a"})
    other.close()


def test_time_without_lease_counts_from_end(stores: tuple[Store, Store], tmp_path: Path) -> None:
    """The time without a lease is counted from its end."""
    with membership(stores[0], "a") as one:
        assert one.without_lease_s == 0.0, "it has not joined"
        one.join()
        joined = time.monotonic()
        wait_for(lambda: time.monotonic() > joined + 1.2 * TTL_S)
        read = time.monotonic()
        one.read_records()
        with locked(tmp_path):
            # Nobody asks while the lease ends, as when the agent itself waits for the store.
            wait_for(lambda: time.monotonic() > read + 1.2 * TTL_S)
            assert one.without_lease_s <= time.monotonic() - read


def test_lease_lived_when_it_was_asked(stores: tuple[Store, Store], monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is stopped behind the look at its lease does not count as having had it until it goes on."""
    stop_s = 0.5
    with membership(stores[0], "a") as one:
        one.join()
        with monkeypatch.context() as stopped:
            stopped.setattr(RenewedLease, "lost", property(lambda _: bool(time.sleep(stop_s))))
            assert one.without_lease_s >= stop_s


def test_a_record_goes_with_its_node(stores: tuple[Store, Store]) -> None:
    with membership(stores[1], "b") as other:
        with membership(stores[0], "a") as one:
            one.join()
            assert set(other.read_records().nodes) == {"a"}
        assert other.read_records().nodes == {}


def test_removed_record_is_written_again(stores: tuple[Store, Store]) -> None:
    """A record that was taken away by mistake is written again."""
    with membership(stores[0], "a") as one, membership(stores[1], "b") as other:
        one.join()
        other.join()
        other.delete_node("a")
        assert set(other.read_records().nodes) == {"b"}
        assert "a" in one.read_records().nodes
        wait_for_both(other, one)
