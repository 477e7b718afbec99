"""Losses of features and images, against their formulas in float64; and the numerics of all losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from edl.distill.compress import top_k  # noqa: E402
from edl.distill.losses import (  # noqa: E402
    DistillLoss,
    attention_transfer,
    contrastive,
    correlation_loss,
    decoupled_kl,
    feature_cosine,
    feature_mse,
    kl_divergence,
    logit_mse,
    soft_cross_entropy,
    token_loss,
    top_k_kl,
)
from edl.errors import SettingsError  # noqa: E402

Array = np.ndarray[Any, Any]


def drawn(*shape: int, seed: int) -> Array:
    return np.random.default_rng(seed).normal(0, 2, shape)


def tensor(array: Array) -> Any:
    return torch.from_numpy(array.copy())


def softmax(values: Array, temperature: float) -> Array:
    weights = np.exp(values / temperature)
    return weights / weights.sum(-1, keepdims=True)


LABELS = torch.tensor([0, 3, 2])
NEXT = torch.tensor([1, -100, 3])


def kept(teacher: Any, k: int = 2, temperature: float = 1.0) -> Any:
    return top_k(teacher.double().numpy(), k, temperature)


LOSSES: dict[str, Callable[[Any, Any], Any]] = {
    "cosine": feature_cosine,
    "contrastive": lambda s, t: contrastive(s, t, temperature=0.5, negatives=t.flip(1)[:2]),
    "DIST": lambda s, t: correlation_loss(s, t, beta=2.0, gamma=0.5, temperature=3.0),
    "DKD": lambda s, t: decoupled_kl(s, t, LABELS, beta=2.0, temperature=3.0),
    "MSE": lambda s, t: logit_mse(s, t) + feature_mse(s, t, reduction="sum"),
    "KL": lambda s, t: kl_divergence(s, t, temperature=2.0),
    "cross-entropy": lambda s, t: soft_cross_entropy(s, t, temperature=0.7),
    "mixture": lambda s, t: DistillLoss(2.0, 0.3)(s, t, LABELS),
    "top-k": lambda s, t: top_k_kl(s, kept(t, 2, 3.0)),
    "top-k of all": lambda s, t: top_k_kl(s, kept(t, 4, 3.0)),
    "tokens, forward": lambda s, t: token_loss(s, kept(t), mask=torch.tensor([1, 0, 1]), token_count=7),
    "tokens, between": lambda s, t: token_loss(s, kept(t), beta=0.3, hard_labels=NEXT, hard_weight=0.4),
    "tokens, reverse": lambda s, t: token_loss(s, kept(t), beta=1.0),
    "attention": lambda s, t: attention_transfer(s.reshape(-1, 1, 2, 2), t.reshape(-1, 1, 2, 2)),
}


def test_cosine_by_definition() -> None:
    s, t = drawn(2, 5, 8, seed=1), drawn(2, 5, 8, seed=2)
    expected = 1 - (s * t).sum(-1) / np.sqrt((s**2).sum(-1) * (t**2).sum(-1))
    np.testing.assert_allclose(feature_cosine(tensor(s), tensor(t), reduction="none").numpy(), expected)
    assert feature_cosine(tensor(s), tensor(3 * s)).item() == pytest.approx(0, abs=1e-12)
    assert feature_cosine(tensor(s), -s).item() == pytest.approx(2)


def test_contrastive_by_definition() -> None:
    s, t, others = drawn(4, 8, seed=1), drawn(4, 8, seed=2), drawn(3, 8, seed=3)
    s, t, others = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (s, t, others))
    for negatives in (None, others):
        similarities = np.exp(s @ np.concatenate([t, others][: 1 if negatives is None else 2]).T / 0.1)
        expected = -np.log(np.diagonal(similarities) / similarities.sum(1))
        ours = contrastive(tensor(5 * s), t, temperature=0.1, negatives=negatives, reduction="none")
        np.testing.assert_allclose(ours.numpy(), expected)


def test_decoupled_kl_by_definition() -> None:
    """Both parts on their own, also with axes between."""
    s, t, labels = drawn(2, 3, 5, seed=1), drawn(2, 3, 5, seed=2), torch.arange(6).reshape(2, 3) % 5
    q, p = softmax(s, 2.0), softmax(t, 2.0)
    for index in np.ndindex(2, 3):
        true = int(labels[index])
        other = [j for j in range(5) if j != true]
        p_t, q_t = p[index][true], q[index][true]
        tckd = p_t * np.log(p_t / q_t) + (1 - p_t) * np.log((1 - p_t) / (1 - q_t))
        p_o, q_o = p[index][other] / (1 - p_t), q[index][other] / (1 - q_t)
        nckd = (p_o * np.log(p_o / q_o)).sum()
        for alpha, beta in ((1.0, 0.0), (0.0, 1.0), (1.0, 8.0)):
            rows = decoupled_kl(tensor(s), t, labels, alpha=alpha, beta=beta, temperature=2.0, reduction="none")
            assert rows[index].item() == pytest.approx(4 * (alpha * tckd + beta * nckd))


def test_correlations_are_numpys() -> None:
    s, t = drawn(6, 4, seed=1), drawn(6, 4, seed=2)
    q, p = softmax(s, 2.0), softmax(t, 2.0)
    inter = np.mean([np.corrcoef(q[i], p[i])[0, 1] for i in range(6)])
    intra = np.mean([np.corrcoef(q[:, j], p[:, j])[0, 1] for j in range(4)])
    ours = correlation_loss(tensor(s), t, beta=2.0, gamma=3.0, temperature=2.0)
    assert ours.item() == pytest.approx(4 * (2 * (1 - inter) + 3 * (1 - intra)))
    assert correlation_loss(tensor(s), s).item() == pytest.approx(0, abs=1e-12)


def test_attention_by_definition() -> None:
    """Another number of channels, and of spatial axes, is fine."""
    s, t = drawn(3, 4, 5, 6, seed=1), drawn(3, 7, 5, 6, seed=2)
    maps = [(x**2).sum(1).reshape(3, -1) for x in (s, t)]
    q, p = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in maps)
    ours = attention_transfer(tensor(s), t, reduction="none")
    np.testing.assert_allclose(ours.numpy(), ((q - p) ** 2).mean(1))
    flat = attention_transfer(tensor(s).flatten(2), t.reshape(3, 7, -1), reduction="none")
    np.testing.assert_allclose(flat.numpy(), ours.numpy())
    assert attention_transfer(tensor(s), 100 * s).item() == pytest.approx(0, abs=1e-12)


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
BAD: list[tuple[Callable[[], Any], str]] = [
    (lambda: feature_cosine(X, X[:, :3]), r"student are \[3, 4\], of the teacher \[3, 3\].*projection"),
    (lambda: contrastive(X, X, temperature=0), "temperature=0"),
    (lambda: contrastive(X[:1], X[:1]), "a single row"),
    (lambda: contrastive(X, X, negatives=X[:, :2]), r"negatives are \[3, 2\]: expected \[any number, 4\]"),
    (lambda: attention_transfer(X, X), "channels"),
    (lambda: decoupled_kl(X, X, LABELS.float()), r"labels are torch\.float32 \[3\]"),
    (lambda: decoupled_kl(X, X, LABELS, beta=-1), "beta=-1"),
    (lambda: correlation_loss(X, X, gamma=float("nan")), "gamma=nan"),
    (lambda: correlation_loss(X[None], X[None]), r"logits are \[1, 3, 4\]: expected \[rows, classes\]"),
]


@pytest.mark.parametrize(("call", "words"), BAD)
def test_bad_input_is_named(call: Callable[[], Any], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        call()
