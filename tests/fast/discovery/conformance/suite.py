"""What every registry and store does. A tier's test file has subclasses of these, whose names begin with `Test`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from edl.background import start_call
from edl.discovery import Instance, Registry, Snapshot, Store, open_registry, open_store
from edl.discovery.registry import ServiceView, Watch
from edl.discovery.store import MAX_VALUE_BYTES, Entry, StoreSnapshot, StoreWatch
from edl.errors import ClosedError, ConflictError, DiscoveryError, LeaseLostError, SettingsError
from tests.fast.discovery.conformance.backends import Backend, teacher
from tests.fast.discovery.conformance.fixtures import PATIENT_S
from tests.fast.discovery.conformance.processes import Member
from tests.waiting import DEADLINE_S, wait_until

Start = Callable[..., Member]
LONG_S = 600.0
"""A lease that does not lapse while a busy machine stands still."""


def ids(instances: Iterable[Instance]) -> list[str]:
    return [instance.id for instance in instances]


def seen(watch: Watch, *wanted: str) -> Snapshot:
    """Follow until exactly these are there."""
    snapshot = None
    for snapshot in iter(lambda: watch.get(DEADLINE_S), None):
        if ids(snapshot.instances) == sorted(wanted):
            return snapshot
    raise AssertionError(f"expected {wanted}, last seen was {snapshot}")


def seen_values(watch: StoreWatch, wanted: dict[str, bytes]) -> StoreSnapshot:
    """Follow until exactly these keys and values are there."""
    snapshot = None
    for snapshot in iter(lambda: watch.get(DEADLINE_S), None):
        if {key: entry.value for key, entry in snapshot.entries.items()} == wanted and not snapshot.stale:
            return snapshot
    raise AssertionError(f"expected {wanted}, last seen was {snapshot}")


def refuses(*calls: Callable[[], object], error: type[Exception] = DiscoveryError) -> None:
    for call in calls:
        with pytest.raises(error):
            call()


def refusal(call: Callable[[], object]) -> str:
    try:
        call()
    except DiscoveryError as exc:
        return str(exc)
    return ""


NONSENSE: dict[str, tuple[dict[str, Any], str]] = {
    "no-port": ({"port": None}, "port is missing"),
    "banana": ({"capacity": "banana"}, "capacity 'banana'"),
    "endless": ({"capacity": float("inf")}, "capacity inf"),
    "state": ({"state": "asleep"}, "state 'asleep'"),
}


class RegistrySuite:
    def test_watch_sees_start_change_and_end(self, registry: Registry, service: str) -> None:
        with registry.watch(service) as watch:
            assert watch.get(DEADLINE_S) == Snapshot(service, ())
            with registry.register(teacher(service), LONG_S) as registration:
                assert watch.get(DEADLINE_S) == Snapshot(service, (teacher(service),))
                draining = teacher(service, state="draining")
                registration.update(draining)
                assert registration.instance == draining
                assert watch.get(DEADLINE_S) == Snapshot(service, (draining,))
            assert watch.get(DEADLINE_S) == Snapshot(service, ())

    def test_instances_come_back_sorted(self, registry: Registry, service: str) -> None:
        """As they were registered, and their service is listed as long as they are there."""
        wanted = (
            Instance(service, "a", "::1", 65535, capacity=0.25, state="draining", model="digits"),
            Instance(service, "b / : ü", "gpu-7.example", 1, tags=("a", "b c"), meta={"zone": "eu ü", "x_1": ""}),
            Instance(service, "c", "unix:/run/edl/teacher.sock", 0),
            Instance(service, "d" * 512, "h", 1, meta={f"k{number}": "v" * 512 for number in range(60)}),
        )
        assert registry.snapshot(service) == Snapshot(service, ())
        registrations = [registry.register(instance, LONG_S) for instance in reversed(wanted)]
        with registry.register(replace(wanted[0], service=f"{service}-other"), LONG_S):
            wait_until(lambda: registry.snapshot(service).instances == wanted)
            wait_until(lambda: {service, f"{service}-other"} <= set(registry.services()))
            assert list(registry.services()) == sorted(registry.services())
        for registration in registrations:
            registration.close()
        wait_until(lambda: service not in registry.services())

    def test_later_registration_of_an_id_counts(self, registry: Registry, service: str) -> None:
        """Of two with one id the later counts, and neither removes the other."""

        def expect(*ports: int) -> None:
            wait_until(lambda: [instance.port for instance in registry.snapshot(service).instances] == list(ports))

        first = registry.register(teacher(service, port=1), LONG_S)
        expect(1)
        second = registry.register(teacher(service, port=2), LONG_S)
        expect(2)
        first.close()
        expect(2)
        third = registry.register(teacher(service, port=3), LONG_S)
        expect(3)
        third.close()
        expect(2)
        second.close()
        expect()

    def test_killed_instance_lapses(self, registry: Registry, service: str, member: Start) -> None:
        """One that deregisters or drains has left; one that was killed may still answer, until it is back."""
        dead, drained = member("register", service, "dead", "0.6"), member("register", service, "z", "0.6", "draining")
        left = member("register", service, "left", str(LONG_S))
        assert [process.hear() for process in (dead, drained, left)] == ["ready"] * 3
        with registry.watch(service) as watch:
            wait_until(lambda: "left" in ids(registry.snapshot(service).instances))
            for process in (dead, drained):
                process.kill()
            left.say("end")
            last = seen(watch)
            while ids(last.lapsed) != ["dead"]:
                last = watch.get(DEADLINE_S) or pytest.fail(f"it does not lapse: {last}")
            wait_until(lambda: registry.snapshot(service) == Snapshot(service, (), lapsed=last.lapsed))
            assert service in registry.services(), "somebody may still answer there"
            with registry.register(teacher(service, "dead", 9001), LONG_S):
                found = seen(watch, "dead")
                assert [instance.port for instance in found.instances] == [9001]
                assert not found.lapsed

    def test_paused_process_registers_again(self, registry: Registry, service: str, member: Start) -> None:
        process = member("register", service, "a", "0.6")
        assert process.hear() == "ready"
        with registry.watch(service) as watch:
            seen(watch, "a")
            process.pause()
            while ids((lapsed := seen(watch)).lapsed) != ["a"]:
                assert not lapsed.stale
            process.resume()
            assert not seen(watch, "a").lapsed

    def test_nonsense_is_dropped_and_logged_once(
        self, backend: Backend, registry: Registry, service: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.WARNING, "edl.discovery")
        with registry.watch(service) as watch, registry.register(teacher(service, "good"), LONG_S):
            seen(watch, "good")
            for name, (fields, _) in NONSENSE.items():
                backend.plant(service, name, fields)
            wait_until(lambda: len(registry.snapshot(service).rejected) == len(NONSENSE))
            with registry.register(teacher(service, "another"), LONG_S):
                snapshot = seen(watch, "another", "good")
            assert [entry.id for entry in snapshot.rejected] == sorted(NONSENSE)
            for entry in snapshot.rejected:
                assert NONSENSE[entry.id][1] in entry.reason
        logged = [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]
        assert len(logged) == len(NONSENSE), logged

    def test_impossible_instances_are_refused(self, registry: Registry, service: str) -> None:
        with registry.register(teacher(service), LONG_S) as registration:
            for call, words in (
                (lambda: registration.update(teacher(service, capacity=-1.0)), "capacity"),
                (lambda: registration.update(teacher(service, "b")), "keeps its service and id"),
                (lambda: registry.register(teacher(service, "b", 0)), "port"),
                (lambda: registry.register(teacher(service, "b"), ttl_s=0.1), "ttl_s"),
                (lambda: registry.watch("no spaces please"), "service"),
                (lambda: registry.snapshot("no spaces please"), "service"),
            ):
                with pytest.raises(SettingsError, match=words):
                    call()
            wait_until(lambda: registry.snapshot(service).instances == (teacher(service),))

    def test_many_threads_share_a_registry(self, registry: Registry, service: str) -> None:
        def come_and_go(name: str) -> None:
            for _ in range(3):
                with registry.register(teacher(service, name), LONG_S):
                    wait_until(lambda: name in ids(registry.snapshot(service).instances))

        with ThreadPoolExecutor(4) as threads:
            list(threads.map(come_and_go, "abcd"))
        wait_until(lambda: not registry.snapshot(service).instances)

    def test_closed_registry_refuses_more(self, backend: Backend, registry: Registry, service: str) -> None:
        """Closing deregisters, and ends a watch that another thread waits for."""
        closed = open_registry(backend.url, timeout_s=PATIENT_S)
        registration, watch = closed.register(teacher(service), LONG_S), closed.watch(service)
        told = start_call("edl-test", lambda: list(iter(watch.get, None)))
        wait_until(lambda: ids(registry.snapshot(service).instances) == ["a"])
        closed.close()
        closed.close()
        wait_until(lambda: not registry.snapshot(service).instances)
        told.result(DEADLINE_S)
        assert watch.get() is None
        registration.close()
        refuses(
            lambda: closed.register(teacher(service)),
            lambda: closed.snapshot(service),
            closed.services,
            lambda: closed.watch(service),
            lambda: registration.update(teacher(service)),
            error=ClosedError,
        )

    def test_forked_child_is_refused(self, service: str, member: Start) -> None:
        """The parent goes on with all that it has."""
        process = member("fork", service)
        refused = dict(process.hear().split() for _ in range(19))
        assert set(refused.values()) == {"ClosedError"}, refused
        assert process.hear() == "kept"
        assert process.process.wait(DEADLINE_S) == 0

    def test_outage_keeps_teachers(self, backend: Backend, service: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Registrations and watches recover from one that loses everything, and teachers are kept meanwhile."""
        monkeypatch.setattr(ServiceView.__init__, "__defaults__", (DEADLINE_S,))  # all have the time to come back
        with (
            open_registry(backend.url, timeout_s=PATIENT_S) as registry,
            registry.register(teacher(service, "a"), LONG_S) as first,
            registry.register(teacher(service, "b"), LONG_S) as second,
            registry.watch(service) as watch,
        ):
            healthy = seen(watch, "a", "b")
            backend.break_it()
            try:
                stale = watch.get(DEADLINE_S) or pytest.fail("the watch does not notice")
                assert (bool(stale.stale), stale.instances) == (True, healthy.instances)
                with registry.watch(service) as newcomer:
                    blind = newcomer.get(DEADLINE_S) or pytest.fail("the newcomer is told nothing")
                    assert (bool(blind.stale), blind.instances) == (True, ())
                refuses(
                    lambda: registry.snapshot(service),
                    registry.services,
                    lambda: registry.register(teacher(service, "c")),
                    lambda: first.update(first.instance),  # from now on it is tried again
                    lambda: second.update(second.instance),
                )
                wait_until(lambda: first.error and second.error)
            finally:
                backend.mend_it()
            while stale.stale:
                stale = watch.get(DEADLINE_S) or pytest.fail("the watch does not recover")
                assert stale.instances == healthy.instances, "students would have dropped their teachers"
            assert stale == healthy
            wait_until(lambda: not first.error and not second.error)

    def test_missing_teacher_is_dropped_at_last(
        self, backend: Backend, service: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("edl.discovery.watching.QUERY_S", 120.0)  # the time ends without a change
        monkeypatch.setattr(ServiceView.__init__, "__defaults__", (0.5,))
        with open_registry(backend.url, timeout_s=PATIENT_S) as registry, registry.watch(service) as watch:
            registration = registry.register(teacher(service), LONG_S)
            seen(watch, "a")
            backend.break_it()
            try:
                assert seen(watch, "a").stale
                registration.close()  # while nobody can be told: nothing is raised
            finally:
                backend.mend_it()
            assert seen(watch) == Snapshot(service, ())


class StoreSuite:
    def test_put_get_list_and_delete(self, store: Store, folder: str) -> None:
        key = f"{folder}a"
        assert store.get(key) is None
        assert store.list(folder) == []
        assert not store.delete(key)
        first = store.put(key, b"1")
        assert first == store.get(key) == Entry(key, b"1", first.version)
        second = store.put(key, b"2")
        assert second.version > first.version
        other = store.put(f"{folder}B/ü ?#%/c", b"\0\xff")
        assert store.list(folder) == [other, second]
        assert store.list(f"{folder}B") == [other]
        assert not store.delete(key, first.version)
        assert store.delete(key, second.version)
        assert store.get(key) is None
        assert store.put(key, b"3").version > other.version, "versions grow beyond a deletion, and from key to key"

    def test_values_are_bytes(self, store: Store, folder: str) -> None:
        with store.lease(LONG_S) as lease:
            for value in (b"", bytes(range(256)), b"x" * MAX_VALUE_BYTES):
                for key, held in (("free", None), ("held", lease)):
                    entry = store.put(folder + key, value, held)
                    assert store.get(folder + key) == entry == Entry(folder + key, value, entry.version)
                    again = store.compare_and_set(folder + key, value, entry.version, held)
                    assert again == store.get(folder + key)

    def test_impossible_arguments_are_refused(self, store: Store, folder: str) -> None:
        for call, words in (
            (lambda: store.get("a//b"), "key"),
            (lambda: store.delete("/a"), "key"),
            (lambda: store.put("a/", b""), "key"),
            (lambda: store.compare_and_set("a\nb", b"", None), "key"),
            (lambda: store.list("a//"), "prefix"),
            (lambda: store.watch("a//"), "prefix"),
            (lambda: store.put(f"{folder}a", b"x" * (MAX_VALUE_BYTES + 1)), "262,144 bytes"),
            (lambda: store.compare_and_set(f"{folder}a", "text", None), "must be bytes"),  # type: ignore[arg-type]
            (lambda: store.lease(0.1), "ttl_s"),
            (lambda: store.elect("", b"me"), "elections/"),
        ):
            with pytest.raises(SettingsError, match=words):
                call()
        assert store.list(folder) == []

    @pytest.mark.parametrize("leased", [False, True])
    def test_compare_and_set_needs_the_version(self, store: Store, folder: str, leased: bool) -> None:
        """Also versions below 1, which mean in some stores that there is no such key."""
        key = f"{folder}a"
        with store.lease(LONG_S) as lease:
            held = lease if leased else None
            for version in (1, 0, -1):
                assert store.compare_and_set(key, b"x", version, held) is None
                assert not store.delete(key, version)
            assert store.get(key) is None
            first = store.compare_and_set(key, b"1", None, held)
            assert first is not None
            assert first == store.get(key)
            for version in (None, 0, -1):
                assert store.compare_and_set(key, b"x", version, held) is None
            assert not store.delete(key, 0)
            second = store.compare_and_set(key, b"2", first.version, held)
            assert second is not None
            assert second.version > first.version
            assert store.compare_and_set(key, b"x", first.version, held) is None
            assert second == store.get(key)

    def test_lease_takes_only_its_own_keys(self, store: Store, folder: str) -> None:
        with store.watch(folder) as watch:
            seen_values(watch, {})
            store.put(f"{folder}stays", b"s")
            with store.lease(LONG_S) as lease:
                store.put(f"{folder}goes", b"g", lease)
                store.compare_and_set(f"{folder}too", b"t", None, lease)
                assert not lease.lost
                seen_values(watch, {f"{folder}stays": b"s", f"{folder}goes": b"g", f"{folder}too": b"t"})
            assert lease.lost
            assert [entry.value for entry in store.list(folder)] == [b"s"]
            seen_values(watch, {f"{folder}stays": b"s"})
            refuses(
                lambda: store.put(f"{folder}a", b"x", lease),
                lambda: store.compare_and_set(f"{folder}a", b"x", None, lease),
                error=LeaseLostError,
            )
            assert store.get(f"{folder}a") is None

    def test_leased_key_needs_its_lease(self, store: Store, folder: str) -> None:
        key = f"{folder}a"
        with store.lease(LONG_S) as mine, store.lease(LONG_S) as theirs:
            entry = store.put(key, b"1", mine)
            for lease in (theirs, None):
                with pytest.raises(ConflictError, match="another lease"):
                    store.put(key, b"x", lease)
                with pytest.raises(ConflictError, match="another lease"):
                    store.compare_and_set(key, b"x", entry.version, lease)
            assert store.get(key) == entry
            assert store.put(key, b"2", mine).version > entry.version
            assert store.delete(key)
            assert store.put(key, b"3", theirs).value == b"3"

    def test_lapsed_lease_is_lost_for_good(self, store: Store, folder: str, member: Start) -> None:
        """Of a process that was paused, whose key another has taken meanwhile."""
        key = f"{folder}a"
        process = member("hold", key, "1.0")
        assert process.hear() == "ready"
        with store.watch(folder) as watch:
            process.pause()
            seen_values(watch, {})
        assert store.get(key) is None
        mine = store.put(key, b"mine")
        process.resume()
        assert process.ask("?") == "lost"
        process.process.communicate("", timeout=DEADLINE_S)
        assert process.process.returncode == 0
        assert store.get(key) == mine, "it gave up its lease, and with it another's key"

    def test_competing_processes_lose_nothing(self, store: Store, folder: str, member: Start) -> None:
        """Exactly one creates each key, and no increment is lost."""
        store.put(f"{folder}sum", b"0")
        racers = [member("compete", folder, "20") for _ in range(2)]
        assert [racer.hear() for racer in racers] == ["ready"] * 2
        for racer in racers:
            racer.say("go")
        won = [[int(number) for number in racer.hear().split()] for racer in racers]
        assert sorted(number for numbers in won for number in numbers) == list(range(20))
        values = {entry.key.removeprefix(folder): entry.value for entry in store.list(folder)}
        assert values.pop("sum") == b"40"
        owners = zip(racers, won, strict=True)
        assert values == {str(n): str(racer.process.pid).encode() for racer, numbers in owners for n in numbers}

    def test_watch_follows_its_prefix(self, store: Store, folder: str) -> None:
        with store.watch(f"{folder}a") as watch:
            assert watch.get(DEADLINE_S) == StoreSnapshot({})
            store.put(f"{folder}b", b"not under the prefix")
            store.put(f"{folder}ab", b"1")
            for number in range(10):
                entry = store.put(f"{folder}a/b", str(number).encode())
            found = seen_values(watch, {f"{folder}ab": b"1", f"{folder}a/b": b"9"})
            assert found.entries[entry.key] == entry

    def test_leader_hands_over_on_resign(self, store: Store, service: str) -> None:
        candidates = {value: store.elect(service, value, LONG_S) for value in (b"0", b"1", b"2")}
        while candidates:
            wait_until(lambda: any(candidate.is_leader for candidate in candidates.values()))
            (value,) = [value for value, candidate in candidates.items() if candidate.is_leader]
            leader = candidates.pop(value)
            assert leader.wait(0)
            for candidate in candidates.values():
                assert candidate.leader() == value
                assert not candidate.wait(0.01)
            leader.close()
            assert not leader.is_leader

    def test_deleting_the_key_deposes_the_leader(self, store: Store, service: str) -> None:
        with store.elect(service, b"1", LONG_S) as election:
            assert election.wait(DEADLINE_S)
            entry = store.get(f"elections/{service}") or pytest.fail("there is a leader, and no key")
            assert store.delete(entry.key)
            wait_until(lambda: (store.get(entry.key) or entry).version > entry.version)
            wait_until(lambda: election.is_leader)

    def test_paused_leader_campaigns_again(self, store: Store, service: str, member: Start) -> None:
        process = member("elect", service, "paused", "1.0")
        assert process.hear() == "ready"
        wait_until(lambda: process.ask("?") == "leader")
        process.pause()
        with store.elect(service, b"mine", LONG_S) as election:
            assert election.wait(DEADLINE_S)
            process.resume()
            assert process.ask("?") == "follower", "it must not believe for a moment that it still leads"
            assert election.is_leader
        wait_until(lambda: process.ask("?") == "leader")

    def test_closed_store_refuses_more(self, backend: Backend, store: Store, folder: str) -> None:
        """Closing revokes leases, and ends what other threads wait for or close at the same time."""
        name = folder.rstrip("/")
        closed = open_store(backend.url, timeout_s=PATIENT_S)
        closed.put(f"{folder}a", b"1", lease := closed.lease(LONG_S))
        watch, election, follower = (
            closed.watch(folder),
            closed.elect(name, b"me", LONG_S),
            closed.elect(f"{name}-x", b"", LONG_S),
        )
        assert election.wait(DEADLINE_S)
        told = start_call("edl-test", lambda: list(iter(watch.get, None)))
        closing = start_call("edl-test", follower.close)
        closed.close()
        closed.close()
        closing.result(DEADLINE_S)
        told.result(DEADLINE_S)
        assert lease.lost
        assert not election.is_leader
        wait_until(lambda: not store.list(folder) and not store.list(f"elections/{name}"))
        refuses(
            lambda: closed.get(f"{folder}a"),
            lambda: closed.list(folder),
            lambda: closed.put(f"{folder}a", b""),
            lambda: closed.compare_and_set(f"{folder}a", b"", None),
            lambda: closed.delete(f"{folder}a"),
            lambda: closed.watch(folder),
            closed.lease,
            lambda: closed.elect("x", b""),
            election.wait,
            error=ClosedError,
        )

    def test_store_recovers_with_new_elections(self, backend: Backend, folder: str) -> None:
        """From an outage in which everything is lost, and leases too."""
        with (
            open_store(backend.url, timeout_s=PATIENT_S) as store,
            store.watch(folder) as watch,
            store.lease(1.0) as lease,
            store.elect(folder.rstrip("/"), b"me", 1.0) as election,
        ):
            entry = store.put(f"{folder}a", b"1")
            seen_values(watch, {entry.key: b"1"})
            assert election.wait(DEADLINE_S)
            backend.break_it()
            try:
                stale = watch.get(DEADLINE_S) or pytest.fail("the watch does not notice")
                assert (bool(stale.stale), stale.entries) == (True, {entry.key: entry})
                refuses(
                    lambda: store.get("a"),
                    lambda: store.list("a"),
                    lambda: store.put("a", b""),
                    lambda: store.compare_and_set("a", b"", None),
                    lambda: store.delete("a"),
                    store.lease,
                    election.leader,
                )
                wait_until(lambda: lease.lost and not election.is_leader)
            finally:
                backend.mend_it()
            assert election.wait(DEADLINE_S)
            assert lease.lost
            store.put(f"{folder}b", b"2")
            seen_values(watch, {f"{folder}b": b"2"})
