"""Top-k soft labels and float16, against sums written out in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edl.distill.compress import TopK, to_float16, top_k
from edl.errors import SettingsError


def softmax(logits: np.ndarray[Any, Any], temperature: float) -> np.ndarray[Any, Any]:
    weights = np.exp(logits.astype(np.float64) / temperature)
    return weights / weights.sum(-1, keepdims=True)


@given(
    seed=st.integers(0, 2**32 - 1),
    rows=st.integers(1, 5),
    classes=st.integers(1, 40),
    temperature=st.sampled_from([0.5, 1.0, 4.0]),
    data=st.data(),
)
@settings(max_examples=40)
def test_largest_classes_are_kept(seed: int, rows: int, classes: int, temperature: float, data: st.DataObject) -> None:
    """The kept classes are the largest and the tail weighs the rest."""
    k = data.draw(st.integers(1, classes))
    logits = np.random.default_rng(seed).normal(0, 3, (rows, classes)).astype(np.float32)
    labels = top_k(logits, k, temperature)
    assert labels.ids.dtype == np.int32
    assert labels.values.dtype == np.float32
    assert labels.tail_lse.dtype == np.float32
    assert (labels.k, labels.classes, len(labels)) == (k, classes, rows)
    for row in range(rows):
        assert list(labels.values[row]) == sorted(logits[row], reverse=True)[:k]
        assert np.array_equal(logits[row, labels.ids[row]], labels.values[row])
        assert len(set(labels.ids[row])) == k
        left_out = [float(logits[row, c]) for c in range(classes) if c not in set(labels.ids[row])]
        mass = sum(np.exp(np.float64(logit) / temperature) for logit in left_out)
        if left_out:
            assert labels.tail_lse[row] == pytest.approx(np.log(mass), abs=1e-5)
        else:
            assert labels.tail_lse[row] == -np.inf


@pytest.mark.parametrize("temperature", [1.0, 4.0])
def test_dense_labels_keep_probabilities(temperature: float) -> None:
    """Dense labels keep the probabilities of the kept classes and of the tail."""
    logits = np.random.default_rng(1).normal(0, 3, (6, 50)).astype(np.float32)
    labels = top_k(logits, 7, temperature)
    exact, dense = softmax(logits, temperature), softmax(labels.to_dense(), temperature)
    for row in range(6):
        kept = labels.ids[row]
        np.testing.assert_allclose(dense[row, kept], exact[row, kept], rtol=1e-5)
        rest = np.delete(dense[row], kept)
        np.testing.assert_allclose(rest, rest[0], rtol=1e-5)
        assert rest.sum() == pytest.approx(np.delete(exact[row], kept).sum(), rel=1e-4)


def test_huge_logits_do_not_overflow() -> None:
    """Huge logits and float16 logits do not overflow."""
    logits = np.array([[1e4, 9e3, -1e4, 500.0], [-6e4, -6e4, -6e4, -6e4]], np.float16)
    labels = top_k(logits, 2, 1.0)
    assert labels.values.dtype == np.float16
    assert np.isfinite(labels.tail_lse).all()
    assert labels.tail_lse[0] == pytest.approx(500.0)
    assert labels.tail_lse[1] == pytest.approx(float(np.float16(-6e4)) + np.log(2))


def test_unlike_labels_are_not_joined() -> None:
    logits = np.zeros((2, 8), np.float32)
    with pytest.raises(SettingsError, match=r"temperature=1, classes=8 and k=2, temperature=2"):
        TopK.concatenate([top_k(logits, 2, 1.0), top_k(logits, 2, 2.0)])
    with pytest.raises(SettingsError, match="at least one"):
        TopK.concatenate([])


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


@pytest.mark.parametrize(
    ("ids", "values", "tail", "words"),
    [
        ([[0, 1]], [[1.0, 2.0]], [0.0, 1.0], "shapes"),
        ([0, 1], [1.0, 2.0], [0.0], "shapes"),
        ([[0.0, 1.0]], [[1.0, 2.0]], [0.0], "types"),
        ([[0, 9]], [[1.0, 2.0]], [0.0], "class ids from 0 to 9, of 5 classes"),
    ],
)
def test_impossible_top_k_labels_are_refused(ids: Any, values: Any, tail: Any, words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        TopK(np.array(ids), np.array(values, np.float32), np.array(tail, np.float32), classes=5)


@pytest.mark.parametrize(
    ("logits", "k", "temperature", "words"),
    [
        (np.zeros((2, 8), np.float32), 0, 1.0, r"k=0: must be from 1 to the number of classes, 8"),
        (np.zeros((2, 8), np.float32), 2, 0.0, r"temperature=0.0"),
        (np.zeros(8, np.float32), 2, 1.0, r"float32 \[8\]"),
        (np.zeros((2, 8), np.int64), 2, 1.0, r"int64"),
    ],
)
def test_bad_arguments_are_named(logits: Any, k: int, temperature: float, words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        top_k(logits, k, temperature)


def test_single_row_cannot_be_cut_or_joined() -> None:
    """One row alone has no rows to cut or to concatenate."""
    one = top_k(np.zeros((2, 8), np.float32), 2)[0]
    for cut in (0, slice(1), [0]):
        with pytest.raises(SettingsError, match="of one sample"):
            one[cut]
    with pytest.raises(SettingsError, match=r"use TopK\.stack"):
        TopK.concatenate([one, one])
    with pytest.raises(SettingsError, match=r"shapes \[2\] and \[3, 2\]"):
        TopK.stack([one, top_k(np.zeros((1, 3, 8), np.float32), 2)[0]])
    with pytest.raises(SettingsError, match="do not go together"):
        TopK.stack([one, top_k(np.zeros((2, 9), np.float32), 2)[0]])


def test_dense_labels_need_a_class_count() -> None:
    labels = TopK(np.array([[3, 1]], np.int32), np.ones((1, 2), np.float32), np.zeros(1, np.float32))
    with pytest.raises(SettingsError, match="classes="):
        labels.to_dense()
    with pytest.raises(SettingsError, match="class 3"):
        labels.to_dense(3)
    assert labels.to_dense(4).shape == (1, 4)


def test_float16_keeps_finite_values_finite() -> None:
    array = np.array([1.5, -1e9, 1e9, np.inf, -np.inf, np.nan], np.float32)
    small = to_float16(array)
    assert small.dtype == np.float16
    np.testing.assert_array_equal(small, np.array([1.5, -65504, 65504, np.inf, -np.inf, np.nan], np.float16))
    assert to_float16(small) is small
