"""Copies that several threads share, beside training, and from a GPU: `FakeGpu` stands for one, with its streams."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from edl.collective.checkpoint.memory import copying
from edl.collective.checkpoint.memory.copying import PinnedStaging, TensorCopier


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
        torch.nn.Parameter(torch.ones(7)),
    ]  # fmt: skip
    targets = [torch.empty(source.shape, dtype=source.dtype) for source in sources]
    for _ in range(2):
        copier.copy_tensors(targets, sources)
        for target, source in zip(targets, sources, strict=True):
            assert torch.equal(target, source)
            assert not target.requires_grad
        base += 1


class Broken:
    """Bytes that cannot be copied, as a GPU's are after an error."""

    def __array__(self, *_: object, **__: object) -> None:
        raise RuntimeError("the copy failed")


@pytest.mark.parametrize("background", [False, True])
def test_failed_copy_is_an_error(copier: TensorCopier, background: bool) -> None:
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


DEVICE = torch.device("cuda", 0)


class FakeStream:
    """`torch.cuda.Stream`: work in order, done when it is waited for."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.queue: list[Callable[[], object]] = []

    def wait_stream(self, other: FakeStream) -> None:
        length = len(other.queue)
        self.queue.append(lambda: other.run(length))

    def run(self, until: int | None = None) -> None:
        """Do what was queued, or only the first so many of it. Done work leaves a gap, so that positions stay."""
        for at in range(len(self.queue) if until is None else until):
            work, self.queue[at] = self.queue[at], _nothing
            work()

    def synchronize(self) -> None:
        self.run()


class FakeEvent:
    """`torch.cuda.Event`."""

    def record(self, stream: FakeStream) -> None:
        self.stream, self.at = stream, len(stream.queue)

    def synchronize(self) -> None:
        self.stream.run(self.at)


class FakeGpuTensor(torch.Tensor):
    """Says that it is on a GPU; copies from it are queued on the current stream."""

    gpu: FakeGpu

    @property
    def device(self) -> torch.device:
        return DEVICE

    def record_stream(self, stream: FakeStream) -> None:
        FakeGpuTensor.gpu.recorded.append(stream)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.copy_ and isinstance(args[1], FakeGpuTensor) and not isinstance(args[0], FakeGpuTensor):
            target, source = args[0], args[1].as_subclass(torch.Tensor)
            FakeGpuTensor.gpu.copies.append((FakeGpuTensor.gpu.current, bool((kwargs or {}).get("non_blocking"))))
            FakeGpuTensor.gpu.current.queue.append(lambda: target.copy_(source))
            if FakeGpuTensor.gpu.eager or not (kwargs or {}).get("non_blocking"):
                FakeGpuTensor.gpu.current.run()
            return target
        return super().__torch_function__(func, types, args, kwargs or {})


class FakeGpu:
    """The functions of `torch.cuda` that are used."""

    def __init__(self) -> None:
        self.default = self.current = FakeStream()
        self.eager = False
        self.copies: list[tuple[FakeStream, bool]] = []
        self.recorded: list[FakeStream] = []

    @contextlib.contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    fake = FakeGpu()
    monkeypatch.setattr(FakeGpuTensor, "gpu", fake, raising=False)
    for name, value in {
        "Stream": FakeStream,
        "Event": FakeEvent,
        "stream": fake.stream,
        "current_stream": lambda device=None: fake.current,
        "is_initialized": lambda: True,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return fake


def _nothing() -> None:
    pass


def on_gpu(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_subclass(FakeGpuTensor)


def test_copy_sees_no_later_updates(gpu: FakeGpu) -> None:
    """The optimizer's step of before is queued when the state is saved; the next one comes when the save returned."""
    plain = torch.arange(5_000_000, dtype=torch.float32)
    expected = plain + 1
    gpu.default.queue.append(lambda: plain.add_(1))
    target = torch.empty_like(plain)
    copier = TensorCopier(2)
    copier.copy_tensors([target], [on_gpu(plain)])
    plain.zero_()
    gpu.default.run()
    assert torch.equal(target, expected)
    assert {(stream is gpu.default, non_blocking) for stream, non_blocking in gpu.copies} == {(False, True)}
    assert gpu.recorded, "its memory is not given away while it is copied"
    copier.close()


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("nbytes", [64, 1 << 20])
def test_small_buffer_copies_are_exact(gpu: FakeGpu, nbytes: int, eager: bool) -> None:
    gpu.eager = eager
    sources = [
        torch.randn(33, 7), torch.randn(12, 5).t(), torch.tensor(2.5, dtype=torch.bfloat16), torch.empty(0, 3),
        torch.randn(9, dtype=torch.complex64).conj(), torch.arange(501) % 3 == 0, torch.randn(4, 4)[:, 1],
    ]  # fmt: skip
    targets = [torch.zeros(source.shape, dtype=source.dtype) for source in sources]
    staging = PinnedStaging(nbytes)

    def write(pieces: Any) -> None:
        for to, of in pieces:
            to[:] = of

    for _ in range(2):
        staging.copy_tensors(targets, [on_gpu(source) for source in sources], write)
        for target, source in zip(targets, sources, strict=True):
            assert torch.equal(target, source)
        sources[0] += 1
