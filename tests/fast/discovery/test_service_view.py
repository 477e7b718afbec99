"""What a watcher believes while the registry is away, and after it came back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from edl.discovery import Instance, Snapshot
from edl.discovery.common.service_view import ServiceView, build_snapshot
from edl.discovery.registry import Rejected


def teachers(*names: str) -> tuple[Instance, ...]:
    return tuple(Instance("digits", name, "127.0.0.1", 9000) for name in names)


def answer(*names: str) -> Snapshot:
    return Snapshot("digits", teachers(*names))


def test_answers_pass_while_nothing_fails() -> None:
    follower = ServiceView("digits")
    for names in ("", "ab", "b", ""):
        assert follower.answered(answer(*names), 1.0) == answer(*names)
        assert follower.recheck_at is None


def test_last_known_stay_during_an_outage() -> None:
    """The last known stay while the registry is away."""
    follower = ServiceView("digits")
    follower.answered(answer("a"), 1.0)
    assert follower.failed("down") == Snapshot("digits", teachers("a"), stale="down")
    assert follower.failed("still down") == Snapshot("digits", teachers("a"), stale="still down")


def test_none_known_before_the_first_answer() -> None:
    """Nobody is known before the first answer and that is said."""
    follower = ServiceView("digits")
    assert follower.failed("down") == Snapshot("digits", (), stale="down")
    assert follower.answered(answer(), 1.0) == answer()


def test_emptied_registry_gets_time_to_fill() -> None:
    """A registry that lost its memory gets time to fill again."""
    follower = ServiceView("digits", settle_s=3.0)
    follower.answered(answer("a", "b"), 1.0)
    follower.failed("down")
    returned = follower.answered(answer(), 10.0)
    assert returned.instances == teachers("a", "b")
    assert "2 instances" in returned.stale
    assert follower.recheck_at == 13.0
    assert follower.answered(answer("b", "c"), 12.0).instances == teachers("a", "b", "c")
    assert follower.answered(answer("b", "c"), 13.0) == answer("b", "c")
    assert follower.recheck_at is None


def test_view_is_fresh_once_all_are_back() -> None:
    """Nothing is stale as soon as all are back and a relapse is borne for a while."""
    follower = ServiceView("digits", settle_s=3.0)
    follower.answered(answer("a"), 1.0)
    follower.failed("down")
    assert follower.answered(answer(), 10.0).stale
    assert follower.answered(answer("a", "b"), 10.5) == answer("a", "b")
    assert follower.recheck_at is None
    assert follower.answered(answer("b"), 11.0).instances == teachers("a", "b"), "its lease may have lapsed meanwhile"
    assert follower.recheck_at == 13.0
    assert follower.answered(answer("b"), 13.0) == answer("b"), "a departure after that is a departure"


def test_return_with_nonsense_is_not_kept() -> None:
    follower = ServiceView("digits")
    follower.answered(answer("a"), 1.0)
    follower.failed("down")
    nonsense = Snapshot("digits", (), (Rejected("a", "port is missing"),))
    assert follower.answered(nonsense, 2.0) == nonsense


def test_of_two_with_one_id_the_later_counts() -> None:
    old, new = Instance("digits", "a", "h", 1), Instance("digits", "a", "h", 2)
    assert build_snapshot("digits", [old, new]).instances == (new,)
    assert build_snapshot("digits", [old, Rejected("a", "why")]) == Snapshot("digits", (), (Rejected("a", "why"),))


def test_one_that_lapsed_is_listed_once() -> None:
    follower = ServiceView("digits", settle_s=3.0)
    follower.answered(answer("a", "b"), 1.0)
    lapsed = Snapshot("digits", teachers("b"), lapsed=teachers("a"))
    assert follower.answered(lapsed, 2.0) == lapsed
    assert follower.failed("down") == Snapshot("digits", teachers("b"), stale="down", lapsed=teachers("a"))
    back = follower.answered(Snapshot("digits", (), lapsed=teachers("a", "b")), 3.0)
    assert (back.instances, back.lapsed) == (teachers("b"), teachers("a")), "b gets time to renew"
    assert follower.answered(Snapshot("digits", (), lapsed=teachers("a", "b")), 6.0).lapsed == teachers("a", "b")


def test_only_those_that_were_ready_lapse() -> None:
    draining = Instance("digits", "c", "h", 1, state="draining")
    live, over = teachers("a"), teachers("a", "b")
    found = build_snapshot("digits", live, (*over, draining, Rejected("d", "why")))
    assert found == Snapshot("digits", teachers("a"), lapsed=teachers("b"))


events = st.lists(st.tuples(st.sets(st.sampled_from("abcd")) | st.none(), st.floats(0, 2)), max_size=30)


@given(events)
def test_live_are_shown_and_the_gone_vanish(events: list[tuple[set[str] | None, float]]) -> None:
    """Nobody live is ever hidden and the gone vanish in time."""
    follower = ServiceView("digits", settle_s=3.0)
    now, up_since, known = 0.0, 0.0, set[str]()
    for live, passed in events:
        now += passed
        if live is None:
            snapshot = follower.failed("down")
            assert snapshot.stale
            assert {entry.id for entry in snapshot.instances} == known
            up_since = float("inf")
            continue
        up_since = min(up_since, now)
        snapshot = follower.answered(answer(*sorted(live)), now)
        known = {entry.id for entry in snapshot.instances}
        assert live <= known
        assert [entry.id for entry in snapshot.instances] == sorted(known)
        assert bool(snapshot.stale) == (known != live), "whoever is shown without being live is explained"
        if now >= up_since + 3.0:
            assert known == live
