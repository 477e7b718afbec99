"""A journal in a store that is away, answers late, or is written by a master that was thought dead."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack, closing
from typing import Any

import pytest

from edl.discovery import Store
from edl.errors import DiscoveryError, JournalError, LeaseLostError, ProtocolError
from tests.fast.master.journal.conftest import StorePlace
from tests.waiting import DEADLINE_S, wait_until


class Disturbed:
    """A store of which some calls are disturbed: `before` and `after` see the method's name and the key."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.before: Callable[[str, str], None] = lambda method, key: None
        self.after: Callable[[str, str], None] = lambda method, key: None

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)

        def call(key: str, *arguments: Any) -> Any:
            self.before(name, key)
            answer = method(key, *arguments)
            self.after(name, key)
            return answer

        return call if name in ("get", "list", "put", "compare_and_set", "delete") else method


@pytest.fixture
def stored(stack: ExitStack, url: str) -> StorePlace:
    return stack.enter_context(closing(StorePlace(url, "job")))


@pytest.fixture
def disturbed(stored: StorePlace) -> Any:
    return Disturbed(stored.store)


def keys(stored: StorePlace) -> set[str]:
    return {entry.key for entry in stored.store.list("journals/") if entry.key != f"{stored.folder}head"}


def named(stored: StorePlace) -> set[str]:
    """Keys that the head names as the journal's."""
    head = json.loads(stored.head())
    runs = [*head["records"], *([head["snapshot"][:3]] if head["snapshot"] else [])]
    return {
        f"{stored.folder}{folder}/{number // 128:08d}/{number % 128:03d}"
        for folder, first, stop in runs
        for number in range(first, stop)
    }


def test_values_are_small_and_swept(stored: StorePlace) -> None:
    """Below Consul's limit; and what a snapshot replaced is deleted after a while."""
    journal = stored.open()
    journal.begin_term()
    for number in range(60):
        journal.append([bytes(10_000), bytes(500_000 if number % 20 == 0 else 7)])
    journal.snapshot(bytes(700_000))
    journal.append([bytes(300_000)])
    assert all(len(entry.value) <= 200_000 for entry in stored.store.list("journals/"))
    wait_until(lambda: keys(stored) == named(stored), "a sweep")
    assert len(keys(stored)) == 4 + 2
    for number in range(40):
        journal.snapshot(b"%d" % number)
    wait_until(lambda: keys(stored) == named(stored), "a sweep")
    assert len(stored.head()) < 10_000, "what was swept is named no more"


@pytest.mark.parametrize("write", ["append", "snapshot", "begin_term"])
def test_lost_answer_is_no_second_write(stored: StorePlace, disturbed: Any, write: str) -> None:
    """The store did what it was asked, and then its answer was lost."""
    journal = stored.open(store=disturbed)
    journal.begin_term()
    lost = []

    def lose(method: str, key: str) -> None:
        if method in ("compare_and_set", "put") and len(lost) < 3:
            lost.append(key)
            raise DiscoveryError("the answer is lost")

    disturbed.after = lose
    if write == "append":
        journal.append([b"1"])
        journal.append([b"2"])
        assert stored.open().load() == (None, [b"1", b"2"])
    elif write == "snapshot":
        journal.snapshot(b"state")
        assert stored.open().load() == (b"state", [])
    else:
        assert journal.begin_term() == 2
        journal.append([b"1"])
    assert len(lost) == 3 if write != "begin_term" else lost


@pytest.mark.parametrize("seen", [0, 1], ids=["at once", "late"])
def test_own_late_write_is_found(stored: StorePlace, disturbed: Any, seen: int) -> None:
    """The store does what the first request asks after it was asked again: that is no other master."""
    journal = stored.open(store=disturbed)
    journal.begin_term()
    journal.append([b"1"])
    head = f"{stored.folder}head"
    held: list[tuple[Any, ...]] = []
    compare_and_set, get = disturbed._store.compare_and_set, disturbed._store.get
    stale = get(head)
    looks: list[str] = []

    def delayed(key: str, *arguments: Any) -> Any:
        if not held:
            held.append((key, *arguments))
            raise DiscoveryError("timed out, and is under way")
        if len(held) == 1:
            held.append(())
            compare_and_set(*held[0])
        return compare_and_set(key, *arguments)

    def look(key: str) -> Any:
        looks.append(key)
        return stale if len(looks) <= seen else get(key)

    class Delaying:
        compare_and_set = staticmethod(delayed)
        get = staticmethod(look)

        def __getattr__(self, name: str) -> Any:
            return getattr(stored.store, name)

    disturbed._store = Delaying()
    journal.append([b"2"])
    journal.append([b"3"])
    assert len(held) == 2
    assert stored.open().load() == (None, [b"1", b"2", b"3"])


