"""Copies that several threads share."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from edl.collective.checkpoint.memory import copying
from edl.collective.checkpoint.memory.copying import TensorCopier


@pytest.fixture(params=[1, 3])
def copier(request: pytest.FixtureRequest) -> Iterator[TensorCopier]:
    made = TensorCopier(request.param)
    yield made
    made.close()


def test_everything_is_copied_bit_for_bit(copier: TensorCopier) -> None:
    base = torch.randn(3000, 2000)
    sources = [
        base, base.t(), base[::2, 5], torch.tensor(3.5, dtype=torch.bfloat16), torch.empty(0, 4),
        torch.randn(7, dtype=torch.complex64).conj(), torch.arange(5_000_001, dtype=torch.uint8), base[0, 0].expand(4),
    ]  # fmt: skip
    targets = [torch.empty(source.shape, dtype=source.dtype) for source in sources]
    for _ in range(3):
        copier.copy_tensors(targets, sources)
        for target, source in zip(targets, sources, strict=True):
            assert torch.equal(target, source)
        base += 1


def test_trainable_parameters_are_copied(copier: TensorCopier) -> None:
    """Parameters that require gradients are copied."""
    source = torch.nn.Parameter(torch.ones(2_000_000))
    target = torch.zeros(2_000_000)
    copier.copy_tensors([target], [source])
    assert target.sum() == 2_000_000
    assert not target.requires_grad


class Broken:
    """Bytes that cannot be copied, as a GPU's are after an error."""

    def __array__(self, *_: object, **__: object) -> None:
        raise RuntimeError("the copy failed")


@pytest.mark.parametrize("background", [False, True])
def test_failed_copy_is_an_error(copier: TensorCopier, background: bool) -> None:
    """A copy that fails is an error and nothing follows from it."""
    whole = [(np.zeros(8), np.ones(8)) for _ in range(20)]
    done: list[int] = []
    job = copying._Job([*whole[:5], (np.zeros(3), Broken()), *whole[5:]], lambda: done.append(1))
    if background:
        copier._submit(job)
        copier._begun = job
        with pytest.raises(RuntimeError, match="the copy failed"):
            copier.finish_copy()
    else:
        job.work()
        with pytest.raises(RuntimeError, match="the copy failed"):
            job.done.result()
    assert not done


def test_uncopyable_is_left_to_the_caller(copier: TensorCopier, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread's current stream on a GPU is not the caller's."""
    threads: list[str] = []
    copy = torch.Tensor.copy_

    def noted(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        threads.append(threading.current_thread().name)
        return copy(self, other)

    monkeypatch.setattr(torch.Tensor, "copy_", noted)
    base = torch.randn(3000, 2000)
    copier.start_copy([torch.empty(2000, 3000)], [base.t()], lambda: None)
    copier.finish_copy()
    assert threads == ["MainThread"]
