"""When to save, and from whose memory to go on: pure decisions."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from edl.collective.checkpoint.memory.restore_plan import choose_state
from edl.collective.checkpoint.memory.slots import SlotHeader
from edl.collective.checkpoint.save_schedule import SaveSchedule


@given(st.floats(0.001, 0.5), st.floats(1e-4, 10), st.floats(1e-4, 10))
def test_saving_keeps_to_the_overhead(overhead: float, step_s: float, save_s: float) -> None:
    pace = SaveSchedule(overhead=overhead)
    assert pace.propose_steps(step_s, save_s) == 1  # the first one paid for the pages
    pace.set_next_save(0, 1)
    steps = pace.propose_steps(step_s, save_s)
    assert save_s / (steps * step_s + save_s) <= overhead * (1 + 1e-9)
    assert steps == 1 or save_s / ((steps - 1) * step_s + save_s) > overhead * (1 - 1e-9)


def test_saves_first_and_at_agreed_steps() -> None:
    """It saves at once then at the agreed steps and anew after a restart."""
    pace = SaveSchedule(interval_steps=10)
    assert pace.is_due(7)
    pace.set_next_save(7, pace.propose_steps(1.0, 0.1))
    assert [step for step in range(8, 20) if pace.is_due(step)] == [17, 18, 19]
    pace.restart()
    assert pace.is_due(3)


def test_interval_in_seconds_becomes_steps() -> None:
    pace = SaveSchedule(interval_s=5.0)
    assert (pace.propose_steps(0.5, 9.0), pace.propose_steps(7.0, 0.0)) == (10, 1)
    assert pace.propose_steps(0.0, 0.0) > 1


def test_each_rank_gets_its_own_where_it_can() -> None:
    both = [SlotHeader(3, 8, 2, rank) for rank in range(2)]
    choice = choose_state([[SlotHeader(3, 9, 2, 0), both[0]], [both[1]]])
    assert choice is not None
    assert (choice.step, choice.sources, choice.parts) == (8, (0, 1), (0, 1)), (
        "rank 1 would begin its random numbers anew"
    )
    choice = choose_state([[SlotHeader(3, 9, 2, 0), both[0]], []])
    assert choice is not None
    assert choice.step == 9, "where a host was lost, nobody has rank 1's part, and the newest counts"
    choice = choose_state([[SlotHeader(3, 9, 2, 0), both[0]], [both[1]], []])
    assert choice is not None
    assert choice.step == 9, "in a world of another size nobody's random numbers come back"


def test_a_sharded_state_needs_all_its_parts() -> None:
    newer = [SlotHeader(1, 9, 2, 0, sharded=True)]
    older = [SlotHeader(1, 8, 2, rank, sharded=True) for rank in range(2)]
    choice = choose_state([[*newer, older[0]], [older[1]]])
    assert choice is not None
    assert (choice.step, choice.sources, choice.parts) == (8, (0, 1), (0, 1))


def test_sharded_state_in_another_world() -> None:
    choice = choose_state([[SlotHeader(1, 8, 2, 0, sharded=True)], [SlotHeader(1, 8, 2, 1, sharded=True)], []])
    assert choice is not None
    assert (choice.holders, choice.sources) == ((0, 1), ())


# Four ranks: 0 and 2 hold the same shards, 1 and 3 the other ones.
_HSDP = [SlotHeader(1, 8, 4, rank, sharded=True) for rank in range(4)]
_SAME = {header: (header.rank % 2, header.rank % 2 + 2) for header in _HSDP}


def test_ranks_with_the_same_shards_stand_in() -> None:
    again = choose_state([[], [], [_HSDP[2]], [_HSDP[3]]], same=_SAME)
    assert again is not None
    assert (again.sources, again.parts, again.holders) == ((2, 3, 2, 3), (2, 3, 2, 3), (-1, -1, 2, 3))
    smaller = choose_state([[_HSDP[0]], [_HSDP[3]]], same=_SAME)
    assert smaller is not None
    assert (smaller.sources, smaller.holders) == ((), (0, -1, -1, 1))
    assert choose_state([[_HSDP[1]], [_HSDP[3]]], same=_SAME) is None, "half of the shards is no state"
    assert choose_state([[_HSDP[2]], [_HSDP[3]]]) is None, "nothing is known of who holds the same"


def test_a_stand_in_comes_before_a_replica() -> None:
    choice = choose_state([[_HSDP[0]], [_HSDP[1]]], [[_HSDP[2]], []], _SAME)
    assert choice is not None
    assert not choice.from_replicas
    choice = choose_state([[_HSDP[0]], []], [[], [_HSDP[3]]], _SAME)
    assert choice is None, "a replica does not say who else held its shards"


@given(st.lists(st.lists(st.builds(SlotHeader, st.integers(0, 2), st.integers(0, 3), st.just(3), st.integers(0, 2)),
                         max_size=2), min_size=1, max_size=5))  # fmt: skip
def test_whoever_gives_a_state_has_it(offers: list[list[SlotHeader]]) -> None:
    choice = choose_state(offers)
    assert (choice is None) == (not any(offers))
    if choice is not None:
        headers = {one for row in offers for one in row}
        newest = max((one.generation, one.step) for one in headers)
        parts = Counter((one.generation, one.step) for one in headers)
        entire = [state for state in parts if parts[state] == 3 == len(offers)]
        assert (choice.generation, choice.step) == max(entire, default=newest)
        for rank, (source, part) in enumerate(zip(choice.sources, choice.parts, strict=True)):
            assert any(choice.matches_slot(header, part) for header in offers[source])
            has = [header.rank for header in offers[rank] if choice.matches_slot(header, header.rank)]
            assert source == rank or not has or (len(offers) == 3 and rank not in has)
