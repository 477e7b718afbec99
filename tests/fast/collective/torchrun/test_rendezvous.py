"""torch's rendezvous over EDL's store: its state as JSON, checked; its store's methods, also when C++ calls them."""

from __future__ import annotations

import ipaddress
import json
import os
import pickle
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch", reason="the rendezvous is torch's")

from torch.distributed import DistStoreError, PrefixStore
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousParameters,
    RendezvousStateError,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    _NodeDesc,
    _RendezvousState,
)

from edl.collective.agent.command_line.address import own_address
from edl.collective.torchrun import state as rendezvous_state
from edl.collective.torchrun.handler import StoreBackend, create_handler, handler_creator
from edl.collective.torchrun.store import SharedStore
from edl.discovery import Store, open_store
from edl.errors import DiscoveryError, ProtocolError, SettingsError

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


@given(states())
def test_a_state_comes_back_as_it_was(state: _RendezvousState) -> None:
    back = vars(rendezvous_state.decode(rendezvous_state.encode(state)))
    for name, value in vars(state).items():
        assert back[name] == value, name
    assert list(back["participants"]) == list(state.participants)


@given(states(), st.data())
def test_a_damaged_state_is_refused(state: _RendezvousState, data: st.DataObject) -> None:
    form = json.loads(rendezvous_state.encode(state))
    name = data.draw(st.sampled_from(sorted(form)))
    wrong: Any = data.draw(st.sampled_from([..., "text", [1], {"a": 1}, [["a", 1]], 1e400]))
    if wrong is ...:
        del form[name]
    else:
        form[name] = wrong
    with pytest.raises(ProtocolError, match="not a rendezvous state"):
        rendezvous_state.decode(json.dumps(form).encode())


class Bomb:
    def __reduce__(self) -> Any:
        return os.mkdir, ("exploded",)


