"""Which Leases are over is decided by what was seen, and when."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edl.discovery.kubernetes.expiry import LeaseObservations
from edl.discovery.kubernetes.naming import build_lease, ttl_of


def lease(name: str = "a", version: int = 1, ttl_s: float = 10.0, **rest: Any) -> dict[str, Any]:
    made = build_lease(name, "lease", "me", ttl_s, None)
    made["metadata"] |= {"uid": f"uid-{name}", "resourceVersion": str(version), **rest}
    return made


def over(observations: LeaseObservations, now_s: float) -> list[str]:
    return [found.name for found in observations.expired(now_s)]


def test_length_begins_when_a_change_is_seen() -> None:
    observations = LeaseObservations()
    assert observations.note(lease(), 0.0)
    assert not observations.note(lease(), 9.0), "the same again is no renewal"
    assert over(observations, 9.9) == []
    assert over(observations, 10.0) == ["a"]
    assert observations.next_expiry_s() == 10.0
    assert not observations.note(lease(version=2), 9.0)
    assert over(observations, 18.9) == []
    (found,) = observations.expired(19.0)
    assert (found.uid, found.resource_version) == ("uid-a", "2"), "it must still be as it was seen"


def test_clocks_of_others_do_not_count() -> None:
    observations = LeaseObservations()
    found = lease()
    found["spec"]["renewTime"] = "1970-01-01T00:00:00.000000Z"
    observations.note(found, 0.0)
    assert over(observations, 9.9) == []


def test_new_lease_of_a_name_is_seen() -> None:
    observations = LeaseObservations()
    observations.note(lease(), 0.0)
    observations.note(lease(uid="another"), 5.0)
    assert over(observations, 14.9) == []


def test_what_was_not_seen_does_not_count() -> None:
    observations = LeaseObservations()
    for name in "abc":
        observations.note(lease(name), 0.0)
    observations.postpone_lease("a", 5.0)
    observations.postpone_lease("unknown", 5.0)
    assert over(observations, 10.0) == ["b", "c"]
    observations.postpone(11.0)
    assert over(observations, 20.9) == []
    observations.replace({"b": lease("b"), "d": lease("d")}, 30.0)
    assert len(observations) == 2
    assert over(observations, 39.9) == []
    assert over(observations, 40.0) == ["b", "d"]
    observations.forget("b")
    assert over(observations, 40.0) == ["d"]


@pytest.mark.parametrize("text", ["0.6", "86400", "1e1"])
def test_ttl_is_read(text: str) -> None:
    found = lease()
    found["metadata"]["annotations"]["edl.io/ttl-s"] = text
    assert ttl_of(found) == float(text)


@pytest.mark.parametrize("text", ["", "nan", "inf", "-1", "0", "soon", None, [], "1" * 5000])
def test_nonsense_falls_back_on_the_spec(text: Any) -> None:
    found = lease(ttl_s=3.0)
    found["metadata"]["annotations"]["edl.io/ttl-s"] = text
    assert ttl_of(found) == 3.0
    found["spec"] = None
    assert ttl_of(found) is None
    observations = LeaseObservations()
    observations.note(found, 0.0)
    assert over(observations, 1e9) == [], "what has no length is removed by people"


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0.0, 30.0)), max_size=30))
def test_no_lease_ends_within_its_length(steps: list[tuple[str, float]]) -> None:
    """Whatever the order of renewals: what was seen to change less than its length ago is not over."""
    observations = LeaseObservations()
    now_s, seen = 0.0, {}
    for version, (name, wait_s) in enumerate(steps, 1):
        now_s += wait_s
        observations.note(lease(name, version), now_s)
        seen[name] = now_s
        assert set(over(observations, now_s)) == {other for other, at_s in seen.items() if now_s >= at_s + 10.0}
