"""Elections: at most one leads, and somebody always does in the end."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

import pytest

from edl.discovery import Store
from edl.errors import ClosedError
from tests.fast.discovery.conformance.backends import eventually
from tests.fast.discovery.conformance.processes import Member

Start = Callable[..., Member]

pytestmark = pytest.mark.stores


def test_single_leader_hands_over_on_resign(store: Store, service: str) -> None:
    """Exactly one leads and the next follows when it steps down."""
    candidates = {str(number).encode(): store.elect(service, str(number).encode()) for number in range(3)}
    for left in (3, 2, 1):
        assert eventually(lambda: any(candidate.is_leader for candidate in candidates.values()))
        leaders = [value for value, candidate in candidates.items() if candidate.is_leader]
        assert len(leaders) == 1, f"{left} candidates"
        leader = candidates.pop(leaders[0])
        assert leader.leader() == leaders[0]
        assert leader.wait(0)
        leader.close()
        assert not leader.is_leader
        assert not candidates or next(iter(candidates.values())).wait(0) in (True, False)
    with store.elect(service, b"last") as last:
        assert last.wait(20)


def test_campaign_ends_with_its_deadline(store: Store, service: str) -> None:
    with store.elect(service, b"1") as first:
        assert first.wait(20)
        with store.elect(service, b"2") as second:
            begun = time.monotonic()
            assert not second.wait(0.3)
            assert time.monotonic() - begun < 30
            assert second.leader() == b"1"
            closing = threading.Timer(0.2, second.close)
            closing.start()
            with contextlib.suppress(ClosedError):  # it may be closed before it waits
                assert not second.wait()
            closing.join()


def test_a_store_is_closed_under_an_election(store: Store, service: str) -> None:
    with store.elect(service, b"1") as election:
        assert election.wait(20)
        threads = [threading.Thread(target=closing) for closing in (election.close, store.close)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def test_deleting_the_key_deposes_the_leader(store: Store, service: str) -> None:
    """Somebody who deletes the key deposes the leader."""
    with store.elect(service, b"1") as election:
        assert election.wait(20)
        key = f"elections/{service}"
        entry = store.get(key)
        assert entry is not None
        assert store.delete(key)
        assert eventually(lambda: (store.get(key) or entry).version > entry.version)
        assert eventually(lambda: election.is_leader)


def test_killed_leader_is_followed(store: Store, service: str, member: Start) -> None:
    """One of two processes wins and the other follows a kill."""
    candidates = [member("elect", service, str(number), "0.6") for number in range(2)]
    assert [candidate.hear() for candidate in candidates] == ["ready"] * 2
    key = f"elections/{service}"

    def leaders() -> list[int]:
        """Candidates that say that they lead while the key stays the same: on a slow machine it changes hands."""
        before = store.get(key)
        found = [number for number, candidate in enumerate(candidates) if candidate.ask("?") == "leader"]
        return found if before == store.get(key) is not None else []

    first = eventually(leaders)
    assert len(first) == 1
    candidates[first[0]].kill()
    assert eventually(lambda: candidates[1 - first[0]].ask("?") == "leader")


def test_paused_leader_campaigns_again(store: Store, service: str, member: Start) -> None:
    """A leader paused past its lease is deposed and campaigns again."""
    process = member("elect", service, "paused", "2.0")
    assert process.hear() == "ready"
    assert eventually(lambda: process.ask("?") == "leader")
    with store.elect(service, b"mine") as election:
        assert not election.wait(0.1)
        process.pause()
        assert election.wait(20)
        process.resume()
        assert process.ask("?") == "follower", "it must not believe for a moment that it still leads"
        assert election.is_leader
    assert eventually(lambda: process.ask("?") == "leader")
