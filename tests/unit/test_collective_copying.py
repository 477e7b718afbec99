"""Copies that several threads share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from edl.collective.checkpoint.copying import Copier


@pytest.fixture(params=[1, 3])
def copier(request: pytest.FixtureRequest) -> Iterator[Copier]:
    made = Copier(request.param)
    yield made
    made.close()


def test_everything_is_copied_bit_for_bit(copier: Copier) -> None:
    base = torch.randn(3000, 2000)
    sources = [
        base, base.t(), base[::2, 5], torch.tensor(3.5, dtype=torch.bfloat16), torch.empty(0, 4),
        torch.randn(7, dtype=torch.complex64).conj(), torch.arange(5_000_001, dtype=torch.uint8), base[0, 0].expand(4),
    ]  # fmt: skip
    targets = [torch.empty(source.shape, dtype=source.dtype) for source in sources]
    for _ in range(3):
        copier.copy(targets, sources)
        for target, source in zip(targets, sources, strict=True):
            assert torch.equal(target, source)
        base += 1


def test_parameters_that_require_gradients_are_copied(copier: Copier) -> None:
    source = torch.nn.Parameter(torch.ones(2_000_000))
    target = torch.zeros(2_000_000)
    copier.copy([target], [source])
    assert target.sum() == 2_000_000
    assert not target.requires_grad
