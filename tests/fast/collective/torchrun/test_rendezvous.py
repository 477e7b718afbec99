"""torch's rendezvous over EDL's store: its state as JSON, checked; its store's methods, also when C++ calls them."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import DistStoreError, PrefixStore
from torch.distributed.elastic.rendezvous.api import RendezvousStateError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    _NodeDesc,
    _RendezvousState,
)

from edl.collective.torchrun import state as rendezvous_state
from edl.collective.torchrun.handler import StoreBackend
from edl.collective.torchrun.store import SharedStore
from edl.discovery import Store, open_store

NODES = st.builds(_NodeDesc, st.text(max_size=8), st.integers(0, 1 << 22), st.integers(0, 9))
MOMENTS = st.datetimes(datetime(2020, 1, 1), datetime(2100, 1, 1), timezones=st.just(timezone.utc))


@st.composite
def states(draw: st.DrawFn) -> _RendezvousState:
    state = _RendezvousState()
    state.round = draw(st.integers(0, 1 << 40))
    state.complete, state.closed = draw(st.booleans()), draw(st.booleans())
    state.deadline = draw(st.none() | MOMENTS)
    state.participants = draw(st.dictionaries(NODES, st.integers(0, 9), max_size=4))
    state.wait_list, state.redundancy_list = draw(st.sets(NODES, max_size=3)), draw(st.sets(NODES, max_size=3))
    state.last_heartbeats = draw(st.dictionaries(NODES, MOMENTS, max_size=4))
    return state


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/store.sqlite"


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    with open_store(url) as store:
        yield store


@settings(max_examples=20)
@given(states())
def test_a_state_comes_back_as_it_was(state: _RendezvousState) -> None:
    back = vars(rendezvous_state.decode(rendezvous_state.encode(state)))
    for name, value in vars(state).items():
        assert back[name] == value, name
    assert list(back["participants"]) == list(state.participants)


class Bomb:
    def __reduce__(self) -> Any:
        return os.mkdir, ("exploded",)


def test_pickle_in_the_store_is_not_loaded(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store.put("rendezvous/job/state", pickle.dumps(Bomb()))
    with pytest.raises(RendezvousStateError, match="not a rendezvous state"):
        StoreBackend(store, "job").get_state()
    assert not (tmp_path / "exploded").exists()


def test_the_first_of_two_writers_wins(store: Store) -> None:
    one, other = StoreBackend(store, "job"), StoreBackend(store, "job")
    assert one.get_state() is None
    state = _RendezvousState()
    first = one.set_state(pickle.dumps(state))
    assert first[2]
    state.round = 7
    late = other.set_state(pickle.dumps(state))  # without a token: only if there is none
    assert (late[1], late[2], pickle.loads(late[0]).round) == (first[1], False, 0)
    second = other.set_state(pickle.dumps(state), late[1])
    assert second[2]
    stale = one.set_state(pickle.dumps(_RendezvousState()), first[1])
    assert (stale[1], stale[2], pickle.loads(stale[0]).round) == (second[1], False, 7)


@pytest.fixture
def own(store: Store) -> SharedStore:
    own = SharedStore(store, "rendezvous/job/store/")
    own.set_timeout(timedelta(seconds=20))
    return own


@pytest.fixture(params=["python", "c++"])
def shared(request: pytest.FixtureRequest, own: SharedStore) -> Any:
    """The store itself, and as torch uses it: wrapped in a store written in C++."""
    return own if request.param == "python" else PrefixStore("outer//", own)


def test_keys_of_torchs_kind(shared: Any) -> None:
    for key in ("plain", "/begins", "a//b", ".", "..", "with space", "%2F", "ü"):
        assert not shared.check([key])
        shared.set(key, "v" + key)
        assert shared.check([key])
        assert shared.get(key) == ("v" + key).encode()
    assert shared.num_keys() == 8
    assert shared.delete_key("plain")
    assert not shared.delete_key("plain")
    assert shared.num_keys() == 7


def test_compare_set_is_torchs(shared: Any) -> None:
    assert shared.compare_set("key", "old", "new") == b"old"  # as torch's own: what is not there is not set
    assert shared.compare_set("key", "", "first") == b"first"
    assert shared.compare_set("key", "other", "second") == b"first"
    assert shared.compare_set("key", "first", "second") == b"second"
    assert shared.get("key") == b"second"


def test_waiting_ends_at_the_timeout(shared: Any) -> None:
    with pytest.raises(DistStoreError, match=r"'.*never' was not set within 0.1 s"):
        shared.wait(["never"], timedelta(seconds=0.1))
    shared.set_timeout(timedelta(seconds=0.1))
    with pytest.raises(DistStoreError, match=r"not set within 0.1 s"):
        shared.get("never")
