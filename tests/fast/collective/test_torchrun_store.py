"""The store as torch uses it where agents of `torchrun --rdzv-backend=edl` meet."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import DistStoreError, PrefixStore
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _RendezvousState

from edl.collective.torchrun import state
from edl.collective.torchrun.store import SharedStore
from edl.discovery import Store
from edl.errors import ProtocolError


@pytest.fixture
def own(store: Store) -> SharedStore:
    return SharedStore(store, "job/")


@pytest.fixture(params=["python", "c++"])
def shared(request: pytest.FixtureRequest, own: SharedStore) -> Any:
    """The store itself, and wrapped in a store written in C++, which does not keep it."""
    return own if request.param == "python" else PrefixStore("outer//", own)


def test_keys_and_values_are_torchs(shared: Any) -> None:
    for key in ("plain", "/begins", "a//b", ".", "..", "with space", "%2F", "ü"):
        assert not shared.check([key])
        shared.set(key, "v" + key)
        assert shared.get(key) == ("v" + key).encode()
    assert (shared.delete_key("plain"), shared.delete_key("plain"), shared.num_keys()) == (True, False, 7)
    shared.multi_set(["a", "b"], ["1", b"\x00\xff"])
    assert shared.multi_get(["b", "a"]) == [b"\x00\xff", b"1"]
    shared.append("a", "2")
    shared.append("new", "x")
    assert shared.multi_get(["a", "new"]) == [b"12", b"x"]


def test_compare_set_is_torchs(shared: Any) -> None:
    assert shared.compare_set("key", "old", "new") == b"old"
    assert shared.compare_set("key", "", "first") == b"first"
    assert shared.compare_set("key", "other", "second") == b"first"
    assert shared.compare_set("key", "first", "second") == b"second"
    with pytest.raises(DistStoreError, match=r"'.*never' was not set within 0.01 s"):
        shared.wait(["never"], timedelta(seconds=0.01))


@pytest.mark.parametrize("name", ["round", "complete", "deadline", "closed", "participants", "last_heartbeats"])
@pytest.mark.parametrize("value", [None, "text", [1], {"a": 1}, 1e400])
def test_damaged_state_is_refused(name: str, value: object) -> None:
    form = json.loads(state.encode(_RendezvousState()))
    del form[name]
    if value is not None:
        form[name] = value
    with pytest.raises(ProtocolError, match="not a rendezvous state"):
        state.decode(json.dumps(form).encode())
