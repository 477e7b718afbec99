"""Losses against sums written out in numpy float64, their gradients against finite differences, and their numerics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from edl.distill.compress import top_k  # noqa: E402
from edl.distill.losses import (  # noqa: E402
    DistillLoss,
    feature_cosine,
    feature_mse,
    kl_divergence,
    logit_mse,
    soft_cross_entropy,
    token_loss,
    top_k_kl,
)
from edl.errors import SettingsError  # noqa: E402
from tests.fast.distill.losses.test_tokens import softmax, tensor  # noqa: E402

Array = np.ndarray[Any, Any]


def drawn(*shape: int, seed: int) -> Array:
    return np.random.default_rng(seed).normal(0, 2, shape)


@pytest.mark.parametrize("shape", [(1, 2), (3, 4, 7)])
@pytest.mark.parametrize("temperature", [0.5, 4.0])
@pytest.mark.parametrize("teacher_is", ["logits", "probabilities"])
def test_kl_and_cross_entropy_by_definition(shape: tuple[int, ...], temperature: float, teacher_is: Any) -> None:
    student, teacher = drawn(*shape, seed=1), drawn(*shape, seed=2)
    p, q = softmax(teacher, temperature), softmax(student, temperature)
    given = torch.from_numpy(teacher if teacher_is == "logits" else softmax(teacher))
    settings = {"temperature": temperature, "teacher_is": teacher_is, "reduction": "none"}
    kl = kl_divergence(torch.from_numpy(student), given, **settings)
    entropy = soft_cross_entropy(torch.from_numpy(student), given, **settings)
    np.testing.assert_allclose(kl.numpy(), temperature**2 * (p * np.log(p / q)).sum(-1), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(entropy.numpy(), -(temperature**2) * (p * np.log(q)).sum(-1), rtol=1e-9)


@pytest.mark.parametrize("temperature", [1.0, 4.0])
@pytest.mark.parametrize("k", [1, 3, 10])
def test_top_k_kl_counts_the_tail_as_a_class(k: int, temperature: float) -> None:
    student, teacher = drawn(5, 11, seed=1), drawn(5, 11, seed=2)
    labels = top_k(teacher, k, temperature)
    ours = top_k_kl(torch.from_numpy(student), labels, reduction="none")
    expected = token_loss(torch.from_numpy(student), labels, reduction="none")  # which test_tokens.py checks
    np.testing.assert_allclose(ours.numpy(), expected.numpy(), rtol=1e-6)
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
    student, teacher = drawn(2, 3, 4, seed=1), drawn(2, 3, 4, seed=2)
    squares = (student - teacher) ** 2
    pair = torch.from_numpy(student), torch.from_numpy(teacher)
    np.testing.assert_allclose(logit_mse(*pair, reduction="none").numpy(), squares.mean(-1))
    np.testing.assert_allclose(feature_mse(*pair, reduction="none").numpy(), squares.mean((1, 2)))
    assert logit_mse(*pair).item() == pytest.approx(torch.nn.functional.mse_loss(*pair).item())


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
    assert bool(student.grad.isfinite().all())


def test_the_mixture_is_linear_in_alpha() -> None:
    student, teacher, labels = torch.from_numpy(drawn(6, 5, seed=1)), drawn(6, 5, seed=2), torch.arange(6) % 5
    hard = torch.nn.functional.cross_entropy(student, labels)
    soft = kl_divergence(student, teacher, temperature=3.0)
    for alpha in (0.0, 0.25, 1.0):
        loss = DistillLoss(3.0, alpha)(student, teacher, labels)
        assert DistillLoss(3.0, alpha)(student, None, labels).item() == pytest.approx(hard.item()), "no teacher"
        assert loss.item() == pytest.approx(alpha * soft.item() + (1 - alpha) * hard.item())
    assert DistillLoss(3.0, 1.0)(student, teacher).item() == pytest.approx(soft.item())
    teacher = torch.from_numpy(teacher)
    entropy = soft_cross_entropy(student, teacher, temperature=2.0)
    assert DistillLoss(2.0, 1.0, soft="cross_entropy")(student, teacher).item() == entropy.item()
    assert DistillLoss(2.0, 1.0, soft="mse")(student, teacher).item() == logit_mse(student, teacher).item()


LABELS = torch.tensor([0, 3, 2])
NEXT = torch.tensor([1, -100, 3])


def kept(teacher: Any, k: int = 2, temperature: float = 1.0) -> Any:
    return top_k(teacher.double().numpy(), k, temperature)


LOSSES: dict[str, Callable[[Any, Any], Any]] = {
    "cosine": feature_cosine,
    "MSE": lambda s, t: logit_mse(s, t) + feature_mse(s, t, reduction="sum"),
    "KL": lambda s, t: kl_divergence(s, t, temperature=2.0),
    "cross-entropy": lambda s, t: soft_cross_entropy(s, t, temperature=0.7),
    "mixture": lambda s, t: DistillLoss(2.0, 0.3)(s, t, LABELS),
    "top-k": lambda s, t: top_k_kl(s, kept(t, 2, 3.0)),
    "top-k of all": lambda s, t: top_k_kl(s, kept(t, 4, 3.0)),
    "tokens, forward": lambda s, t: token_loss(s, kept(t), mask=torch.tensor([1, 0, 1]), token_count=7),
    "tokens, between": lambda s, t: token_loss(s, kept(t), beta=0.3, hard_labels=NEXT, hard_weight=0.4),
    "tokens, reverse": lambda s, t: token_loss(s, kept(t), beta=1.0),
}


def test_cosine_by_definition() -> None:
    s, t = drawn(2, 5, 8, seed=1), drawn(2, 5, 8, seed=2)
    expected = 1 - (s * t).sum(-1) / np.sqrt((s**2).sum(-1) * (t**2).sum(-1))
    np.testing.assert_allclose(feature_cosine(tensor(s), tensor(t), reduction="none").numpy(), expected)
    assert feature_cosine(tensor(s), tensor(3 * s)).item() == pytest.approx(0, abs=1e-12)
    assert feature_cosine(tensor(s), -s).item() == pytest.approx(2)


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_are_right(name: str) -> None:
    student, teacher = tensor(drawn(3, 4, seed=1)).requires_grad_(), tensor(drawn(3, 4, seed=2)).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: LOSSES[name](x, teacher.detach()), (student,))
    if "top-k" not in name and "tokens" not in name:
        LOSSES[name](student, teacher).backward()
        assert teacher.grad is None or (teacher.grad == 0).all()


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e15])
def test_any_size_stays_finite(name: str, scale: float) -> None:
    """Zeros as at the start of training, and what overflows when it is squared."""
    student = (tensor(drawn(3, 4, seed=1)).float() * scale).requires_grad_()
    for teacher in (tensor(drawn(3, 4, seed=2)).float(), torch.zeros(3, 4)):
        loss = LOSSES[name](student, teacher)
        (gradient,) = torch.autograd.grad(loss, student)
        assert torch.isfinite(loss)
        assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("name", LOSSES)
def test_half_precision_computes_in_float32(name: str) -> None:
    student, teacher = (tensor(drawn(3, 4, seed=seed)).to(torch.bfloat16) for seed in (1, 2))
    loss, expected = LOSSES[name](student, teacher), LOSSES[name](student.double(), teacher.double())
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4)


@pytest.mark.parametrize("name", LOSSES)
def test_nan_is_not_hidden(name: str) -> None:
    student, teacher = tensor(drawn(3, 4, seed=1)), tensor(drawn(3, 4, seed=2))
    teacher[2, 2] = float("nan")  # not in a token that a mask leaves out
    assert torch.isnan(LOSSES[name](student, teacher))


X = torch.zeros(3, 4)
KEPT = top_k(np.zeros((3, 4), np.float32), 2)
BAD: list[tuple[Callable[[], Any], str]] = [
    (lambda: kl_divergence(X, torch.zeros(3, 5)), r"student's logits are \[3, 4\], the teacher's \[3, 5\]"),
    (lambda: kl_divergence(X, X, temperature=0), "temperature=0"),
    (lambda: kl_divergence(X, X, reduction="batchmean"), "reduction='batchmean': must be 'mean', 'sum' or 'none'"),  # type: ignore[arg-type]
    (lambda: kl_divergence(X, X, teacher_is="probs"), "teacher_is='probs': must be"),  # type: ignore[arg-type]
    (
        lambda: kl_divergence(X, torch.full((3, 4), 3.0), teacher_is="probabilities"),
        "sums differ by up to 11.*'logits'",
    ),
    (
        lambda: soft_cross_entropy(X, torch.tensor([[2.0, -1, 0, 0]] * 3), teacher_is="probabilities"),
        "smallest label is -1",
    ),
    (lambda: kl_divergence(X.long(), X), "torch.int64"),
    (lambda: kl_divergence(X, [[0.0] * 4] * 3), "list: expected a tensor or a numpy array"),  # type: ignore[arg-type]
    (lambda: feature_mse(X, X[:, :3]), r"student's features are \[3, 4\], the teacher's \[3, 3\].*projection"),
    (lambda: DistillLoss(alpha=1.5), "alpha=1.5"),
    (lambda: DistillLoss(alpha=np.array([0.1, 0.2])), r"alpha=array\(\[0\.1, 0\.2\]\): the share"),  # type: ignore[arg-type]
    (lambda: DistillLoss(temperature=np.array([1.0, 2.0])), r"temperature=array\(\[1\., 2\.\]\): must be a finite"),  # type: ignore[arg-type]
    (lambda: DistillLoss(soft="reverse_kl"), "soft='reverse_kl'"),  # type: ignore[arg-type]
    (lambda: DistillLoss(soft="mse", teacher_is="probabilities"), "compares logits"),
    (lambda: DistillLoss()(X, X), "labels are missing: alpha=0.9"),
    (lambda: DistillLoss(3.0, 1.0)(X, None), "the teacher's labels and hard labels are missing"),
    (lambda: DistillLoss()(X, X, torch.zeros(2, dtype=torch.int64)), r"labels are .*\[2\].*whole numbers \[3\]"),
    (lambda: DistillLoss(4.0, 1)(X, KEPT), "have temperature 1, but the loss uses 4"),
    (lambda: DistillLoss(1.0, 1, soft="mse")(X, KEPT), "soft='kl', not 'mse'"),
    (lambda: top_k_kl(X[:, :3], KEPT), "student has 3 classes, but the teacher has 4"),
]


@pytest.mark.parametrize(("call", "words"), BAD)
def test_bad_input_is_named(call: Callable[[], Any], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        call()
