"""The `degradation` benchmark's students: convolutional networks that really train, on one core. Runs as a `Child`.

With `--teachers` they learn from soft labels that come from there; without, from labels that lie ready.
"""

from __future__ import annotations

import argparse
import itertools
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks._child import WARM_UP_S, Window, answer
from benchmarks._load import CLASSES, IMAGE, ROTATION, ROWS
from edl.distill import DistillReader
from edl.distill.losses import soft_cross_entropy

Batch = tuple[Any, Any, Any]

WIDTHS = {"student": 32, "fast_student": 8}
"""Channels of the first layer: some 120 and 30 ms a step on one core of 2023."""


def source() -> Iterator[Batch]:
    """Batches without end: ids [rows, 1], images, hard labels [rows]."""
    images = [np.random.default_rng(seed).integers(0, 255, (ROWS, *IMAGE), np.uint8) for seed in range(ROTATION)]
    labels = np.arange(ROWS) % CLASSES
    for number in itertools.count():
        ids = np.arange(number * ROWS, (number + 1) * ROWS, dtype=np.int64).reshape(-1, 1)
        yield ids, images[number % ROTATION], labels


def student(width: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and what trains it; see `WIDTHS`."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, width, 7, stride=4),
        nn.ReLU(),
        nn.Conv2d(width, 4 * width, 3, stride=2),
        nn.ReLU(),
        nn.Conv2d(4 * width, 4 * width, 3, stride=2),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(64 * width, CLASSES),
    )
    return model, torch.optim.SGD(model.parameters(), lr=0.001)


def alone(width: int) -> Callable[[], None]:
    """A step on hard labels."""
    model, optimizer = student(width)
    batches = source()

    def step() -> None:
        _, images, labels = next(batches)
        logits = model(_pixels(images))
        loss = nn.functional.cross_entropy(logits, torch.from_numpy(labels))
        _update(loss, optimizer)

    return step


def distilled(width: int, endpoints: str, stack: ExitStack) -> Callable[[], None]:
    """A step on the teachers' logits."""
    model, optimizer = student(width)
    reader = DistillReader(ins=["id", "image", None], predicts=["logits"])
    reader.set_fixed_teacher(endpoints)
    reader.set_batch_generator(source)
    stack.callback(reader.close)
    batches = reader()

    def step() -> None:
        ids, images, _, soft = next(batches)
        assert soft[0, 0] == ids[0, 0]
        logits = model(_pixels(images))
        loss = soft_cross_entropy(logits, torch.from_numpy(soft), temperature=1.0)
        _update(loss, optimizer)

    return step


def _pixels(images: Any) -> torch.Tensor:
    return torch.from_numpy(images).float().div_(255)


def _update(loss: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    loss.item()


def measure(step: Callable[[], None], seconds: float) -> dict[str, float]:
    """Steps a second, as rows a second."""
    window = Window([os.getpid()])
    now = time.perf_counter()
    begin, end = now + WARM_UP_S, now + WARM_UP_S + seconds
    opened = False
    while True:
        step()
        window.requests += 1
        now = time.perf_counter()
        if not opened and now >= begin:
            window.open()
            opened = True
        elif now >= end:
            window.close()
            return window.figures(ROWS)


def main() -> None:
    """Measure on request."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--teachers", help="endpoints, separated by commas")
    endpoints = parser.parse_args().teachers
    torch.set_num_threads(1)
    with ExitStack() as stack:
        steps = {
            name: distilled(width, endpoints, stack) if endpoints else alone(width) for name, width in WIDTHS.items()
        }
        answer(lambda request: measure(steps[request["student"]], request["seconds"]))


if __name__ == "__main__":
    main()
