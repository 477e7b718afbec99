"""The parts of discovery that own threads: slots, background threads, kept leases and registrations."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from edl.discovery import Instance
from edl.discovery.common.latest_value import LatestValue
from edl.discovery.common.renewal import Claim, InstanceClaim, RenewedLease, RenewedRegistration
from edl.discovery.common.resource import Resource
from edl.discovery.sqlite.store import SqliteStore
from edl.discovery.store import Entry, Lease
from edl.errors import ClosedError, DiscoveryError


def eventually(condition: Callable[[], object], timeout_s: float = 30.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    return bool(condition())


def test_slot_hands_out_the_newest_once() -> None:
    slot: LatestValue[int] = LatestValue()
    assert slot.take(0.01) is None
    slot.put(1)
    slot.put(2)
    assert slot.take(0) == 2
    assert slot.take(0.01) is None
    slot.put(3)
    slot.put(2)
    assert slot.take(0.01) is None, "a change and its reversal between two looks are no news"
    slot.put(3)
    slot.close()
    assert slot.take(1) is None


def test_closing_a_slot_wakes_whoever_waits() -> None:
    slot: LatestValue[int] = LatestValue()
    threading.Timer(0.05, slot.close).start()
    assert slot.take() is None


def test_parts_close_in_reverse_order() -> None:
    """Parts are closed with their owner, the last first."""
    closed: list[str] = []

    class Part(Resource):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        def _release(self) -> None:
            closed.append(self.name)

    owner = Resource()
    parts = [owner._own(Part(name)) for name in "abc"]
    parts[1].close()
    owner.close()
    owner.close()
    assert closed == ["b", "c", "a"]
    with pytest.raises(ClosedError):
        owner._own(Part("late"))
    assert closed[-1] == "late"


class FakeClaim(InstanceClaim):
    """A claim without a registry: `answer` decides what a renewal says."""

    def __init__(self) -> None:
        self.answer: Callable[[], bool] = lambda: True
        self.announced: list[Instance] = []
        self.withdrawn = 0

    def renew(self) -> bool:
        return self.answer()

    def announce(self, instance: Instance) -> None:
        self.answer()
        self.announced.append(instance)

    def withdraw(self) -> None:
        self.withdrawn += 1


def fail() -> bool:
    raise DiscoveryError("away")


def kept_lease(claim: Claim, ttl_s: float, granted: float | None = None) -> RenewedLease:
    return RenewedLease(claim, ttl_s, time.monotonic() if granted is None else granted)


def test_unrenewed_lease_is_lost() -> None:
    """A lease that cannot be renewed in time is lost, although the store said nothing."""
    claim = FakeClaim()
    with kept_lease(claim, 2.0) as lease:
        assert not lease.lost
        claim.answer = fail
        assert eventually(lambda: lease.lost)
        claim.answer = lambda: True
        time.sleep(0.5)
        assert lease.lost, "it never comes back"
    assert claim.withdrawn == 1


def test_lease_gone_at_the_store_is_lost() -> None:
    """A lease that the store calls gone is lost at once."""
    claim = FakeClaim()
    claim.answer = lambda: False
    with kept_lease(claim, 8.0) as lease:
        assert eventually(lambda: lease.lost, 6.0), "by the first renewal"


class RecordingClaim(FakeClaim):
    """Records when it was renewed."""

    def __init__(self) -> None:
        super().__init__()
        self.renewed: list[float] = []

    def renew(self) -> bool:
        self.renewed.append(time.monotonic())
        return True


def test_first_renewal_waits() -> None:
    """What has just been granted or announced is not renewed at once."""
    leased, registered = RecordingClaim(), RecordingClaim()
    begun = time.monotonic()
    with kept_lease(leased, 4.0), RenewedRegistration(registered, Instance("digits", "a", "h", 1), 4.0):
        assert eventually(lambda: leased.renewed and registered.renewed, 30.0)
    assert min(leased.renewed[0], registered.renewed[0]) - begun >= 1.0


def test_lease_counts_from_its_request() -> None:
    """A lease is counted from before it was asked for."""
    with kept_lease(FakeClaim(), 10.0, granted=time.monotonic() - 11.0) as lease:
        assert lease.lost


def test_late_renewal_does_not_save_a_lease() -> None:
    """A renewal that took longer than the lease does not save it."""
    claim = FakeClaim()
    claim.answer = lambda: time.sleep(0.5) or True
    with kept_lease(claim, 0.3) as lease:
        time.sleep(0.35)
        assert lease.lost
        time.sleep(0.4)
        assert lease.lost


def test_lapsed_registration_is_renewed() -> None:
    """A registration that lapsed is announced again, and errors are told."""
    claim = FakeClaim()
    instance = Instance("digits", "a", "h", 1)
    with RenewedRegistration(claim, instance, 0.2) as registration:
        answers = [False, True]
        claim.answer = lambda: answers.pop(0) if answers else True
        assert eventually(lambda: len(claim.announced) == 2)
        claim.answer = fail
        assert eventually(lambda: registration.error == "away")
        draining = Instance("digits", "a", "h", 1, state="draining")
        with pytest.raises(DiscoveryError):
            registration.update(draining)
        claim.answer = lambda: True
        assert eventually(lambda: registration.error == "")
        assert claim.announced[-1] == draining, "what could not be told at first is told as soon as possible"
    assert claim.withdrawn == 1


def test_missing_registry_is_an_error() -> None:
    """A registry that is away at the start is an error."""
    claim = FakeClaim()
    claim.answer = fail
    before = set(threading.enumerate())
    with pytest.raises(DiscoveryError):
        RenewedRegistration(claim, Instance("digits", "a", "h", 1), 1.0)
    assert not [thread for thread in set(threading.enumerate()) - before if thread.name.startswith("edl-")]


class _Doubtful(SqliteStore):
    """Its first compare-and-set happens, and is reported as a failure: the answer got lost."""

    failures = 1

    def compare_and_set(self, key: str, value: bytes, version: int | None, lease: Lease | None = None) -> Entry | None:
        entry = super().compare_and_set(key, value, version, lease)
        if self.failures:
            self.failures -= 1
            raise DiscoveryError("no answer")
        return entry


def test_unsure_candidate_stands_again(tmp_path: Path) -> None:
    """A candidate that does not know whether it was elected stands again."""
    with _Doubtful(str(tmp_path / "discovery.sqlite")) as store, store.elect("x", b"me", 30.0) as election:
        assert election.wait(10), "the key that nobody knows to hold must not stay"
        assert store.failures == 0
