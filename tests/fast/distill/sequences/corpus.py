"""Sequences of random tokens, and how their answers are told to be right."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from edl.distill import DistillReader, Options
from edl.testing.models import prefix_scores_of

TOKENS = 50_000


def sequences(count: int, longest: int = 60, seed: int = 0) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    return [random.integers(0, TOKENS, random.integers(1, longest + 1)).astype(np.int32) for _ in range(count)]


def source(found: list[np.ndarray]) -> Callable[[], Iterator[Any]]:
    return lambda: ((ids, number) for number, ids in enumerate(found))


def check(delivered: Iterable[tuple[Any, ...]], expected: list[np.ndarray]) -> None:
    """Each sequence once, in order, and at each token the answer to it and to those before it in its sequence."""
    numbers = []
    for ids, number, scores in delivered:
        numbers.append(number)
        assert ids.tolist() == expected[number].tolist()
        assert scores.tolist() == prefix_scores_of(ids).tolist(), f"sequence {number} of {len(ids)} tokens"
    assert numbers == list(range(len(expected)))


def reader_of(*teachers: Any, **kwargs: Any) -> DistillReader:
    kwargs.setdefault("options", Options(teacher_timeout_s=60))
    if teachers:
        kwargs["teachers"] = [teacher.endpoint for teacher in teachers]
    return DistillReader(["ids", None], kwargs.pop("predicts", ["logprobs"]), **kwargs)
