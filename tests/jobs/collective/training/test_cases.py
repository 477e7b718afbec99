"""The update of one process with models and optimizers of every kind, and refusals where it cannot be that."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from tests.jobs.collective.training import cases  # noqa: E402
from tests.jobs.collective.training.cases import Case  # noqa: E402
from tests.jobs.collective.training.ranks_pool import RanksPool  # noqa: E402


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RanksPool]:
    pool = RanksPool(3, tmp_path_factory.mktemp("ranks"))
    yield pool
    pool.close()


AROUND = [(), ("ddp",)]


@pytest.mark.parametrize(
    "case",
    [Case(around=("compile",)), Case(around=("ddp", "compile")), Case(around=("compile", "ddp"))]
    + [Case(network=network, around=around) for network in ("tied", "branch") for around in AROUND]
    + [Case(network="branch", around=around, most=(1, 2, 2)) for around in AROUND]
    + [Case(frozen=True, around=around) for around in AROUND]
    + [Case(second=True, clip_norm=0.1, scaled=scaled, around=a) for scaled in (False, True) for a in AROUND]
    + [Case(most=(2, 2, 2), fail=(1, micro), around=around) for micro in (0, 1) for around in AROUND],
    ids=str,
)
def test_the_update_is_that_of_one_process(ranks: RanksPool, case: Case) -> None:
    wanted = cases.alone(case)
    for found in ranks.run(3, cases.elastic, case):
        for mine, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("around", AROUND)
def test_half_floats_are_alike_on_all_ranks(ranks: RanksPool, around: tuple[str, ...]) -> None:
    """With half floats it is as far as they go and the same on all ranks."""
    case = Case(dtype=torch.bfloat16, around=around)
    found = ranks.run(3, cases.elastic, case)
    for one in found:
        for mine, theirs, first in zip(one, cases.alone(case), found[0], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-2, atol=1e-2)
            assert torch.equal(mine, first)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("part", r"a part of the model is wrapped in DistributedDataParallel.*wrap the whole"),
        ("sub-mesh", r"is sharded over .*HSDP over all of them"),
        ("sub-mesh, tensor parallel", r"is sharded over .*Tensor, pipeline and context"),
        ("part, compiled", r"a part of the model is wrapped in DistributedDataParallel"),
        ("static graph", r"static_graph"),
        ("sharded in part", r"call fully_shard\(model\), too"),
        ("other ranks", r"pass both the same group"),
    ],
)
def test_unaveraged_gradients_are_refused(ranks: RanksPool, kind: str, message: str) -> None:
    """Gradients that would not be averaged once are refused."""
    with pytest.raises(AssertionError, match=message):
        ranks.run(2, cases.refused, kind)


def test_sharded_step_is_discarded_cleanly(ranks: RanksPool) -> None:
    """A sharded step is given up cleanly or not at all."""
    wanted = cases.alone(Case())
    for given_up in (0, 2):
        for found in ranks.run(2, cases.sharded, given_up):
            for mine, theirs in zip(found, wanted, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)
    with pytest.raises(AssertionError, match="FSDP cannot forget the gradients"):
        ranks.run(2, cases.sharded, 1)


def test_sampler_and_trainer_of_other_ranks(ranks: RanksPool) -> None:
    """A sampler and a trainer of different ranks are refused."""
    with pytest.raises(AssertionError, match=r"the share of rank \d of 3, but this is rank \d of 2"):
        ranks.run(2, cases.other_group, None)
    with pytest.raises(AssertionError, match="the share of rank 0 of 1, but this is rank"):
        ranks.run(2, cases.other_group, (0, 1))


@pytest.mark.parametrize("ddp", [False, True])
def test_no_rank_normalizes_one_row(ranks: RanksPool, ddp: bool) -> None:
    """Of the last four samples three ranks would have two, one and one, and torch refuses to normalize one."""
    found = ranks.run(3, functools.partial(cases.normalized, ddp=ddp))
    assert all(torch.equal(mine, first) for one in found for mine, first in zip(one, found[0], strict=True))


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("ddp", [False, True])
@pytest.mark.parametrize("counted", [False, True])
def test_tokens_weigh_the_same(ranks: RanksPool, world: int, ddp: bool, counted: bool) -> None:
    """However the padding is spread over micro-batches and ranks."""
    wanted = cases.tagged_alone()
    for found in ranks.run(world, functools.partial(cases.tagged, ddp=ddp, counted=counted and world > 1)):
        for mine, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1.0, -1.0], r"weights= of rank 1: .*from 0 on"),
        ([1.0, float("nan")], r"weights= of rank 1"),
        ([1.0, 1.0, 1.0], r"here are 3 for 2 rows|weights= of rank 1"),
        ([0.0, 0.0], r"are 0 for all rows of all ranks"),
    ],
)
def test_weights_that_are_none_are_refused(ranks: RanksPool, weights: list[float], message: str) -> None:
    """On all ranks alike: none waits for one that has failed."""
    with pytest.raises(AssertionError, match=message):
        ranks.run(2, cases.weighed_wrongly, weights)
