"""What serving costs on a GPU: images and tokens per second through `edl serve`, against the same model in a loop.

A ResNet-50 under bfloat16 autocast with batches of 128 images, and a Llama of about 1 billion parameters in bfloat16
with the 64 most likely tokens of each, both with random weights. `served_vs_local_images` and `served_vs_local_tokens`
divide the rate of a reader in another process by that of a loop that calls the model with the same batches, copies the
inputs to the GPU and the answers back. `uint8_vs_float32` divides the served rate of uint8 images, which the teacher
normalizes on the GPU, by that of float32 images. `pinned_vs_pageable` divides the rate of a loop that copies its images
through pinned memory by that of the plain loop; `edl serve` does not pin. Each side has the GPU for itself while it is
measured. The notes say for which share of the time the GPU computed nothing while it served, by CUDA events
around the model.

Without a GPU the models are tiny, which shows that the benchmark works and measures nothing.
"""

from __future__ import annotations

import itertools
import mmap
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks._harness import Goal, Options, divide, main, note, take_turns
from edl.distill import DistillReader
from edl.testing import LocalTeacher
from tests.gpu import models

GOALS = [Goal("served_vs_local_images", 0.9), Goal("served_vs_local_tokens", 0.9)]
_TOP_K = 64
_AHEAD_ITEMS = 4
"""Answers taken before a window begins, to fill the pipeline of requests."""

Array = np.ndarray[Any, np.dtype[Any]]


class Timed(nn.Module):
    """A model that counts the milliseconds of its computation on the GPU in a file, which other processes can read.

    Each call adds the time of the previous call, which has ended because its answer was copied to the host.
    """

    def __init__(self, model: nn.Module, file: Path) -> None:
        super().__init__()
        self.model = model
        with file.open("r+b") as opened:
            self._counter = np.frombuffer(mmap.mmap(opened.fileno(), 8), np.float64)
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None

    def forward(self, image: Tensor) -> Tensor:
        if not image.is_cuda:
            found: Tensor = self.model(image)
            return found
        if self._events is not None:
            self._counter[0] += self._events[0].elapsed_time(self._events[1])
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        found = self.model(image)
        end.record()
        self._events = begin, end
        return found


def timed_resnet50(file: str, width: int, classes: int) -> nn.Module:
    """Build the teacher's model: `edl serve --torch-factory benchmarks/gpu_teacher.py:timed_resnet50`."""
    return Timed(models.resnet50(width=width, classes=classes), Path(file))


class Images:
    """The ResNet, its batches, and its two sides.

    Args:
        device: Device of the model.
        folder: Folder for the counter's file.
        stack: Ends the teachers.
    """

    def __init__(self, device: torch.device, folder: Path, stack: ExitStack) -> None:
        large = device.type == "cuda"
        self._options: dict[str, Any] = {"width": 64, "classes": 1000} if large else {"width": 8, "classes": 10}
        self._size, self._rows = (224, 128) if large else (32, 8)
        self._device, self._stack = device, stack
        self._file = folder / "busy"
        self._file.write_bytes(bytes(8))
        shape = (self._rows, 3, self._size, self._size)
        self.uint8 = np.random.default_rng(1).integers(256, size=shape, dtype=np.uint8)

    def local(self, *, pinned: bool = False) -> Iterator[int]:
        """Yield the rows of each batch that a loop has computed, without end."""
        model = models.resnet50(**self._options).to(self._device).eval()
        mean, deviation = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
        scale, shift = ((1 / (255 * deviation)), -mean / deviation)
        scale, shift = (numbers.view(3, 1, 1).to(self._device) for numbers in (scale, shift))
        with torch.inference_mode(), torch.autocast(self._device.type, dtype=torch.bfloat16):
            while True:
                images = torch.from_numpy(self.uint8)
                images = images.pin_memory() if pinned else images
                pixels = images.to(self._device, non_blocking=pinned).float().mul_(scale).add_(shift)
                yield len(model(pixels).float().cpu())

    def served(self, batch: Array) -> Callable[[], Iterator[int]]:
        """Start a teacher for batches of this dtype, and return a function that asks it without end."""
        flags = {
            "torch-factory": f"{Path(__file__).resolve()}:timed_resnet50",
            "input": f"image:{batch.dtype}[3,{self._size},{self._size}]",
            "output": "logits",
            "device": str(self._device),
            "autocast": "bfloat16",
        }
        if batch.dtype == np.uint8:
            flags["normalize"] = "imagenet"
        teacher = self._stack.enter_context(
            LocalTeacher("", max_batch=self._rows, serve=flags, timeout_s=180, file=str(self._file), **self._options)
        )

        def ask() -> Iterator[int]:
            reader = DistillReader(ins=["image"], predicts=["logits"], teachers=teacher.endpoint)
            reader.set_batch_generator(lambda: itertools.repeat((batch,)))
            with reader:
                for _, logits in reader():
                    yield len(logits)

        return ask

    def busy_s(self) -> float:
        """Return the seconds for which the GPU has computed for the teachers."""
        return float(np.frombuffer(self._file.read_bytes(), np.float64)[0]) / 1e3


