"""Losses against sums written out in numpy float64, and their gradients against finite differences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from edl.distill.compress import TopK, top_k  # noqa: E402
from edl.distill.losses import (  # noqa: E402
    DistillLoss,
    feature_mse,
    kl_divergence,
    logit_mse,
    mix,
    soft_cross_entropy,
    top_k_kl,
)
from edl.errors import SettingsError  # noqa: E402

Array = np.ndarray[Any, Any]
SHAPES = [(1, 2), (3, 4, 7)]


def logits(shape: tuple[int, ...], seed: int, scale: float = 3.0) -> Array:
    return np.random.default_rng(seed).normal(0, scale, shape)


def softmax(values: Array, temperature: float = 1.0) -> Array:
    weights = np.exp((values - values.max(-1, keepdims=True)) / temperature)
    return weights / weights.sum(-1, keepdims=True)


def kl_by_hand(p: Array, q: Array) -> Array:
    """A plain double loop over rows and classes."""
    flat_p, flat_q = p.reshape(-1, p.shape[-1]), q.reshape(-1, q.shape[-1])
    rows = [
        sum(a * (np.log(a) - np.log(b)) for a, b in zip(row_p, row_q, strict=True) if a > 0)
        for row_p, row_q in zip(flat_p, flat_q, strict=True)
    ]
    return np.array(rows).reshape(p.shape[:-1])


def top_k_kl_by_hand(student: Array, labels: TopK, temperature: float) -> Array:
    """KL over k + 1 classes, from the definition of the labels and the student's whole softmax."""
    q = softmax(student, temperature)
    out = []
    for row in range(len(student)):
        kept = np.exp(labels.values[row].astype(np.float64) / temperature)
        tail = np.exp(np.float64(labels.tail_lse[row]))
        p_row = np.append(kept, tail) / (kept.sum() + tail)
        q_kept = q[row, labels.ids[row]]
        out.append(kl_by_hand(p_row[None], np.append(q_kept, max(1 - q_kept.sum(), 1e-300))[None])[0])
    return np.array(out)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("temperature", [0.5, 4.0])
