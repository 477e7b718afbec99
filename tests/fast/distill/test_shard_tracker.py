"""Shards on their way: every part is handed out until it is answered, whatever fails; bad rows are found by halves."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from edl.distill.labelling.bad_rows import find_bad_rows
from edl.distill.labelling.shard_tracker import RowShard, ShardTracker
from edl.protocol.tensors import Array


def parts_of(shard: RowShard, size: int) -> list[Array]:
    return [np.arange(at, min(at + size, shard.stop)) for at in range(shard.start, shard.stop, size)]


@given(st.integers(0, 2**32), st.integers(1, 8), st.integers(1, 7))
def test_every_part_is_answered_or_failed(seed: int, shards: int, size: int) -> None:
    """Each row is answered once after its last hand-out, but for those of shards that failed."""
    chance = random.Random(seed)
    coming = [RowShard(at * 10, at * 10 + chance.randint(0, 10)) for at in range(shards)]
    rows_of = {shard: set(range(shard.start, shard.stop)) for shard in coming}
    tracker, handed_out, answered, finished, failed = ShardTracker(), [], [], [], []
    while coming or not tracker.idle:
        event = chance.choice(("begin", "hand_out", "hand_out", "take", "take", "fail"))
        if event == "begin" and coming:
            shard = coming.pop()
            tracker.begin(shard, parts_of(shard, size))
        elif event == "hand_out" and (part := tracker.hand_out()) is not None:
            handed_out.append(part)
        elif event == "take" and handed_out:
            answered += handed_out.pop(0).tolist()
            tracker.take()
        elif event == "fail" and chance.random() < 0.2 and (shard := tracker.fail()) is not None:
            assert handed_out[0][0] in rows_of[shard], "the shard of the part that was handed out first"
            handed_out.clear()
            failed.append(shard)
        finished += tracker.pop_answered()
    assert not tracker.has_waiting
    assert not tracker.has_answered
    assert sorted([*finished, *failed], key=id) == sorted(rows_of, key=id), "each shard once"
    expected = sorted(row for shard in finished for row in rows_of[shard])
    in_failed = {row for shard in failed for row in rows_of[shard]}
    assert sorted(row for row in answered if row not in in_failed) == expected


def test_a_shard_without_parts_is_answered() -> None:
    tracker, shard = ShardTracker(), RowShard(0, 10)
    tracker.begin(shard, ())
    assert tracker.idle
    assert tracker.pop_answered() == [shard]
    assert tracker.hand_out() is None
    assert tracker.fail() is None


@given(st.sets(st.integers(0, 99), max_size=10), st.integers(1, 40))
def test_bad_rows_are_found_by_halves(bad: set[int], size: int) -> None:
    """All other rows are labelled, once each."""
    labelled: list[int] = []

    def attempt(part: Array) -> str:
        if found := bad & {*part.tolist()}:
            return f"row {min(found)}"
        labelled.extend(part.tolist())
        return ""

    found = find_bad_rows(parts_of(RowShard(0, 100), size), attempt)
    assert found.why == {row: f"row {row}" for row in bad}
    assert (found.untried, found.labelled) == (0, 100 - len(bad))
    assert sorted([*labelled, *bad]) == list(range(100))


def test_search_for_bad_rows_can_be_ended() -> None:
    tried: list[int] = []

    def attempt(part: Array) -> str:
        tried.append(len(part))
        return "all are bad"

    found = find_bad_rows(parts_of(RowShard(0, 64), 32), attempt, lambda bad: bad < 3)
    assert found.why == dict.fromkeys(range(3), "all are bad")
    assert found.untried == 61
    assert len(tried) < 20
