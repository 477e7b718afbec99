"""Random commands: the book beside a record for each unit, beside a book that is restored, and beside its replay."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edl.protocol import master
from tests.fast.master.shards.naive import Pair, drain, step

commits = st.sampled_from([master.COMMIT_REPORT, master.COMMIT_CHECKPOINT])
bounded = st.builds(
    master.DatasetSpec,
    kind=st.just("range"),
    units=st.integers(0, 30),
    shard_size=st.integers(1, 7),
    seed=st.integers(0, 9),
    shuffle=st.booleans(),
    epochs=st.integers(1, 3),
    max_failures=st.integers(1, 3),
    commit=commits,
    ignore_expiries=st.booleans(),
)
streams = st.builds(
    master.DatasetSpec,
    kind=st.just("follow"),
    shard_size=st.integers(1, 7),
    max_failures=st.integers(1, 3),
    commit=commits,
    ignore_expiries=st.booleans(),
)


@settings(max_examples=40)
@given(st.one_of(bounded, streams), st.integers(0, 2**32), st.integers(20, 120))
def test_book_agrees_with_naive_records(spec: master.DatasetSpec, seed: int, steps: int) -> None:
    pair = Pair(spec)
    choice = random.Random(seed)
    for number in range(steps):
        step(pair, choice)
        if number % 10 == 0:
            pair.check()
    drain(pair)
    pair.check()
    pair.restore()
    pair.replay()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("commit", [master.COMMIT_REPORT, master.COMMIT_CHECKPOINT])
def test_long_random_run(commit: master.Commit, stream: bool) -> None:
    """Hundreds of commands in one book, so that old marks, terms and refusals pile up."""
    spec = master.DatasetSpec(kind="x", shard_size=5, max_failures=3, commit=commit)
    if not stream:
        spec.units, spec.epochs, spec.shuffle, spec.seed = 203, 12, True, 7
    pair = Pair(spec)
    choice = random.Random(f"{commit} {stream}")
    for number in range(600):
        step(pair, choice)
        if number % 100 == 0:
            pair.check()
    assert len(pair.commands) > 200
    drain(pair)
    pair.check()
    pair.restore()
    pair.replay()