def test_pickle_in_the_store_is_not_loaded(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pickle in the store is never loaded."""
    monkeypatch.chdir(tmp_path)
    store.put("rendezvous/job/state", pickle.dumps(Bomb()))
    with pytest.raises(RendezvousStateError, match="not a rendezvous state"):
        StoreBackend(store, "job").get_state()
    assert not (tmp_path / "exploded").exists()


def test_unknown_state_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another state than torchs present one is refused with advice."""

    class Newer(_RendezvousState):
        def __init__(self) -> None:
            super().__init__()
            self.epoch = 0

    monkeypatch.setattr(rendezvous_state, "_RendezvousState", Newer)
    with pytest.raises(SettingsError, match=r"differing in epoch.*edl run"):
        rendezvous_state.check_torch()


def test_the_first_of_two_writers_wins(store: Store) -> None:
    one, other = StoreBackend(store, "job"), StoreBackend(store, "job")
    assert one.get_state() is None
    state = _RendezvousState()
    first = one.set_state(pickle.dumps(state))
    assert first is not None
    assert first[2]
    state.round = 7
    late = other.set_state(pickle.dumps(state))  # without a token: only if there is none
    assert late is not None
    assert (late[1], late[2], pickle.loads(late[0]).round) == (first[1], False, 0)
    second = other.set_state(pickle.dumps(state), late[1])
    assert second is not None
    assert second[2]
    stale = one.set_state(pickle.dumps(_RendezvousState()), first[1])
    assert stale is not None
    assert (stale[1], stale[2], pickle.loads(stale[0]).round) == (second[1], False, 7)


def test_jobs_do_not_see_each_other(store: Store) -> None:
    StoreBackend(store, "a/b").set_state(pickle.dumps(_RendezvousState()))
    assert StoreBackend(store, "a").get_state() is None
    assert StoreBackend(store, "a%2Fb").get_state() is None


def test_silent_store_is_torchs_error(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that does not answer is an error that torch knows."""

    def fail(*_: Any) -> None:
        raise DiscoveryError("down")

    backend = StoreBackend(store, "job")
    monkeypatch.setattr(store, "get", fail)
    monkeypatch.setattr(store, "compare_and_set", fail)
    with pytest.raises(RendezvousConnectionError, match="down"):
        backend.get_state()
    with pytest.raises(RendezvousConnectionError, match="down"):
        backend.set_state(pickle.dumps(_RendezvousState()))


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


def test_what_several_keys_need(shared: Any) -> None:
    shared.multi_set(["a", "b"], ["1", b"\x00\xff"])
    assert shared.multi_get(["b", "a"]) == [b"\x00\xff", b"1"]
    shared.append("a", "2")
    assert shared.get("a") == b"12"


def test_compare_set_is_torchs(shared: Any) -> None:
    assert shared.compare_set("key", "old", "new") == b"old"  # as torch's own: what is not there is not set
    assert shared.compare_set("key", "", "first") == b"first"
    assert shared.compare_set("key", "other", "second") == b"first"
    assert shared.compare_set("key", "first", "second") == b"second"
    assert shared.get("key") == b"second"


def test_concurrent_adds_lose_nothing(shared: Any) -> None:
    """Adding from several threads loses nothing."""
    threads = [threading.Thread(target=lambda: [shared.add("n", 1) for _ in range(10)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert shared.add("n", 0) == 40
    assert shared.get("n") == b"40"


def test_waiting_ends_when_the_key_comes(shared: Any) -> None:
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.append(shared.get("late")))
    reader.start()
    shared.set("late", "here")
    reader.join(20)
    assert got == [b"here"]


def test_waiting_ends_at_the_timeout(shared: Any) -> None:
    with pytest.raises(DistStoreError, match=r"'.*never' was not set within 0.1 s"):
        shared.wait(["never"], timedelta(seconds=0.1))
    shared.set_timeout(timedelta(seconds=0.1))
    with pytest.raises(DistStoreError, match=r"not set within 0.1 s"):
        shared.get("never")


def parameters(url: str, run_id: str = "job", **config: Any) -> RendezvousParameters:
    return RendezvousParameters("edl", url, run_id, 1, 1, **config)


@contextmanager
def closing(handler: DynamicRendezvousHandler) -> Iterator[None]:
    """As torchrun does: it shuts down while the exception passes."""
    try:
        yield
    finally:
        assert handler.shutdown()


def test_bad_endpoint_is_refused() -> None:
    """An endpoint that is no url is refused."""
    with pytest.raises(SettingsError, match=r"localhost:29400.*wants the URL of a store"):
        create_handler(parameters("localhost:29400"))


@pytest.mark.parametrize("endpoint", ["", "localhost:29400", "consul://127.0.0.1:1"])
def test_configuration_names_the_store(url: str, endpoint: str) -> None:
    """The store can be named by the configuration which counts before the endpoint."""
    assert handler_creator() is create_handler
    handler = create_handler(parameters(endpoint, store=url))
    try:
        info = handler.next_rendezvous()
        assert (info.rank, info.world_size, handler.get_backend()) == (0, 1, "edl")
        assert info.bootstrap_store_info is not None
        assert info.bootstrap_store_info.master_addr == "127.0.0.1"
    finally:
        handler.shutdown()


def test_removed_node_joins_again(url: str, store: Store) -> None:
    """A node that the others took for dead restarts its workers, and does not train on beside the others' job."""
    backend = StoreBackend(store, "job")

    def remove_all() -> bool:
        """As another node does where this one was silent for too long; not while this one writes."""
        found = backend.get_state()
        assert found is not None
        state = pickle.loads(found[0])
        state.participants.clear()
        state.last_heartbeats.clear()
        state.complete, state.round = False, state.round + 1
        written = backend.set_state(pickle.dumps(state), found[1])
        return written is not None and written[2]

    handler = create_handler(parameters(url))
    try:
        assert handler.next_rendezvous().world_size == 1
        assert handler.num_nodes_waiting() == 0
        wait_until(remove_all)
        wait_until(lambda: handler.num_nodes_waiting() == 1)
        assert handler.next_rendezvous().world_size == 1
        assert handler.num_nodes_waiting() == 0
    finally:
        handler.shutdown()


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60.0
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_ended_job_is_closed(url: str) -> None:
    """A job that ended is closed and one that failed is left."""
    handler = create_handler(parameters(url))
    first = handler.next_rendezvous().bootstrap_store_info
    second = handler.next_rendezvous().bootstrap_store_info  # after a restart: another store for the workers
    assert first is not None
    assert second is not None
    assert first.master_port != second.master_port
    with pytest.raises(ArithmeticError), closing(handler):
        raise ArithmeticError
    handler = create_handler(parameters(url))
    assert handler.next_rendezvous().rank == 0
    assert handler.shutdown()
    late = create_handler(parameters(url))
    with pytest.raises(RendezvousClosedError, match="job job has ended already"):
        late.next_rendezvous()
    late.shutdown()
