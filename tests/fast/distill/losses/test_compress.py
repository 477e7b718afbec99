"""Top-k soft labels and float16, against sums written out in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from edl.distill.cache import CacheKey, SoftLabelCache
from edl.distill.compress import TopK, top_k
from edl.distill.engine.compatibility import TeacherCompatibility
from edl.distill.transport.schema import ModelSpec, OutputSpec, Reply, TensorMetadata
from edl.errors import SettingsError


def softmax(logits: np.ndarray[Any, Any], temperature: float) -> np.ndarray[Any, Any]:
    weights = np.exp(logits.astype(np.float64) / temperature)
    return weights / weights.sum(-1, keepdims=True)


@pytest.mark.parametrize("temperature", [1.0, 4.0])
def test_dense_labels_keep_probabilities(temperature: float) -> None:
    assert labels_of([[3, 1]], [[1.0, 1.0]], [0.0], None).to_dense(4).shape == (1, 4)
    logits = np.random.default_rng(1).normal(0, 3, (6, 50)).astype(np.float32)
    labels = top_k(logits, 7, temperature)
    exact, dense = softmax(logits, temperature), softmax(labels.to_dense(), temperature)
    for row in range(6):
        kept = labels.ids[row]
        np.testing.assert_allclose(dense[row, kept], exact[row, kept], rtol=1e-5)
        rest = np.delete(dense[row], kept)
        np.testing.assert_allclose(rest, rest[0], rtol=1e-5)
        assert rest.sum() == pytest.approx(np.delete(exact[row], kept).sum(), rel=1e-4)


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
    with pytest.raises(SettingsError, match="class ids from 0 to 8, of 8 classes"):
        TopK.concatenate([known, beyond])


ROWS = np.zeros((2, 8), np.float32)
BAD: list[tuple[Callable[[], Any], str]] = [
    (lambda: labels_of([[0, 1]], [[1.0, 2.0]], [0.0, 1.0]), "shapes"),
    (lambda: labels_of([[0.0, 1.0]], [[1.0, 2.0]], [0.0]), "types"),
    (lambda: labels_of([[0, 9]], [[1.0, 2.0]], [0.0]), "class ids from 0 to 9, of 5 classes"),
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
    (lambda: labels_of([[3, 1]], [[1.0, 1.0]], [0.0], None).to_dense(), "classes="),
    (lambda: labels_of([[3, 1]], [[1.0, 1.0]], [0.0], None).to_dense(3), "class 3"),
]


def labels_of(ids: Any, values: Any, tail: Any, classes: int | None = 5) -> TopK:
    return TopK(np.array(ids), np.array(values, np.float32), np.array(tail, np.float32), classes=classes)


@pytest.mark.parametrize(("call", "words"), BAD)
def test_bad_input_is_named(call: Callable[[], Any], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        call()


# What float16 does not hold is clamped, and the user is told.

LARGE = np.array([[1e6, 2.0, -1e9]], np.float32)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "clamped" in record.getMessage()]


def answered(datatype: str, *answers: Any) -> None:
    known = TeacherCompatibility("speech", OutputSpec(("y",), dtype="float16"))
    known.spec = ModelSpec("m", "1", {}, {"y": TensorMetadata("y", datatype, (3,))})
    for answer in answers:
        assert known.check_reply("t", [("x", "FP32", (1, 3))], Reply({"y": answer}, "1")) is None


def test_clamped_answers_are_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    clamped = np.array([[65504, 2, -65504]], np.float16)
    answered("FP32", clamped, clamped)
    (warning,) = warnings_of(caplog)
    assert "'y'" in warning
    assert "speech" in warning
    assert "65504" in warning
    assert "dtype='float32'" in warning


@pytest.mark.parametrize("value", [65472, -65472, np.inf, -np.inf, 0])
def test_values_that_fit_are_not_warned_of(value: float, caplog: pytest.LogCaptureFixture) -> None:
    answered("FP32", np.array([[value, 2, 3]], np.float16))
    answered("FP16", np.array([[65504, 2, 3]], np.float16))  # the model's own
    assert not warnings_of(caplog)


@pytest.mark.parametrize("compressed", [False, True])
def test_clamped_labels_in_a_cache(compressed: bool, caplog: pytest.LogCaptureFixture) -> None:
    with SoftLabelCache(store_dtype="float16") as cache:
        view = cache.view(CacheKey("m", "1", ("y",), top_k=2 if compressed else None))
        labels = {"y": top_k(LARGE, 2) if compressed else LARGE}
        view.put([1], labels)
        view.put([2], labels)
    (warning,) = warnings_of(caplog)
    assert ("1e+06" if compressed else "-1e+09") in warning
    assert "store_dtype" in warning
