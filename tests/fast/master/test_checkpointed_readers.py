"""Readers whose position is part of a checkpoint: each sample once, relative to the state that survives."""

from __future__ import annotations

import json
from typing import Any

import pytest

from edl.background import start_call
from edl.errors import SettingsError
from edl.master import MasterClient
from tests.fast.master.conftest import Lead, Read, shards
from tests.waiting import DEADLINE_S, wait_until


def test_a_position_within_a_shard(led: Lead, read: Read) -> None:
    led(30, commit="checkpoint")
    first = read("a", prefetch=1)
    samples = first.samples()
    before = [next(samples) for _ in range(13)]
    state = json.loads(json.dumps(first.state_dict()))
    lost = [next(samples) for _ in range(9)]
    first.load_state_dict(state)
    again = list(first.samples())
    assert set(lost) <= set(again)
    assert sorted(before + again) == list(range(30))
    first.state_dict()


def test_a_mark_needs_such_a_data_set(led: Lead, read: Read) -> None:
    led(100)
    reader = read()
    next(reader)
    with pytest.raises(SettingsError, match='commit="checkpoint"'):
        reader.state_dict()
    with pytest.raises(SettingsError):
        reader.load_state_dict({"format": 1, "job": "job", "dataset": "other", "session": "x", "mark": 1})
    with pytest.raises(SettingsError):
        reader.load_state_dict({})


def test_the_end_counts_no_unmarked_shard(led: Lead, read: Read, caplog: pytest.LogCaptureFixture) -> None:
    """A process that is killed after its reader's end, and before its last checkpoint, goes back to the one before."""
    master = led(100, commit="checkpoint")
    with read("a") as first:
        samples = first.samples()
        before = [next(samples) for _ in range(35)]
        state = first.state_dict()
        assert len(before + list(samples)) == 100
    assert "7 shards of d were done after the last state_dict()" in caplog.text
    assert not master.done
    with read("a") as second:
        second.load_state_dict(state)
        assert sorted(before + list(second.samples())) == list(range(100))
        second.state_dict()
    assert master.wait_done(DEADLINE_S)


def test_lives_without_marks_hide_none(led: Lead, read: Read) -> None:
    """A process that was killed twice before its first checkpoint was on disk, the second time before any mark."""
    led(40, commit="checkpoint")
    with read("rank0") as first:
        first.start_over()
        samples = first.samples()
        for _ in range(25):
            next(samples)
        first.state_dict()
    with read("rank0") as second:
        next(second.samples())
    with read("rank0") as third:
        third.start_over()
        assert sorted(third.samples()) == list(range(40))


def test_a_second_resumer_waits(led: Lead, read: Read, caplog: pytest.LogCaptureFixture) -> None:
    """A reader that lives holds the position, until it is closed."""
    led(40, commit="checkpoint")
    first = read("a")
    before = next(first.samples())
    state = first.state_dict()
    second, third = read("b"), read("c")
    second.load_state_dict(state)
    call = start_call("edl-test", lambda: third.load_state_dict(state))
    wait_until(lambda: "another reader may hold the position" in caplog.text, "a reader that waits")
    assert not call.done()
    second.close()
    call.result(DEADLINE_S)
    assert sorted([before, *third.samples()]) == list(range(40))


@pytest.mark.parametrize("anew", [True, False])
def test_going_back_waits_for_a_master(lead: Lead, led: Lead, read: Read, anew: bool) -> None:
    master = led(40, commit="checkpoint")
    reader = read("a")
    samples = reader.samples()
    before = [next(samples) for _ in range(15)]
    state = reader.state_dict()
    next(samples)
    master.close()
    call = start_call("edl-test", reader.start_over if anew else lambda: reader.load_state_dict(state))
    wait_until(lambda: reader.away_s > 0, "an attempt that fails")
    lead()
    call.result(DEADLINE_S)
    assert sorted([*reader.samples(), *([] if anew else before)]) == list(range(40))


@pytest.mark.parametrize("commit", [True, False])
def test_closing_counts_or_gives_back(led: Lead, read: Read, client: MasterClient, commit: bool) -> None:
    led(50, commit="checkpoint")
    reader = read()
    for _ in range(5):
        next(reader)
    reader.close(commit=commit)
    assert shards(client)["done" if commit else "todo"] >= 4


@pytest.mark.parametrize("state", [None, 5, "x", [], {"mark": None}, {"mark": 1.5}, {"mark": -1}, {"mark": 10**20}])
def test_garbage_is_no_position(led: Lead, read: Read, state: Any) -> None:
    led(40, commit="checkpoint")
    reader = read("w")
    next(reader)
    saved = reader.state_dict()
    garbage = saved | state if isinstance(state, dict) else state
    with pytest.raises(SettingsError, match="is not the position of a ShardReader"):
        reader.load_state_dict(garbage)
    with pytest.raises(SettingsError, match="nothing is kept of"):
        reader.load_state_dict(saved | {"session": "another"})
    reader.load_state_dict(saved)
