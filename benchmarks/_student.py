"""The `degradation` benchmark's students, which do real training on one core. Runs as a `Child`.

`student` and `fast_student` are convolutional networks, and `lm_student` is a small causal transformer. When it trains
alone, it uses prepared labels of the same kind, so both ways compute the same loss.

With `--teachers`, students learn from the teachers' soft labels; without, from prepared labels.
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
from benchmarks._load import (
    CLASSES,
    IMAGE,
    LONGEST,
    MAX_TOKENS,
    ROTATION,
    ROWS,
    SEQUENCES,
    SHORTEST,
    TOP_K,
    VOCABULARY,
    likeliest_of,
)
from edl.distill import DistillReader
from edl.distill.compress import TopK
from edl.distill.losses import soft_cross_entropy, token_loss
from edl.distill.torch import distill
from edl.protocol import names

Batch = tuple[Any, Any, Any]

WIDTHS = {"student": 32, "fast_student": 8}
"""Channels of the first layer. A step takes about 120 ms and 30 ms on one core from 2023."""


def source() -> Iterator[Batch]:
    """Yield endless batches of ids [rows, 1], images, and hard labels [rows]."""
    images = [np.random.default_rng(seed).integers(0, 255, (ROWS, *IMAGE), np.uint8) for seed in range(ROTATION)]
    labels = np.arange(ROWS) % CLASSES
    for number in itertools.count():
        ids = np.arange(number * ROWS, (number + 1) * ROWS, dtype=np.int64).reshape(-1, 1)
        yield ids, images[number % ROTATION], labels


def student(width: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model and its optimizer; see `WIDTHS`."""
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
    """Return a function that makes a step on hard labels."""
    model, optimizer = student(width)
    batches = source()

    def step() -> None:
        _, images, labels = next(batches)
        logits = model(_pixels(images))
        loss = nn.functional.cross_entropy(logits, torch.from_numpy(labels))
        _update(loss, optimizer)

    return step


def distilled(width: int, endpoints: str, stack: ExitStack) -> Callable[[], None]:
    """Return a function that makes a step on the teachers' logits."""
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


class LanguageModel(nn.Module):
    """Predicts the next token: logits [sequences, tokens, vocabulary] from ids [sequences, tokens]."""

    def __init__(self, width: int = 128, layers: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(LONGEST, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        length = ids.shape[1]
        hidden = self.tokens(ids) + self.positions(torch.arange(length))
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        logits: torch.Tensor = self.head(self.layers(hidden, mask=mask, is_causal=True))
        return logits


def texts() -> Iterator[dict[str, torch.Tensor]]:
    """Yield endless padded batches of texts, like those from a collator."""
    random = torch.Generator().manual_seed(0)
    batches = []
    for _ in range(ROTATION):
        lengths = torch.randint(SHORTEST, LONGEST + 1, (SEQUENCES, 1), generator=random)
        mask = (torch.arange(int(lengths.max())) < lengths).long()
        batches.append({"input_ids": torch.randint(VOCABULARY, mask.shape, generator=random), "attention_mask": mask})
    return itertools.cycle(batches)


def language_model(endpoints: str | None, stack: ExitStack) -> Callable[[], None]:
    """Return a function that makes a step on the 64 likeliest tokens per position, from teachers or prepared."""
    model = LanguageModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    if endpoints:
        labelled = distill(
            texts(),
            endpoints,
            inputs={names.IDS: "input_ids"},
            outputs=names.LOGPROBS,
            tokens="attention_mask",
            top_k=TOP_K,
            batch_rows=MAX_TOKENS,
        )
        stack.callback(labelled.close)
        batches: Iterator[Any] = iter(labelled)
    else:
        batches = itertools.cycle([_ready_labels(batch) for batch in itertools.islice(texts(), ROTATION)])

    def step() -> None:
        batch, labels = next(batches)
        ids, mask = batch["input_ids"], batch["attention_mask"]
        assert labels.ids[0, 0, 0] == likeliest_of(ids[0, 0])
        _update(token_loss(model(ids), labels, mask=mask), optimizer)

    return step


def _ready_labels(batch: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], TopK]:
    """Return a batch, and labels like the teachers'."""
    first = likeliest_of(batch["input_ids"])
    ids = (first[..., None] + torch.arange(TOP_K)) % VOCABULARY
    probabilities = 0.9 * 0.5 ** np.arange(1, TOP_K + 1)
    values = np.broadcast_to(np.log(probabilities).astype(np.float32), ids.shape).copy()
    tail = np.full(first.shape, np.log(1 - probabilities.sum()), np.float32)
    labels = TopK(ids.numpy().astype(np.int32), values, tail, temperature=1.0, classes=VOCABULARY)
    return batch, labels.map(torch.from_numpy)


def _pixels(images: Any) -> torch.Tensor:
    return torch.from_numpy(images).float().div_(255)


def _update(loss: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    loss.item()


def measure(step: Callable[[], None], seconds: float) -> dict[str, float]:
    """Return the figures of training: steps per second, counted as rows."""
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
    parser.add_argument("student", choices=(*WIDTHS, "lm_student"))
    parser.add_argument("--teachers", help="endpoints, separated by commas")
    given = parser.parse_args()
    torch.set_num_threads(1)
    with ExitStack() as stack:
        if given.student == "lm_student":
            step = language_model(given.teachers, stack)
        elif given.teachers:
            step = distilled(WIDTHS[given.student], given.teachers, stack)
        else:
            step = alone(WIDTHS[given.student])
        answer(lambda request: measure(step, request["seconds"]))


if __name__ == "__main__":
    main()
