"""What every registry does."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from edl.discovery import Instance, Registry, Snapshot, open_registry
from edl.discovery.registry import Watch
from edl.errors import ClosedError, SettingsError
from tests.fast.discovery.conformance.backends import Backend, eventually, teacher
from tests.fast.discovery.conformance.processes import Member

Start = Callable[..., Member]


def ids(snapshot: Snapshot | None) -> list[str]:
    return [] if snapshot is None else [instance.id for instance in snapshot.instances]


def seen(watch: Watch, wanted: list[str], timeout_s: float = 60.0) -> Snapshot:
    """Follow until exactly `wanted` are there."""
    deadline = time.monotonic() + timeout_s
    snapshot = None
    while (left_s := deadline - time.monotonic()) > 0:
        snapshot = watch.get(left_s) or snapshot
        if snapshot is not None and ids(snapshot) == wanted:
            return snapshot
    raise AssertionError(f"expected {wanted}, last seen was {snapshot}")


def test_watch_sees_start_change_and_end(registry: Registry, service: str) -> None:
    """A watcher sees a registration, its change and its end."""
    with registry.watch(service) as watch:
        assert watch.get(10) == Snapshot(service, ())
        with registry.register(teacher(service)) as registration:
            assert watch.get(10) == Snapshot(service, (teacher(service),))
            draining = teacher(service, state="draining")
            registration.update(draining)
            assert registration.instance == draining
            assert watch.get(10) == Snapshot(service, (draining,))
        assert watch.get(10) == Snapshot(service, ())
        assert watch.get(0.3) is None


def test_registration_is_seen_in_a_second(backend: Backend, service: str) -> None:
    """A registration is seen elsewhere well within a second."""
    with open_registry(backend.url) as theirs, open_registry(backend.url) as ours, theirs.watch(service) as watch:
        assert watch.get(10) is not None
        delays = []
        for _ in range(5):
            begun = time.monotonic()
            with ours.register(teacher(service)):
                seen(watch, ["a"])
                delays.append(time.monotonic() - begun)
            seen(watch, [])
        assert sorted(delays)[2] < 1.0, delays


@pytest.mark.parametrize(
    "instance",
    [
        Instance("", "a", "127.0.0.1", 1),
        Instance("", "a", "::1", 65535, capacity=0.25, state="draining", model="digits"),
        Instance("", "unix", "unix:/run/edl/teacher.sock", 0),
        Instance(
            "", "id with / and : and ü", "gpu-7.example", 8001, tags=("a", "b c"), meta={"zone": "eu ü", "x_1": ""}
        ),
        Instance("", "x" * 512, "h", 1, meta={f"k{number}": "v" * 512 for number in range(60)}),
    ],
    ids=["plain", "ipv6", "unix", "unicode", "large"],
)
def test_an_instance_comes_back_as_it_was(registry: Registry, service: str, instance: Instance) -> None:
    instance = replace(instance, service=service)
    with registry.register(instance):
        assert eventually(lambda: registry.snapshot(service).instances) == (instance,)


def test_instances_sorted_services_listed(registry: Registry, service: str) -> None:
    """Several instances are sorted and services are listed."""
    other = f"{service}-other"
    assert registry.snapshot(service) == Snapshot(service, ())
    with (
        registry.register(teacher(service, "b", 2)),
        registry.register(teacher(service, "a", 1)),
        registry.register(teacher(other)),
    ):
        eventually(lambda: len(registry.snapshot(service).instances) == 2)
        assert ids(registry.snapshot(service)) == ["a", "b"]
        assert eventually(lambda: {service, other} <= set(registry.services()))
        assert list(registry.services()) == sorted(registry.services())
    assert eventually(lambda: service not in registry.services())


def test_later_registration_of_an_id_counts(registry: Registry, service: str) -> None:
    """Of two with one id the later counts, and neither removes the other."""

    def port() -> list[int]:
        return [instance.port for instance in registry.snapshot(service).instances]

    first = registry.register(teacher(service, port=1))
    assert eventually(lambda: port() == [1])
    second = registry.register(teacher(service, port=2))
    assert eventually(lambda: port() == [2])
    first.close()
    assert port() == [2]
    third = registry.register(teacher(service, port=3))
    assert eventually(lambda: port() == [3])
    third.close()
    assert eventually(lambda: port() == [2])
    second.close()
    assert eventually(lambda: port() == [])


def test_killed_process_goes_with_its_lease(registry: Registry, service: str, member: Start) -> None:
    process = member("register", service, "a", "0.6")
    assert process.hear() == "ready"
    with registry.watch(service) as watch:
        seen(watch, ["a"])
        process.kill()
        killed = time.monotonic()
        seen(watch, [])
        assert time.monotonic() - killed < 10.0


def test_paused_process_registers_again(registry: Registry, service: str, member: Start) -> None:
    """A process paused past its lease registers again by itself."""
    process = member("register", service, "a", "0.6")
    assert process.hear() == "ready"
    with registry.watch(service) as watch:
        seen(watch, ["a"])
        process.pause()
        seen(watch, [])
        process.resume()
        seen(watch, ["a"])


NONSENSE: dict[str, tuple[dict[str, Any], str]] = {
    "no-port": ({"port": None}, "port is missing"),
    "banana": ({"capacity": "banana"}, "capacity 'banana'"),
    "negative": ({"capacity": -1.0}, "capacity -1.0"),
    "zero": ({"capacity": 0.0}, "capacity 0.0"),
    "endless": ({"capacity": float("inf")}, "capacity inf"),
    "no-number": ({"capacity": float("nan")}, "capacity nan"),
    "state": ({"state": "asleep"}, "state 'asleep'"),
    "any-address": ({"address": "0.0.0.0"}, "every interface"),
}


def test_nonsense_is_dropped_and_logged_once(
    backend: Backend, registry: Registry, service: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Nonsense is left out with the reason, and logged once."""
    caplog.set_level(logging.WARNING, "edl.discovery")
    with registry.watch(service) as watch, registry.register(teacher(service, "good")):
        seen(watch, ["good"])
        # Consul itself refuses an instance at "every interface".
        planted = sorted(name for name in NONSENSE if (backend.name, name) != ("consul", "any-address"))
        removals = [backend.plant(service, name, NONSENSE[name][0]) for name in planted]
        snapshot = registry.snapshot(service)
        deadline = time.monotonic() + 20
        while [entry.id for entry in snapshot.rejected] != planted and time.monotonic() < deadline:
            snapshot = watch.get(1.0) or snapshot
        assert ids(snapshot) == ["good"]
        assert [entry.id for entry in snapshot.rejected] == planted
        for entry in snapshot.rejected:
            assert NONSENSE[entry.id][1] in entry.reason
        with registry.register(teacher(service, "another")):
            seen(watch, ["another", "good"])
        for remove in removals:
            remove()
    logged = [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]
    assert len(logged) == len(planted), logged