def test_writers_that_begin_alike_differ(stored: StorePlace, disturbed: Any) -> None:
    """Two write the same term over the same head, and one of them does not hear that it came second."""
    second = stored.open()

    def overtake(method: str, key: str) -> None:
        if method == "compare_and_set":
            disturbed.before = lambda method, key: None
            second.begin_term()
            raise DiscoveryError("it was not written")

    disturbed.before = overtake
    first = stored.open(store=disturbed)
    assert first.begin_term() == 2
    first.append([b"first"])
    with pytest.raises(LeaseLostError):
        second.append([b"second"])
    assert stored.open().load() == (None, [b"first"])


@pytest.mark.parametrize("write", ["append", "snapshot"])
def test_paused_writer_comes_too_late(stored: StorePlace, disturbed: Any, write: str) -> None:
    """It stood still between its values and the head, while another took over and replaced everything."""
    first = stored.open(store=disturbed)
    first.begin_term()
    first.append([b"1"])
    second = stored.open()

    def pause(method: str, key: str) -> None:
        if method == "compare_and_set" and (write == "append" or seen.append(key) or len(seen) == 2):
            disturbed.before = lambda method, key: None
            second.begin_term()
            assert second.load() == (None, [b"1"])
            second.append([b"2"])
            second.snapshot(b"state")
            second.append([b"3"])

    seen: list[str] = []
    disturbed.before = pause
    with pytest.raises(LeaseLostError, match="another master has begun a term; this one is 1"):
        first.append([b"late"]) if write == "append" else first.snapshot(b"late")
    second.append([b"4"])
    assert second.load() == stored.open().load() == (b"state", [b"3", b"4"])
    second.snapshot(b"next")
    second.snapshot(b"last")
    first.close()
    wait_until(lambda: keys(stored) == named(stored), "a sweep")


def test_store_is_away_for_a_while(stored: StorePlace, disturbed: Any) -> None:
    """A writer asks again until its `timeout_s`; then nothing follows the error."""
    failures: list[str] = []

    def fail(method: str, key: str) -> None:
        if len(failures) < most:
            failures.append(method)
            raise DiscoveryError("away")

    most = 3
    journal = stored.open(store=disturbed, timeout_s=DEADLINE_S)
    journal.begin_term()
    disturbed.before = fail
    journal.append([b"1"])
    journal.append([b"2"])
    assert journal.load() == (None, [b"1", b"2"])
    impatient = stored.open(store=disturbed, timeout_s=0.1)
    impatient.begin_term()
    most = 10**9
    for _ in range(2):
        with pytest.raises(JournalError, match="journals/job: cannot append: away"):
            impatient.append([b"3"])
    with pytest.raises(JournalError, match="journals/job: cannot append: away"):
        impatient.load()


@pytest.mark.parametrize("value", [b"", b"[]", b'{"format":2}', b'{"format":1,"term":"x"}', b"\xff\x00"])
def test_foreign_head_is_refused(stored: StorePlace, value: bytes) -> None:
    stored.store.put(f"{stored.folder}head", value)
    with pytest.raises(ProtocolError, match="journals/job"):
        stored.open().begin_term()
    assert stored.head() == value


def test_value_that_shows_late_is_waited_for(stored: StorePlace, disturbed: Any) -> None:
    """As Consul may answer while its leadership changes hands."""
    journal = stored.open()
    journal.begin_term()
    journal.append([b"1"])
    journal.append([b"2"])
    entry = stored.store.list(f"{stored.folder}records/")[-1]
    stored.store.delete(entry.key)
    looks = []

    def look(method: str, key: str) -> None:
        if method == "list":
            looks.append(key)
            if len(looks) == 3:
                stored.store.put(entry.key, entry.value)

    disturbed.before = look
    assert stored.open(store=disturbed).load() == (None, [b"1", b"2"])
