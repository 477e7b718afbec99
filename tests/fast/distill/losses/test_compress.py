"""Top-k soft labels: joined, and refused if invalid."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from edl.distill.compress import TopK, top_k
from edl.errors import SettingsError


def test_a_class_count_is_for_all_pieces() -> None:
    """A vLLM or SGLang engine does not say how many classes there are; a teacher of transformers beside it does."""
    known, other = top_k(np.ones((2, 8), np.float32), 2), top_k(np.ones((2, 9), np.float32), 2)
    unknown = replace(known, classes=None)
    for pieces in ([known, unknown], [unknown, known, unknown]):
        joined = TopK.concatenate(pieces)
        assert (len(joined), joined.classes) == (2 * len(pieces), 8)
        assert TopK.stack([piece[0] for piece in pieces]).classes == 8
    assert TopK.concatenate([unknown, unknown]).classes is None
    with pytest.raises(SettingsError, match=r"classes=8 .* classes=9"):
        TopK.concatenate([unknown, known, other])
    beyond = replace(unknown, ids=np.full((2, 2), [8, 0], np.int32))
    with pytest.raises(SettingsError, match="class ids from 0 to 8: must be at least 0 and below 8"):
        TopK.concatenate([known, beyond])


ROWS = np.zeros((2, 8), np.float32)
BAD: list[tuple[Callable[[], Any], str]] = [
    (lambda: labels_of([[0, 1]], [[1.0, 2.0]], [0.0, 1.0]), "shapes"),
    (lambda: labels_of([[0.0, 1.0]], [[1.0, 2.0]], [0.0]), "types"),
    (lambda: labels_of([[0, 9]], [[1.0, 2.0]], [0.0]), "class ids from 0 to 9: must be at least 0 and below 5"),
    (lambda: top_k(ROWS, 0), r"k=0: must be from 1 to the number of classes, 8"),
    (lambda: top_k(ROWS, 2, 0.0), r"temperature=0.0"),
    (lambda: top_k(ROWS[0], 2), r"float32 \[8\]"),
    (
        lambda: TopK.concatenate([top_k(ROWS, 2, 1.0), top_k(ROWS, 2, 2.0)]),
        "temperature=1, classes=8 and k=2, temperature=2",
    ),
    (lambda: TopK.concatenate([]), "at least one"),
    *((lambda cut=cut: top_k(ROWS, 2)[0][cut], "of one sample") for cut in (0, slice(1), [0])),
    (lambda: TopK.concatenate([top_k(ROWS, 2)[0]] * 2), r"use TopK\.stack"),
    (
        lambda: TopK.stack([top_k(ROWS, 2)[0], top_k(np.zeros((1, 3, 8), np.float32), 2)[0]]),
        r"shapes \[2\] and \[3, 2\]",
    ),
    (lambda: TopK.stack([top_k(ROWS, 2)[0], top_k(ROWS[:, :7], 2)[0]]), "cannot be combined"),
]


def labels_of(ids: Any, values: Any, tail: Any, classes: int | None = 5) -> TopK:
    return TopK(np.array(ids), np.array(values, np.float32), np.array(tail, np.float32), classes=classes)


@pytest.mark.parametrize(("call", "words"), BAD)
def test_bad_input_is_named(call: Callable[[], Any], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        call()
