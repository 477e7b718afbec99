"""The registry or store goes away in the middle, and comes back having forgotten everything."""

from __future__ import annotations

import time

import pytest

from edl.discovery import Snapshot, open_registry, open_store
from edl.discovery.store import StoreSnapshot
from edl.errors import DiscoveryError
from tests.fast.discovery.conformance.backends import Backend, eventually, teacher

PATIENT_S = 10.0  # for calls that must succeed on a busy machine; a backend that is broken refuses at once


def test_registry_recovers_keeping_teachers(backend: Backend, service: str) -> None:
    """Registrations and watches recover, and teachers are kept meanwhile."""
    history: list[Snapshot] = []
    with (
        open_registry(backend.url, timeout_s=PATIENT_S) as theirs,
        open_registry(backend.url, timeout_s=PATIENT_S) as registry,
        theirs.register(teacher(service, "a"), 8.0) as first,
        theirs.register(teacher(service, "b", 9001), 8.0),
        registry.watch(service) as watch,
    ):
        while len(history) == 0 or len(history[-1].instances) < 2:
            history.append(watch.get(20) or pytest.fail("nothing came"))
        healthy = history[-1]
        backend.break_it()
        try:
            history.append(watch.get(20) or pytest.fail("the watcher does not notice"))
            assert history[-1].stale
            assert history[-1].instances == healthy.instances
            with pytest.raises(DiscoveryError):
                registry.snapshot(service)
            with pytest.raises(DiscoveryError):
                registry.services()
            with pytest.raises(DiscoveryError):
                registry.register(teacher(service, "c"))
            with registry.watch(service) as newcomer:
                blind = newcomer.get(20)
                assert blind is not None
                assert blind.stale
                assert blind.instances == ()
            assert eventually(lambda: first.error)
        finally:
            backend.mend_it()
        while history[-1].stale:
            history.append(watch.get(30) or pytest.fail("the watcher does not recover"))
            assert history[-1].instances == healthy.instances, "students would have dropped their teachers"
        assert history[-1] == healthy
        assert eventually(lambda: not first.error)
        assert watch.get(0.5) is None


def test_missing_teacher_is_dropped_at_last(backend: Backend, service: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edl.discovery.common.blocking_watch.WAIT_S", 120.0)  # patience ends without a change
    with open_registry(backend.url) as registry, registry.watch(service) as watch:
        registration = registry.register(teacher(service), 8.0)
        assert eventually(lambda: (watch.get(1) or Snapshot("", ())).instances)
        backend.break_it()
        try:
            stale = watch.get(20)
            assert stale is not None
            assert stale.stale
            registration.close()  # while it cannot be told to anybody: the deadline holds, nothing is raised
        finally:
            backend.mend_it()
        last = stale
        deadline = time.monotonic() + 30
        while last.instances and time.monotonic() < deadline:
            last = watch.get(5) or last
        assert last == Snapshot(service, ())


@pytest.mark.stores
def test_store_recovers_with_new_elections(backend: Backend, service: str) -> None:
    """Leases are lost, elections are held again, and watches recover."""
    with (
        open_store(backend.url, timeout_s=PATIENT_S) as store,
        store.watch(f"{service}/") as watch,
        store.lease(5.0) as lease,
        store.elect(service, b"me", 5.0) as election,
    ):
        entry = store.put(f"{service}/a", b"1", lease)
        wanted = {entry.key: entry}
        assert eventually(lambda: (watch.get(1) or StoreSnapshot({})).entries == wanted)
        assert election.wait(20)
        backend.break_it()
        try:
            stale = watch.get(20)
            assert stale is not None
            assert stale.stale
            assert stale.entries == wanted
            for call in (
                lambda: store.get("a"),
                lambda: store.list("a"),
                lambda: store.put("a", b""),
                lambda: store.compare_and_set("a", b"", None),
                lambda: store.delete("a"),
                store.lease,
                election.leader,
            ):
                with pytest.raises(DiscoveryError):
                    call()
            assert eventually(lambda: lease.lost)
            assert eventually(lambda: not election.is_leader)
        finally:
            backend.mend_it()
        assert election.wait(30)
        assert lease.lost
        store.put(f"{service}/b", b"2")
        assert eventually(lambda: set((watch.get(1) or StoreSnapshot({})).entries) == {f"{service}/b"})
