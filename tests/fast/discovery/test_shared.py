"""What backends share: renewed leases and registrations, and what a watcher believes."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from edl.discovery import Instance, Snapshot
from edl.discovery import registry as registering
from edl.discovery import store as storing
from edl.discovery.records import Rejected
from edl.discovery.registry import InstanceClaim, Registration, ServiceView
from edl.discovery.sqlite import SqliteStore
from edl.discovery.store import Claim, Entry, Lease
from edl.errors import DiscoveryError
from tests.waiting import DEADLINE_S, wait_until

TEACHER = Instance("digits", "a", "h", 1)


class FakeClaim(Claim, InstanceClaim):
    """A claim without a backend: `answer` decides what a renewal says."""

    def __init__(self) -> None:
        super().__init__()
        self.answer: Callable[[], bool] = lambda: True
        self.announced: list[Instance] = []
        self.renewals = 0
        self.withdrawn = 0

    def renew(self) -> bool:
        self.renewals += 1
        return self.answer()

    def announce(self, instance: Instance) -> None:
        self.answer()
        self.announced.append(instance)

    def withdraw(self) -> None:
        self.withdrawn += 1


def fail() -> bool:
    raise DiscoveryError("away")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time; steps are made by the test, in place of a thread."""
    now = [1000.0]

    class Steps:
        def __init__(self, name: str, step: Callable[[], float | None]) -> None:
            self.step = step

        def wake(self) -> None:
            self.step()

        def close(self) -> None:
            pass

    for module in (storing, registering):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
        monkeypatch.setattr(module, "BackgroundLoop", Steps)
    return now


def test_lease_lives_from_renewal_to_renewal(clock: list[float]) -> None:
    claim = FakeClaim()
    claim.granted -= 1.0
    with Lease(claim, 8.0) as lease:
        assert lease._step() == 2.0
        assert claim.renewals == 0, "it has just been granted"
        clock[0] += 6.5
        assert lease._step() == 2.0
        assert claim.renewals == 1
        clock[0] += 7.9
        claim.answer = fail
        assert lease._step() == 0.5, "tried again soon"
        assert not lease.lost
        clock[0] += 0.1
        assert lease.lost, "it was not renewed in time, although the store said nothing"
        claim.answer = lambda: True
        assert lease._step() is None
        clock[0] = 0.0
        assert lease.lost, "it never comes back"
    assert claim.withdrawn == 1


def test_late_renewal_does_not_save_a_lease(clock: list[float]) -> None:
    claim = FakeClaim()

    def answer_late() -> bool:
        clock[0] += 9.0
        return True

    claim.answer = answer_late
    with Lease(claim, 8.0) as lease:
        lease._step()
        assert lease.late_at < 0
        clock[0] += 2.0
        lease._step()
        assert lease.lost
        assert lease.late_at == clock[0]


def test_lapsed_registration_is_announced_again(clock: list[float], caplog: pytest.LogCaptureFixture) -> None:
    """Errors are told and logged once; what could not be told at first is told as soon as possible."""
    caplog.set_level(logging.INFO, "edl.discovery")
    claim = FakeClaim()
    with Registration(claim, TEACHER, 8.0) as registration:
        assert registration._step() == 2.0
        assert claim.renewals == 0, "it has just been announced"
        clock[0] += 2.0
        answers = deque([False, True])
        claim.answer = lambda: answers.popleft() if answers else True
        assert registration._step() == 2.0
        assert claim.announced == [TEACHER, TEACHER]
        claim.answer = fail
        clock[0] += 2.0
        for _ in range(2):
            assert registration._step() == 0.5
        assert registration.error == "away"
        draining = Instance("digits", "a", "h", 1, state="draining")
        with pytest.raises(DiscoveryError):
            registration.update(draining)
        claim.answer = lambda: True
        assert registration._step() == 2.0
        assert registration.error == ""
        assert claim.announced[-1] == draining
        clock[0] += 8.0
        assert "its lease of 8 s has expired" in registration.error, "a renewal hangs"
    assert claim.withdrawn == 1
    first, last = (record.getMessage() for record in caplog.records)
    assert "digits/a cannot be kept registered: away" in first
    assert last == "digits/a is registered again"


