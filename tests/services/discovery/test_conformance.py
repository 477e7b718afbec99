"""The conformance suite over Consul and etcd, and what only servers show: they restart, hang, and have a clock."""

from __future__ import annotations

import psutil
import pytest

from edl.background import start_call
from edl.discovery import Registry, Store, open_registry, open_store
from edl.discovery.registry import ServiceView
from edl.discovery.store import Lease
from edl.errors import ClosedError, DiscoveryError
from tests.fast.discovery.conformance.backends import ConsulBackend, EtcdBackend, teacher
from tests.fast.discovery.conformance.suite import LONG_S, RegistrySuite, StoreSuite, seen, seen_values
from tests.fast.test_proxies import dead_proxy
from tests.waiting import DEADLINE_S, wait_until

__all__ = ["dead_proxy"]


class TestRegistry(RegistrySuite):
    pass


class TestStore(StoreSuite):
    @pytest.mark.parametrize("ttl_s", [8.0])
    def test_renewed_lease_outlives_its_length(self, store: Store, folder: str, ttl_s: float) -> None:
        """A second lease, which nobody renews, says when the length of both is over."""
        with store.lease(ttl_s) as renewed, store.lease(ttl_s) as left:
            assert isinstance(left, Lease)
            entry = store.put(f"{folder}renewed", b"1", renewed)
            store.put(f"{folder}left", b"1", left)
            for part in left._parts:
                part.close()
            wait_until(lambda: store.get(f"{folder}left") is None)
            assert not renewed.lost
            assert store.get(entry.key) == entry


def test_all_survives_a_kill_and_a_restart(
    backend: ConsulBackend | EtcdBackend,
    registry: Registry,
    store: Store,
    service: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a server that keeps its data; Consul wants to hear of a registration again."""
    monkeypatch.setattr(ServiceView.__init__, "__defaults__", (DEADLINE_S,))
    with (
        registry.register(teacher(service), 8.0) as registration,
        registry.watch(service) as watch,
        store.watch(f"{service}/") as entries,
        store.lease(LONG_S) as lease,
        store.elect(service, b"me", LONG_S) as election,
    ):
        entry = store.put(f"{service}/a", b"1", lease)
        seen_values(entries, {entry.key: b"1"})
        assert election.wait(DEADLINE_S)
        healthy = seen(watch, "a")
        backend.server.kill()
        history = [watch.get(DEADLINE_S) or pytest.fail("the watch does not notice")]
        backend.server.start()
        while history[-1].stale:
            history.append(watch.get(DEADLINE_S) or pytest.fail("the watch does not recover"))
        assert [snapshot.instances for snapshot in history] == [healthy.instances] * len(history)
        assert history[-1] == healthy
        assert store.get(entry.key) == entry
        later = store.compare_and_set(entry.key, b"2", entry.version, lease) or pytest.fail("not set")
        assert later.version > entry.version
        seen_values(entries, {entry.key: b"2"})
        assert (lease.lost, election.is_leader) == (False, True)
        wait_until(lambda: not registration.error)


def test_hanging_server_is_an_error_in_time(
    backend: ConsulBackend | EtcdBackend, registry: Registry, service: str
) -> None:
    """Closing waits for nothing, and ends a call."""
    registration = registry.register(teacher(service), LONG_S)
    hasty, store = open_registry(backend.url, timeout_s=0.5), open_store(backend.url, timeout_s=0.5)
    watch, patient = hasty.watch(service), open_store(backend.url, timeout_s=LONG_S)
    assert watch.get(DEADLINE_S) is not None
    server = psutil.Process(backend.server.pid)
    server.suspend()
    wait_until(lambda: server.status() == psutil.STATUS_STOPPED, "its threads have stopped")
    try:
        asking = start_call("edl-test", lambda: patient.get("a"))
        for call in (lambda: hasty.snapshot(service), lambda: store.put("a", b""), store.lease):
            with pytest.raises(DiscoveryError, match="timed out"):
                call()
        for thing in (watch, hasty, store, patient):
            thing.close()
        with pytest.raises(ClosedError):
            asking.result(DEADLINE_S)
    finally:
        server.resume()
    registration.close()


def test_no_proxy_is_asked(dead_proxy: str, registry: Registry, service: str) -> None:
    with registry.register(teacher(service), LONG_S):
        wait_until(lambda: service in registry.services())
