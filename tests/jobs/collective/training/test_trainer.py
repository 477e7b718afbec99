"""The update of one process, by ranks of worlds from 1 to 5: real processes, real gloo, float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from tests.jobs.collective.training import cases  # noqa: E402
from tests.jobs.collective.training.cases import Case, alone, elastic  # noqa: E402
from tests.jobs.collective.training.ranks_pool import RanksPool  # noqa: E402

pytestmark = pytest.mark.timeout(400)  # the first test waits for imports, which may take 100 s
SLOWLY = settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
CASES = st.builds(
    Case,
    length=st.integers(15, 40),
    batch=st.integers(1, 24),
    steps=st.integers(1, 5),
    most=st.tuples(*[st.none() | st.integers(1, 6)] * 5),
    around=st.sampled_from([("ddp",), ()]),
    optimizer=st.sampled_from(["sgd", "adam"]),
    clip_norm=st.none() | st.just(0.3),
)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RanksPool]:
    pool = RanksPool(5, tmp_path_factory.mktemp("ranks"))
    yield pool
    pool.close()


def assert_same(found: list[Any], wanted: list[Any]) -> None:
    for one in found:
        for mine, theirs in zip(one, wanted, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)
    assert all(torch.equal(mine, first) for one in found for mine, first in zip(one, found[0], strict=True))


def parameters(found: list[dict[str, Any]]) -> list[Any]:
    return [one["parameters"] for one in found]


@SLOWLY
@given(world=st.integers(1, 5), case=CASES)
def test_the_update_is_that_of_one_process(ranks: RanksPool, world: int, case: Case) -> None:
    found = ranks.run(world, elastic, case)
    assert_same(parameters(found), alone(case))
    for rank, one in enumerate(found):
        assert one["synchronized"] == (case.steps if world > 1 or case.around else 0)
        most = case.most[rank]
        assert most is None or one["largest"] <= most


@SLOWLY
@given(rows=st.lists(st.integers(0, 9), min_size=2, max_size=5).filter(any), case=CASES)
def test_ranks_bring_what_they_like(ranks: RanksPool, rows: list[int], case: Case) -> None:
    case = replace(case, around=(), rows=tuple(rows))
    found = ranks.run(len(rows), elastic, case)
    assert_same(parameters(found), alone(case))
    assert {one["samples"] for one in found} == {case.steps * sum(rows)}


def test_rank_without_a_row(ranks: RanksPool) -> None:
    with pytest.raises(AssertionError, match="rows=0"):
        ranks.run(3, elastic, Case(rows=(2, 0, 1)))
    ranks.run(3, elastic, Case(rows=(2, 1, 1)))


def test_worlds_change_between_steps(ranks: RanksPool) -> None:
    case = Case(length=40, batch=10, steps=1, optimizer="adam")
    state = None
    for world in (3, 1, 5, 2):
        found = ranks.run(world, elastic, replace(case, state=state))
        state = found[-1]["state"]
    assert_same(parameters(found), alone(replace(case, steps=4)))


@pytest.mark.parametrize(
    "case",
    [Case(around=("compile",)), Case(around=("ddp", "compile")), Case(around=("compile", "ddp"))]
    + [Case(network="tied", frozen=True), Case(network="tied", around=(), scaled=True, clip_norm=0.3)]
    + [Case(network="branch", most=most, around=a) for most in ((1, 2, 2), (2, 3, None)) for a in ((), ("ddp",))]
    + [Case(second=True, clip_norm=0.1, scaled=scaled, around=a) for scaled, a in ((False, ()), (True, ("ddp",)))]
    + [Case(most=(2, 2, 2), fail=(1, micro), around=a) for micro, a in ((0, ("ddp",)), (1, ("ddp",)), (1, ()))]
    + [Case(around=("fsdp",), length=20, batch=7, steps=4, most=(1, 3, None))]
    + [Case(around=("fsdp",), most=(2, 2, 2), give_up=give_up) for give_up in (0, 2)],
    ids=str,
)
def test_update_with_every_kind_of_model(ranks: RanksPool, case: Case) -> None:
    """A sharded module gets as many micro-batches on every rank; a step that is given up leaves nothing."""
    assert_same(parameters(ranks.run(3, elastic, case)), alone(case))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("part", r"a part of the model is wrapped in DistributedDataParallel.*wrap the whole"),
        ("part, compiled", r"a part of the model is wrapped in DistributedDataParallel"),
        ("sub-mesh", r"is sharded over .*HSDP over all of them"),
        ("sub-mesh, tensor parallel", r"is sharded over .*Tensor, pipeline and context"),
        ("static graph", r"static_graph"),
        ("sharded in part", r"call fully_shard\(model\), too"),
        ("other ranks", r"pass both the same group"),
        ("sampler of all ranks", r"the share of rank \d of 5, but this is rank \d of 2"),
        ("sampler of rank 0", r"the share of rank 0 of 1, but this is rank"),
    ],
)
def test_unaveraged_gradients_are_refused(ranks: RanksPool, kind: str, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        ranks.run(2, cases.refused, kind)


def test_half_of_a_sharded_step_is_kept(ranks: RanksPool) -> None:
    with pytest.raises(AssertionError, match="FSDP cannot drop the gradients"):
        ranks.run(2, elastic, Case(around=("fsdp",), most=(3, 3), give_up=1))


@pytest.mark.parametrize(
    ("world", "ddp", "counted"),
    [(1, True, False), (2, False, False), (2, True, True), (3, True, False), (3, False, True)],
)
def test_tokens_weigh_the_same(ranks: RanksPool, world: int, ddp: bool, counted: bool) -> None:
    """However the padding is spread over micro-batches and ranks."""
    assert_same(ranks.run(world, cases.tagged, ddp, counted), cases.tagged_alone())


def test_ranks_agree_on_an_automatic_batch(ranks: RanksPool) -> None:
    """However far each has read ahead."""
    found = ranks.run(3, cases.automatic)
    (last,) = {last for _, _, last in found}
    assert 8 < last <= 40
    steps = list(zip(*[sizes for sizes, _, _ in found], strict=True))
    assert sum(steps[0]) == 8
    assert {max(step) - min(step) for step in steps} <= {0, 1}
    assert sorted(index for _, indices, _ in found for index in indices) == list(range(1200))