class Tokens:
    """The Llama, its texts, and its two sides.

    Args:
        device: Device of the model.
        folder: Folder for the model.
        stack: Ends the teacher.
    """

    def __init__(self, device: torch.device, folder: Path, stack: ExitStack) -> None:
        large = device.type == "cuda"
        self._dtype = torch.bfloat16 if large else torch.float32
        hidden, layers, vocabulary = (2048, 16, 32_000) if large else (128, 2, 500)
        self._model = models.llama(
            folder / "llama", hidden=hidden, layers=layers, vocabulary=vocabulary, dtype=self._dtype
        )
        self._folder, self._device, self._stack = folder / "llama", device, stack
        length = 512 if large else 32
        self.texts = np.random.default_rng(2).integers(1, vocabulary, size=(16, length)).astype(np.int32)

    def local(self) -> Iterator[int]:
        """Yield the tokens of each batch of texts that a loop has computed, without end."""
        model = self._model.to(self._device)
        with torch.inference_mode():
            while True:
                logits = model(input_ids=torch.from_numpy(self.texts).long().to(self._device), use_cache=False).logits
                found = torch.log_softmax(logits.float(), -1).topk(_TOP_K)
                yield len(found.indices.cpu()) * len(found.values.cpu()[0])

    def served(self) -> Callable[[], Iterator[int]]:
        """Start a teacher, and return a function that asks it without end."""
        flags = {"hf": self._folder, "task": "causal-lm", "top-k": _TOP_K, "max-tokens": self.texts.size}
        flags |= {"dtype": str(self._dtype).removeprefix("torch."), "device": str(self._device)}
        teacher = self._stack.enter_context(LocalTeacher("", serve=flags, timeout_s=180))

        def ask() -> Iterator[int]:
            reader = DistillReader(
                ins=["ids"],
                predicts=["logprobs"],
                teachers=teacher.endpoint,
                top_k=_TOP_K,
                teacher_batch_size=self.texts.size,
            )
            reader.set_sequence_generator(lambda: ((text,) for text in itertools.cycle(self.texts)))
            with reader:
                for _, labels in reader():
                    yield len(labels.ids)

        return ask


def rate(side: Callable[[], Iterator[int]], seconds: float) -> float:
    """Return how much a side delivers per second."""
    counts = side()
    try:
        for _ in range(_AHEAD_ITEMS):
            next(counts)
        begin, found = time.perf_counter(), 0
        while time.perf_counter() < begin + seconds:
            found += next(counts)
        return found / (time.perf_counter() - begin)
    finally:
        counts.close()  # type: ignore[attr-defined]


def measure(options: Options) -> dict[str, list[float]]:
    """Return the ratios of every round."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        torch.set_num_threads(1)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        images, tokens = Images(device, folder, stack), Tokens(device, folder, stack)
        uint8, float32 = images.served(images.uint8), images.served(images.uint8.astype(np.float32))
        texts = tokens.served()
        idle: list[float] = []

        def served_and_busy() -> float:
            begin, busy = time.perf_counter(), images.busy_s()
            found = rate(uint8, options.seconds)
            idle.append(1 - (images.busy_s() - busy) / (time.perf_counter() - begin))
            return found

        sides = {
            "images, local": lambda: rate(images.local, options.seconds),
            "images, served": served_and_busy,
            "images, served as float32": lambda: rate(float32, options.seconds),
            "tokens, local": lambda: rate(tokens.local, options.seconds),
            "tokens, served": lambda: rate(texts, options.seconds),
        }
        if device.type == "cuda":  # only CUDA can pin memory
            sides["images, local and pinned"] = lambda: rate(partial(images.local, pinned=True), options.seconds)
        rounds = take_turns(sides, options.repeats)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "no GPU: tiny models on the CPU"
    note(f"{name}, torch {torch.__version__}\n")
    note("| side | per second |\n| --- | ---: |")
    for side, rates in rounds.items():
        note(f"| {side} | {sorted(rates)[len(rates) // 2]:,.0f} |")
    if device.type == "cuda":
        note(f"\nThe GPU was idle for {100 * sorted(idle)[len(idle) // 2]:.0f}% of the time while it served images.")
    ratios = {
        "served_vs_local_images": divide(rounds["images, served"], rounds["images, local"]),
        "served_vs_local_tokens": divide(rounds["tokens, served"], rounds["tokens, local"]),
        "uint8_vs_float32": divide(rounds["images, served"], rounds["images, served as float32"]),
    }
    if device.type == "cuda":
        ratios["pinned_vs_pageable"] = divide(rounds["images, local and pinned"], rounds["images, local"])
    return ratios


if __name__ == "__main__":
    main("gpu_teacher", measure, GOALS, __doc__)