def test_updates_do_not_put_renewals_off(clock: list[float]) -> None:
    claim = FakeClaim()
    with Registration(claim, TEACHER, 8.0) as registration:
        for _ in range(5):
            clock[0] += 0.5
            registration.update(TEACHER)
        assert claim.renewals == 1


class _Doubtful(SqliteStore):
    """Its first compare-and-set happens, and is reported as a failure: the answer got lost."""

    failures = 1

    def compare_and_set(self, key: str, value: bytes, version: int | None, lease: Lease | None = None) -> Entry | None:
        entry = super().compare_and_set(key, value, version, lease)
        if self.failures:
            self.failures -= 1
            raise DiscoveryError("no answer")
        return entry


def test_unsure_candidate_stands_again(path: Path) -> None:
    with _Doubtful(str(path)) as store, store.elect("x", b"me", 600.0) as election:
        assert election.wait(DEADLINE_S), "the key that nobody knows to hold must not stay"
        assert store.failures == 0


class _Forgetful(SqliteStore):
    """Finds no key while it is `blind`, as a server may that has just started."""

    blind = False

    def get(self, key: str) -> Entry | None:
        return None if self.blind else super().get(key)


def test_leader_survives_an_older_state(path: Path) -> None:
    with _Forgetful(str(path)) as store, store.elect("x", b"me", 600.0) as election:
        assert election.wait(DEADLINE_S)
        store.blind = True
        wait_until(lambda: not election.is_leader)
        store.blind = False
        assert election.wait(DEADLINE_S), "the key is still this candidate's"


def teachers(*names: str) -> tuple[Instance, ...]:
    return tuple(Instance("digits", name, "127.0.0.1", 9000) for name in names)


def answer(*names: str) -> Snapshot:
    return Snapshot("digits", teachers(*names))


def test_emptied_registry_gets_time_to_fill() -> None:
    view = ServiceView("digits", settle_s=3.0)
    view.answered(answer("a", "b"), 1.0)
    view.failed("down")
    returned = view.answered(answer(), 10.0)
    assert returned.instances == teachers("a", "b")
    assert "2 instances" in returned.stale
    assert view.recheck_at == 13.0
    assert view.answered(answer("b", "c"), 12.0).instances == teachers("a", "b", "c")
    assert view.failed("down again").instances == teachers("a", "b", "c")
    assert view.answered(answer("b", "c"), 14.0).instances == teachers("a", "b", "c")
    assert view.recheck_at == 17.0
    assert view.answered(answer("b", "c"), 16.9).instances == teachers("a", "b", "c")
    assert view.answered(answer("b", "c"), 17.0) == answer("b", "c")
    assert view.recheck_at is None


def test_return_with_nonsense_is_not_kept() -> None:
    view = ServiceView("digits")
    view.answered(answer("a"), 1.0)
    view.failed("down")
    nonsense = Snapshot("digits", (), (Rejected("a", "port is missing"),))
    assert view.answered(nonsense, 2.0) == nonsense


def test_one_that_lapsed_is_listed_once() -> None:
    view = ServiceView("digits", settle_s=3.0)
    view.answered(answer("a", "b"), 1.0)
    lapsed = Snapshot("digits", teachers("b"), lapsed=teachers("a"))
    assert view.answered(lapsed, 2.0) == lapsed
    assert view.failed("down") == Snapshot("digits", teachers("b"), stale="down", lapsed=teachers("a"))
    back = view.answered(Snapshot("digits", (), lapsed=teachers("a", "b")), 3.0)
    assert (back.instances, back.lapsed) == (teachers("b"), teachers("a")), "b gets time to renew"
    assert view.answered(Snapshot("digits", (), lapsed=teachers("a", "b")), 6.0).lapsed == teachers("a", "b")