def test_slow_watch_gets_the_newest_only(registry: Registry, service: str) -> None:
    """A watcher that falls behind gets the newest only."""
    with registry.watch(service) as slow, registry.watch(service) as quick:
        assert slow.get(10) == Snapshot(service, ())
        with registry.register(teacher(service)) as registration:
            for port in range(1, 11):
                registration.update(teacher(service, port=port))
                eventually(lambda port=port: [i.port for i in (quick.get(1) or Snapshot("", ())).instances] == [port])
            # What `quick` was told, `slow` is told soon: they follow independently.
            assert eventually(lambda: [i.port for i in (slow.get(1) or Snapshot("", ())).instances] == [10])
            assert slow.get(0.3) is None


def test_closing_elsewhere_ends_get(registry: Registry, service: str) -> None:
    watch = registry.watch(service)
    assert watch.get(10) is not None
    threading.Timer(0.2, watch.close).start()
    begun = time.monotonic()
    assert watch.get() is None
    assert list(watch) == []
    assert time.monotonic() - begun < 30.0


def test_closed_registry_refuses_more(backend: Backend, service: str) -> None:
    """Closing the registry deregisters, ends watches, and refuses more."""
    with open_registry(backend.url) as onlooker:
        registry = open_registry(backend.url)
        registration = registry.register(teacher(service))
        watch = registry.watch(service)
        assert eventually(lambda: ids(onlooker.snapshot(service)) == ["a"])
        registry.close()
        registry.close()
        assert eventually(lambda: ids(onlooker.snapshot(service)) == [])
    assert watch.get(5) is None
    registration.close()
    for call in (
        lambda: registry.register(teacher(service)),
        lambda: registry.snapshot(service),
        registry.services,
        lambda: registry.watch(service),
        lambda: registration.update(teacher(service)),
    ):
        with pytest.raises(ClosedError):
            call()


def test_impossible_instances_are_refused(registry: Registry, service: str) -> None:
    with registry.register(teacher(service)) as registration:
        with pytest.raises(SettingsError, match="capacity"):
            registration.update(teacher(service, capacity=-1.0))
        with pytest.raises(SettingsError, match="keeps its service and id"):
            registration.update(teacher(service, "b"))
        with pytest.raises(SettingsError, match="port"):
            registry.register(teacher(service, "b", 0))
        with pytest.raises(SettingsError, match="ttl_s"):
            registry.register(teacher(service, "b"), ttl_s=0.1)
        with pytest.raises(SettingsError, match="service"):
            registry.watch("no spaces please")
        assert eventually(lambda: ids(registry.snapshot(service)) == ["a"])


def test_many_threads_share_a_registry(registry: Registry, service: str) -> None:
    def come_and_go(number: int) -> None:
        for _ in range(5):
            with registry.register(teacher(service, f"t{number}")):
                assert eventually(lambda: f"t{number}" in ids(registry.snapshot(service)))

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(come_and_go, range(6)))
    assert eventually(lambda: ids(registry.snapshot(service)) == []) is True