@pytest.mark.parametrize("teacher_is", ["logits", "probabilities"])
def test_kl_and_cross_entropy_by_definition(shape: tuple[int, ...], temperature: float, teacher_is: Any) -> None:
    """KL and cross entropy are what their definitions say."""
    student, teacher = logits(shape, 1), logits(shape, 2)
    p, q = softmax(teacher, temperature), softmax(student, temperature)
    given = torch.from_numpy(teacher if teacher_is == "logits" else softmax(teacher))
    settings = {"temperature": temperature, "teacher_is": teacher_is, "reduction": "none"}
    kl = kl_divergence(torch.from_numpy(student), given, **settings)
    entropy = soft_cross_entropy(torch.from_numpy(student), given, **settings)
    np.testing.assert_allclose(kl.numpy(), temperature**2 * kl_by_hand(p, q), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(entropy.numpy(), -(temperature**2) * (p * np.log(q)).sum(-1), rtol=1e-9)


@pytest.mark.parametrize("temperature", [1.0, 4.0])
@pytest.mark.parametrize("k", [1, 3, 10])
def test_top_k_kl_counts_the_tail_as_a_class(k: int, temperature: float) -> None:
    student, teacher = logits((5, 11), 1), logits((5, 11), 2)
    labels = top_k(teacher, k, temperature)
    ours = top_k_kl(torch.from_numpy(student), labels, reduction="none")
    expected = temperature**2 * top_k_kl_by_hand(student, labels, temperature)
    np.testing.assert_allclose(ours.numpy(), expected, rtol=1e-6)
    dense = kl_divergence(torch.from_numpy(student), torch.from_numpy(teacher), temperature=temperature)
    assert ours.mean() <= dense * (1 + 1e-6)  # merging classes adds no divergence (the tail is a float32)


@pytest.mark.parametrize("student_masked", [False, True])
def test_masked_classes_add_nothing(student_masked: bool) -> None:
    inf = float("inf")
    teacher = torch.tensor([[1.0, 2.0, -inf, -inf]])
    values = [[0.5, 0.1, -inf, -inf]] if student_masked else [[0.5, 0.1, 3.0, -1.0]]
    for loss in (
        lambda x: kl_divergence(x, teacher, temperature=2.0),
        lambda x: soft_cross_entropy(x, teacher),
        lambda x: kl_divergence(x, torch.tensor([[0.25, 0.75, 0.0, 0.0]]), teacher_is="probabilities"),
        lambda x: top_k_kl(x, top_k(teacher.numpy(), 2)),
        lambda x: top_k_kl(x, top_k(teacher.numpy(), 3)),
    ):
        student = torch.tensor(values, requires_grad=True)
        value = loss(student)
        value.backward()
        assert torch.isfinite(value)
        assert torch.isfinite(student.grad).all()


def test_mse_losses_are_means_of_squares() -> None:
    student, teacher = logits((2, 3, 4), 1), logits((2, 3, 4), 2)
    squares = (student - teacher) ** 2
    pair = torch.from_numpy(student), torch.from_numpy(teacher)
    np.testing.assert_allclose(logit_mse(*pair, reduction="none").numpy(), squares.mean(-1))
    np.testing.assert_allclose(feature_mse(*pair, reduction="none").numpy(), squares.mean((1, 2)))
    assert logit_mse(*pair).item() == pytest.approx(torch.nn.functional.mse_loss(*pair).item())


def test_features_projection_learns() -> None:
    """Features of another width are projected, and the projection learns."""
    student, teacher = torch.randn(4, 8, requires_grad=True), torch.randn(4, 16)
    projection = torch.nn.Linear(8, 16)
    feature_mse(student, teacher, projection).backward()
    assert projection.weight.grad.abs().sum() > 0
    assert student.grad.abs().sum() > 0
    with pytest.raises(SettingsError, match=r"student are \[4, 8\], of the teacher \[4, 16\].*projection"):
        feature_mse(student, teacher)


def test_rows_without_label_have_soft_part() -> None:
    """A batch may hold no label at all: the hard loss is 0 then, and not NaN."""
    student, teacher = torch.randn(4, 3, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)
    student.requires_grad_()
    loss = DistillLoss(temperature=2.0, alpha=0.25)
    some = loss(student, teacher, torch.tensor([2, -100, 0, -100]))
    soft = kl_divergence(student, teacher, temperature=2.0)
    hard = -student.log_softmax(-1)[[0, 2], [2, 0]].mean()
    assert some.item() == pytest.approx((0.25 * soft + 0.75 * hard).item())
    none = loss(student, teacher, torch.full((4,), -100))
    none.backward()
    assert none.item() == pytest.approx(0.25 * soft.item())
    assert student.grad is not None
    assert bool(student.grad.isfinite().all())


def test_without_a_teacher_labels_are_all() -> None:
    """Batches without teachers have None in place of soft labels: the same call trains on the hard ones."""
    student, labels = torch.from_numpy(logits((6, 5), 1)), torch.arange(6) % 5
    hard = torch.nn.functional.cross_entropy(student, labels)
    for alpha in (0.0, 0.9, 1.0):
        assert DistillLoss(3.0, alpha)(student, None, labels).item() == pytest.approx(hard.item())
    with pytest.raises(SettingsError, match="neither a teacher's labels nor hard ones"):
        DistillLoss(3.0, 1.0)(student, None)


def test_the_mixture_is_linear_in_alpha() -> None:
    student, teacher, labels = torch.from_numpy(logits((6, 5), 1)), logits((6, 5), 2), torch.arange(6) % 5
    hard = torch.nn.functional.cross_entropy(student, labels)
    soft = kl_divergence(student, teacher, temperature=3.0)
    for alpha in (0.0, 0.25, 1.0):
        loss = DistillLoss(3.0, alpha)(student, teacher, labels)
        assert loss.item() == pytest.approx(alpha * soft.item() + (1 - alpha) * hard.item())
        assert mix(hard, soft, alpha).item() == pytest.approx(loss.item())
    assert DistillLoss(3.0, 1.0)(student, teacher).item() == pytest.approx(soft.item())
    teacher = torch.from_numpy(teacher)
    entropy = soft_cross_entropy(student, teacher, temperature=2.0)
    assert DistillLoss(2.0, 1.0, soft="cross_entropy")(student, teacher).item() == entropy.item()
    assert DistillLoss(2.0, 1.0, soft="mse")(student, teacher).item() == logit_mse(student, teacher).item()


X, T = torch.zeros(2, 4), torch.zeros(2, 4)
BAD: list[tuple[Callable[[], Any], str]] = [
    (lambda: kl_divergence(X, torch.zeros(2, 5)), r"student are \[2, 4\], of the teacher \[2, 5\]"),
    (lambda: kl_divergence(X, T, temperature=0), "temperature=0"),
    (lambda: kl_divergence(X, T, reduction="batchmean"), "reduction='batchmean': must be 'mean', 'sum' or 'none'"),  # type: ignore[arg-type]
    (lambda: kl_divergence(X, T, teacher_is="probs"), "teacher_is='probs': must be"),  # type: ignore[arg-type]
    (lambda: kl_divergence(X, torch.full((2, 4), 3.0), teacher_is="probabilities"), "sum to as far as 11.*'logits'"),
    (lambda: soft_cross_entropy(X, torch.tensor([[2.0, -1, 0, 0]] * 2), teacher_is="probabilities"), "down to -1"),
    (lambda: kl_divergence(X.long(), T), "torch.int64"),
    (lambda: kl_divergence(X, [[0.0] * 4] * 2), "list: expected a tensor or a numpy array"),  # type: ignore[arg-type]
    (lambda: logit_mse(X, torch.zeros(2, 1)), r"\[2, 1\]"),
    (lambda: mix(X.sum(), X.sum(), 1.5), "alpha=1.5"),
    (lambda: DistillLoss(alpha=-0.1), "alpha=-0.1"),
    (lambda: DistillLoss(soft="reverse_kl"), "soft='reverse_kl'"),  # type: ignore[arg-type]
    (lambda: DistillLoss(soft="mse", teacher_is="probabilities"), "compares logits"),
    (lambda: DistillLoss()(X, T), "labels are missing: alpha=0.9"),
    (lambda: DistillLoss()(X, T, torch.zeros(3, dtype=torch.int64)), r"labels are \[3\].*expected \[2\]"),
    (lambda: DistillLoss(4.0, 1)(X, top_k(T.numpy(), 2, 1.0)), "made at temperature 1, the loss uses 4"),
    (lambda: DistillLoss(1.0, 1, soft="mse")(X, top_k(T.numpy(), 2, 1.0)), "soft='kl', not 'mse'"),
    (lambda: top_k_kl(X, top_k(np.zeros((2, 5), np.float32), 2)), "student has 4 classes, the teacher 5"),
    (
        lambda: top_k_kl(X, TopK(np.full((2, 1), 7), np.zeros((2, 1), np.float32), np.zeros(2, np.float32))),
        "labels name class 7",
    ),
]


@pytest.mark.parametrize(("call", "words"), BAD)
def test_bad_input_is_named(call: Callable[[], Any], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        call()
