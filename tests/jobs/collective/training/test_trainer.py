"""The update of one process, by ranks of worlds from 1 to 5: real processes, real gloo, float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from tests.jobs.collective.training.ranks_pool import RanksPool  # noqa: E402
from tests.jobs.collective.training.runs import Run, alone, automatic, elastic, noise, sharded  # noqa: E402

pytestmark = pytest.mark.timeout(400)  # the first test waits for imports, which may take 100 s, and has 120 examples
BATCHES = st.integers(1, 24)
RUNS = st.builds(
    Run,
    length=st.integers(15, 40),
    batch=BATCHES,
    steps=st.integers(1, 5),
    most=st.tuples(*[st.none() | st.integers(1, 6)] * 5),
    wrapped=st.booleans(),
    optimizer=st.sampled_from(["sgd", "adam"]),
    clip_norm=st.none() | st.just(0.3),
)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RanksPool]:
    pool = RanksPool(5, tmp_path_factory.mktemp("ranks"))
    yield pool
    pool.close()


def assert_same(found: list[dict[str, Any]], wanted: list[Any]) -> None:
    for one in found:
        for mine, theirs in zip(one["parameters"], wanted, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)
    for mine, first in zip(found[-1]["parameters"], found[0]["parameters"], strict=True):
        assert torch.equal(mine, first), "ranks differ"


@settings(
    max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(world=st.integers(1, 5), run=RUNS)
def test_the_update_is_that_of_one_process(ranks: RanksPool, world: int, run: Run) -> None:
    found = ranks.run(world, elastic, run)
    assert_same(found, alone(run))
    for rank, one in enumerate(found):
        assert one["synchronized"] == (run.steps if world > 1 or run.wrapped else 0)
        most = run.most[rank]
        assert most is None or max(max(rows) for rows in one["micro_rows"]) <= most


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(rows=st.lists(st.integers(0, 9), min_size=2, max_size=5).filter(any), run=RUNS)
def test_ranks_bring_what_they_like(ranks: RanksPool, rows: list[int], run: Run) -> None:
    """It is with ranks that bring what they like."""
    run = replace(run, sampled=False, wrapped=False, rows=tuple(rows))
    found = ranks.run(len(rows), elastic, run)
    assert_same(found, alone(run))
    assert {one["samples"] for one in found} == {run.steps * sum(rows)}


def test_worlds_change_between_steps(ranks: RanksPool) -> None:
    """Worlds that change between steps go on as if nothing happened."""
    run = Run(length=40, batch=10, steps=1, most=(2, 3, None, 1, 4), optimizer="adam")
    state = None
    for world in (3, 1, 5, 2):
        found = ranks.run(world, elastic, replace(run, state=state))
        state = found[-1]["state"]
    assert_same(found, alone(replace(run, steps=4)))


def test_rank_without_a_row(ranks: RanksPool) -> None:
    """A rank without a row is an error on all ranks if the module needs one."""
    with pytest.raises(AssertionError, match="rows=0"):
        ranks.run(3, elastic, Run(sampled=False, rows=(2, 0, 1)))
    ranks.run(3, elastic, Run(sampled=False, rows=(2, 1, 1)))


@pytest.mark.parametrize("wrapped", [True, False])
def test_a_gradient_scaler_changes_nothing(ranks: RanksPool, wrapped: bool) -> None:
    run = Run(clip_norm=0.3, scaled=True, wrapped=wrapped, most=(2, 3, None, None, None))
    assert_same(ranks.run(3, elastic, run), alone(run))


@pytest.mark.parametrize("world", [2, 3, 5])
def test_noise_is_the_same_in_every_world(ranks: RanksPool, world: int) -> None:
    """The noise is the same in every world."""
    found = ranks.run(world, noise, (4, None, 2, None, 1))
    assert len(set(found)) == 1
    variance, square = found[0]
    assert variance == pytest.approx(10.0, rel=0.15)
    assert square == pytest.approx(5.0, rel=0.15)


def test_ranks_agree_on_an_automatic_batch(ranks: RanksPool) -> None:
    """Ranks agree on an automatic batch however far each has read ahead."""
    found = ranks.run(3, automatic)
    (last,) = {last for _, _, last in found}
    assert 8 < last <= 40
    steps = list(zip(*[sizes for sizes, _, _ in found], strict=True))
    assert sum(steps[0]) == 8
    assert {max(step) - min(step) for step in steps} <= {0, 1}
    assert sorted(index for _, indices, _ in found for index in indices) == list(range(1200))


@pytest.mark.parametrize("world", [2, 3])
def test_sharded_ranks_have_equal_batches(ranks: RanksPool, world: int) -> None:
    """A sharded module gets as many micro batches on every rank."""
    run = Run(length=20, batch=7, steps=4, most=(1, 3, None, None, None))
    wanted = alone(run)
    for found in ranks.run(world, sharded, run):
        for mine, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)
