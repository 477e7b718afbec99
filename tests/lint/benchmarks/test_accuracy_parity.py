"""The benchmark of accuracies: its churn traces, its figures, and how it reads pictures."""

from __future__ import annotations

import itertools

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")
Image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")

from benchmarks.accuracy_parity import Size, compared, trace  # noqa: E402

SIZE = Size(train=1000, test=100, epochs=3, batch=32, changes=6)


@pytest.mark.parametrize("seed", range(20))
def test_trace_trains_every_sample(seed: int) -> None:
    """A trace changes the world each time and trains every sample."""
    stays = trace(seed, SIZE)
    assert trace(seed, SIZE) == stays
    assert {stay.world for stay in stays} <= {1, 2, 3, 4}
    assert all(one.world != other.world for one, other in itertools.pairwise(stays))
    ends = [stay.until for stay in stays]
    assert ends == sorted(set(ends))
    assert (ends[-1], stays[-1].killed) == (3000, False)
    assert sum(stay.killed for stay in stays) == 2


def test_differences_of_twins_are_compared() -> None:
    static = [0.4, 0.5, 0.6]
    found = {"static": static, "elastic": [0.42, 0.5, 0.58], "ignoring": [0.2, 0.32, 0.38]}
    figures = compared(found, tested=10_000)
    assert figures["elastic_off"] == pytest.approx([0.0], abs=1e-9)
    assert figures["ignoring_off"] == pytest.approx([0.2 / (0.02 / 3**0.5)])
    assert figures["ignoring"] == pytest.approx([0.5, 0.64, 0.38 / 0.6])
    alone = compared({"static": [0.5], "elastic": [0.55], "ignoring": [0.4]}, tested=200)
    assert alone["elastic_off"] == pytest.approx([1.0])
