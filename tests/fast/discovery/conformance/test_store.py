"""What every store does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from edl.discovery import Store, open_store
from edl.discovery.keys import MAX_VALUE_BYTES
from edl.discovery.store import Entry, StoreSnapshot, StoreWatch
from edl.errors import ClosedError, ConflictError, LeaseLostError, SettingsError
from tests.fast.discovery.conformance.backends import Backend, eventually
from tests.fast.discovery.conformance.processes import Member

Start = Callable[..., Member]

pytestmark = pytest.mark.stores


def seen(watch: StoreWatch, wanted: dict[str, bytes], timeout_s: float = 60.0) -> StoreSnapshot:
    """Follow until exactly the keys and values `wanted` are there."""
    deadline = time.monotonic() + timeout_s
    snapshot = None
    while (left_s := deadline - time.monotonic()) > 0:
        snapshot = watch.get(left_s) or snapshot
        if snapshot is not None and {key: entry.value for key, entry in snapshot.entries.items()} == wanted:
            return snapshot
    raise AssertionError(f"expected {wanted}, last seen was {snapshot}")


def test_put_get_list_and_delete(store: Store, folder: str) -> None:
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
    assert store.put(key, b"3").version > second.version, "versions grow beyond a deletion"
    assert store.delete(key)


@pytest.mark.parametrize("value", [b"", b"\0", bytes(range(256)), b"x" * MAX_VALUE_BYTES])
def test_values_are_bytes(store: Store, folder: str, value: bytes) -> None:
    with store.lease() as lease:
        for key, held in (("free", None), ("held", lease)):
            entry = store.put(folder + key, value, held)
            assert store.get(folder + key) == entry == Entry(folder + key, value, entry.version)
            again = store.compare_and_set(folder + key, value, entry.version, held)
            assert again == store.get(folder + key)


@pytest.mark.parametrize("key", ["", "/a", "a/", "a//b", ".", "a/../b", "a\nb", "x" * 600])
def test_impossible_keys_are_refused(store: Store, key: str) -> None:
    """Keys that some store could not hold are refused."""
    for call in (store.get, store.delete, lambda key: store.put(key, b"")):
        with pytest.raises(SettingsError, match="key"):
            call(key)


def test_large_values_and_no_bytes_refused(store: Store, folder: str) -> None:
    """Values that are too large, or no bytes, are refused."""
    with pytest.raises(SettingsError, match=r"262,144 bytes"):
        store.put(f"{folder}a", b"x" * (MAX_VALUE_BYTES + 1))
    with pytest.raises(SettingsError, match="must be bytes"):
        store.compare_and_set(f"{folder}a", "text", None)  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match="ttl_s"):
        store.lease(0.1)
    with pytest.raises(SettingsError, match="elections/"):
        store.elect("", b"me")


@pytest.mark.parametrize("leased", [False, True])
def test_compare_and_set_needs_the_version(store: Store, folder: str, leased: bool) -> None:
    """Compare-and-set writes only over the version that was named."""
    key = f"{folder}a"
    with store.lease() as lease:
        held = lease if leased else None
        assert store.compare_and_set(key, b"x", 1, held) is None
        first = store.compare_and_set(key, b"1", None, held)
        assert first is not None
        assert first == store.get(key)
        assert store.compare_and_set(key, b"x", None, held) is None
        second = store.compare_and_set(key, b"2", first.version, held)
        assert second is not None
        assert second.version > first.version
        assert store.compare_and_set(key, b"x", first.version, held) is None
        assert second == store.get(key)


@pytest.mark.parametrize("version", [0, -1])
def test_no_key_has_a_version_below_1(store: Store, folder: str, version: int) -> None:
    """In some stores 0 means that there is no such key, which is None in ours."""
    assert store.compare_and_set(f"{folder}absent", b"x", version) is None
    assert store.get(f"{folder}absent") is None, "it was created"
    with store.lease() as lease:
        assert store.compare_and_set(f"{folder}absent", b"x", version, lease) is None
        assert store.get(f"{folder}absent") is None, "it was created under a lease"
    entry = store.put(f"{folder}there", b"1")
    assert store.compare_and_set(f"{folder}there", b"x", version) is None
    assert not store.delete(f"{folder}there", version)
    assert not store.delete(f"{folder}absent", version)
    assert store.get(f"{folder}there") == entry


def test_versions_grow_over_a_deletion(store: Store, folder: str) -> None:
    before = store.put(f"{folder}a", b"1")
    assert store.delete(f"{folder}a")
    after = store.put(f"{folder}a", b"1")
    assert after.version > before.version, "whoever compares with the old version would overwrite the new value"


def test_lease_takes_only_its_own_keys(store: Store, folder: str) -> None:
    """A lease takes its keys with it and leaves the others."""
    with store.watch(folder) as watch:
        seen(watch, {})
        store.put(f"{folder}stays", b"s")
        with store.lease(5.0) as lease:
            store.put(f"{folder}goes", b"g", lease)
            store.compare_and_set(f"{folder}too", b"t", None, lease)
            assert not lease.lost
            seen(watch, {f"{folder}stays": b"s", f"{folder}goes": b"g", f"{folder}too": b"t"})
        assert lease.lost
        assert [entry.value for entry in store.list(folder)] == [b"s"]
        seen(watch, {f"{folder}stays": b"s"})


def test_renewed_lease_outlives_its_length(store: Store, folder: str) -> None:
    """A lease outlives its length while it is renewed."""
    with store.lease(3.0) as lease:
        entry = store.put(f"{folder}a", b"1", lease)
        time.sleep(3.6)
        assert not lease.lost
        assert store.get(f"{folder}a") == entry


def test_leased_key_needs_its_lease(store: Store, folder: str) -> None:
    """A key under a lease is written with that lease only."""
    key = f"{folder}a"
    with store.lease() as mine, store.lease() as theirs:
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


def test_a_lost_lease_writes_nothing(backend: Backend, store: Store, folder: str) -> None:
    lease = store.lease()
    lease.close()
    for write in (
        lambda: store.put(f"{folder}a", b"x", lease),
        lambda: store.compare_and_set(f"{folder}a", b"x", None, lease),
    ):
        with pytest.raises(LeaseLostError):
            write()
    assert store.list(folder) == []
    with open_store(backend.url) as other, other.lease() as foreign:
        if backend.name == "sqlite":  # for Consul every connection is as good as another
            with pytest.raises(SettingsError, match="not a lease of"):
                store.put(f"{folder}a", b"x", foreign)


def test_a_killed_process_s_lease_expires(store: Store, folder: str, member: Start) -> None:
    process = member("hold", f"{folder}a", "3.0")
    assert process.hear() == "ready"
    with store.watch(folder) as watch:
        seen(watch, {f"{folder}a": b"held"})
        assert process.ask("?") == "kept"
        process.kill()
        killed = time.monotonic()
        seen(watch, {})
        assert time.monotonic() - killed < 10.0
        assert store.get(f"{folder}a") is None


def test_lapsed_lease_is_lost_for_good(store: Store, folder: str, member: Start) -> None:
    """A lease that lapsed in a paused process is lost for good."""
    key = f"{folder}a"
    process = member("hold", key, "2.0")
    assert process.hear() == "ready"
    with store.watch(folder) as watch:
        seen(watch, {key: b"held"})
        process.pause()
        seen(watch, {})
        mine = store.put(key, b"mine")
        process.resume()
        assert process.ask("?") == "lost"
        time.sleep(1.0)
        assert process.ask("?") == "lost"
        assert store.get(key) == mine
        process.finish()
        assert store.get(key) == mine, "it gave up its lease, and with it another's key"


def test_race_for_a_key_has_one_winner(store: Store, folder: str, member: Start) -> None:
    """Of processes that race for a key exactly one wins."""
    racers = [member("race", folder, "30") for _ in range(3)]
    assert [racer.hear() for racer in racers] == ["ready"] * 3
    for racer in racers:
        racer.say("go")
    won = [[int(number) for number in racer.hear().split()] for racer in racers]
    assert sorted(number for numbers in won for number in numbers) == list(range(30))
    for racer, numbers in zip(racers, won, strict=True):
        for number in numbers:
            entry = store.get(f"{folder}{number}")
            assert entry is not None
            assert entry.value == str(racer.process.pid).encode()


def test_no_increment_is_lost(store: Store, folder: str, member: Start) -> None:
    key = f"{folder}count"
    store.put(key, b"0")
    adders = [member("add", key, "25") for _ in range(3)]
    assert [adder.hear() for adder in adders] == ["ready"] * 3
    for adder in adders:
        adder.say("go")
    assert [adder.hear() for adder in adders] == ["done"] * 3
    entry = store.get(key)
    assert entry is not None
    assert entry.value == b"75"


def test_prefix_watch_keeps_the_newest_state(store: Store, folder: str) -> None:
    """A prefix is followed and the newest state is all that is kept."""
    with store.watch(f"{folder}a") as watch, store.watch(folder) as slow:
        assert watch.get(10) == StoreSnapshot({})
        assert slow.get(10) == StoreSnapshot({})
        store.put(f"{folder}b", b"not under the prefix")
        store.put(f"{folder}ab", b"1")
        seen(watch, {f"{folder}ab": b"1"})
        for number in range(10):
            store.put(f"{folder}a/b", str(number).encode())
        seen(watch, {f"{folder}ab": b"1", f"{folder}a/b": b"9"})
        seen(slow, {f"{folder}ab": b"1", f"{folder}a/b": b"9", f"{folder}b": b"not under the prefix"})
        assert slow.get(0.3) is None


def test_closing_elsewhere_ends_get(store: Store, folder: str) -> None:
    watch = store.watch(folder)
    assert watch.get(10) is not None
    threading.Timer(0.2, watch.close).start()
    begun = time.monotonic()
    assert watch.get() is None
    assert list(watch) == []
    assert time.monotonic() - begun < 30.0


def test_closed_store_refuses_more(backend: Backend, folder: str) -> None:
    """Closing the store revokes its leases and refuses more."""
    with open_store(backend.url) as onlooker:
        store = open_store(backend.url)
        lease = store.lease()
        store.put(f"{folder}a", b"1", lease)
        watch, election = store.watch(folder), store.elect(folder.rstrip("/"), b"me")
        assert election.wait(20)
        store.close()
        store.close()
        assert lease.lost
        assert not election.is_leader
        assert watch.get(5) is None
        assert eventually(lambda: onlooker.list(folder) == [])
        assert eventually(lambda: onlooker.list(f"elections/{folder.rstrip('/')}") == [])
    for call in (
        lambda: store.get(f"{folder}a"),
        lambda: store.list(folder),
        lambda: store.put(f"{folder}a", b""),
        lambda: store.compare_and_set(f"{folder}a", b"", None),
        lambda: store.delete(f"{folder}a"),
        lambda: store.watch(folder),
        lambda: store.lease(),
        lambda: store.elect("x", b""),
    ):
        with pytest.raises(ClosedError):
            call()
