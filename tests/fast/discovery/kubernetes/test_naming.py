"""Objects come back as they were written, and labels select what a watcher may see."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edl.discovery import Instance
from edl.discovery.kubernetes import naming
from edl.discovery.registry import Rejected
from edl.settings import PodIdentity

LEASE = naming.LeaseRef("edl-lease-1", "uid-1")
PART = st.text("abcü ?#%._-", min_size=1, max_size=8).filter(lambda part: part not in (".", ".."))
KEY = st.lists(PART, min_size=1, max_size=6).map("/".join)


def stored(obj: dict[str, Any], version: int = 7) -> dict[str, Any]:
    obj["metadata"]["resourceVersion"] = str(version)
    return obj


def meets(selector: str, obj: dict[str, Any]) -> bool:
    labels = obj["metadata"]["labels"]
    return all(labels.get(name) == value for name, value in (part.split("=") for part in selector.split(",")))


@given(KEY, st.binary(max_size=100), st.sampled_from([None, LEASE]))
def test_key_comes_back(key: str, value: bytes, lease: naming.LeaseRef | None) -> None:
    obj = stored(naming.build_key(key, value, lease))
    entry = naming.parse_entry(obj)
    assert entry is not None
    assert (entry.key, entry.value, entry.version) == (key, value, 7)
    assert naming.lease_ref_of(obj) == lease
    assert re.fullmatch(r"[a-z0-9-]{1,63}", obj["metadata"]["name"])
    for label in obj["metadata"]["labels"].values():
        assert re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?", label)


@given(KEY, st.integers(0, 60))
def test_every_prefix_selects_its_keys(key: str, length: int) -> None:
    assert meets(naming.select_prefix(key[:length]), naming.build_key(key, b"", None))


def test_folders_keep_watchers_apart() -> None:
    obj = naming.build_key("jobs/a/nodes/7", b"", None)
    for prefix in ("jobs/b/", "job/", "jobs/a/node/", "jobs/a/nodes/7/"):
        selected = meets(naming.select_prefix(prefix), obj)
        assert selected == (prefix == "jobs/a/nodes/7/"), "below the third level the watcher itself looks"


def test_patch_removes_the_lease() -> None:
    patch = naming.build_key("a/b", b"x", None, "7")
    assert patch["metadata"]["labels"] == {naming.LABEL_LEASE: None}
    assert patch["metadata"]["ownerReferences"] is None
    assert patch["metadata"]["resourceVersion"] == "7"
    again = naming.build_key("a/b", b"x", None, "7")
    assert patch != again, "the server takes what changes nothing for no write"


@pytest.mark.parametrize("data", [None, {}, {"value": None}, {"value": "é"}, {"value": "a"}, {"value": 3}, []])
def test_spoiled_key(data: Any) -> None:
    obj = stored(naming.build_key("a", b"x", None))
    obj["binaryData"] = data
    entry = naming.parse_entry(obj)
    assert entry is None or entry.value == b""


@pytest.mark.parametrize("service", ["digits", "x" * 128, "a.b_c-d"])
def test_instance_comes_back(service: str) -> None:
    instance = Instance(service, "id with / and ü", "::1", 9, tags=("t",), meta={"k": "v"})
    for patch in (True, False):
        obj = naming.build_instance("edl-instance-1", instance, LEASE, 5, PodIdentity("p", "u"), patch=patch)
        assert naming.service_of(obj) == service
        assert meets(naming.select_service(service), obj)
        if patch:
            assert obj["metadata"]["labels"].pop(naming.LABEL_LAPSED) is None
        assert naming.parse_instance(service, obj) == naming.InstanceRecord(5, False, instance)
        assert obj["metadata"]["ownerReferences"] == [{"apiVersion": "v1", "kind": "Pod", "name": "p", "uid": "u"}]
    obj["metadata"]["labels"][naming.LABEL_LAPSED] = "true"
    assert naming.parse_instance(service, obj).lapsed


@pytest.mark.parametrize("obj", [{}, {"metadata": {"name": "x"}, "data": None}, {"data": {"instance": "[]"}}])
def test_spoiled_instance_is_rejected(obj: dict[str, Any]) -> None:
    record = naming.parse_instance("digits", obj)
    assert isinstance(record.instance, Rejected)
    assert record.since == 0
