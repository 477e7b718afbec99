"""PaddlePaddle's losses against numpy, and their gradients against finite differences."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of paddle's own imports
    paddle = pytest.importorskip("paddle", reason="PaddlePaddle is not installed")

from edl.distill.compress import TopK, top_k
from edl.distill.paddle_losses import (
    DistillLoss,
    kl_divergence,
    logit_mse,
    soft_cross_entropy,
    token_loss,
    top_k_kl,
)
from edl.errors import SettingsError

Array = np.ndarray[Any, Any]


def logits(shape: tuple[int, ...], seed: int) -> Array:
    return np.random.default_rng(seed).normal(0, 3, shape)


def softmax(values: Array, temperature: float = 1.0) -> Array:
    weights = np.exp(values / temperature)
    return weights / weights.sum(-1, keepdims=True)


@pytest.mark.parametrize("shape", [(5, 11), (3, 4, 7)])
@pytest.mark.parametrize("temperature", [1.0, 4.0])
@pytest.mark.parametrize("teacher_is", ["logits", "probabilities"])
def test_kl_and_cross_entropy_by_definition(shape: tuple[int, ...], temperature: float, teacher_is: Any) -> None:
    """KL and cross entropy are what their definitions say."""
    student, teacher = logits(shape, 1), logits(shape, 2)
    p, q = softmax(teacher, temperature), softmax(student, temperature)
    given = teacher if teacher_is == "logits" else softmax(teacher)
    settings: dict[str, Any] = {"temperature": temperature, "teacher_is": teacher_is, "reduction": "none"}
    kl = kl_divergence(paddle.to_tensor(student), paddle.to_tensor(given), **settings)
    entropy = soft_cross_entropy(paddle.to_tensor(student), given, **settings)
    np.testing.assert_allclose(kl.numpy(), temperature**2 * (p * np.log(p / q)).sum(-1), rtol=1e-9)
    np.testing.assert_allclose(entropy.numpy(), -(temperature**2) * (p * np.log(q)).sum(-1), rtol=1e-9)
    for reduction, expected in (("mean", kl.numpy().mean()), ("sum", kl.numpy().sum())):
        settings["reduction"] = reduction
        assert float(kl_divergence(paddle.to_tensor(student), given, **settings)) == pytest.approx(expected)


@pytest.mark.parametrize("k", [1, 3, 10])
@pytest.mark.parametrize("temperature", [1.0, 4.0])
def test_top_k_kl_counts_the_tail_as_a_class(k: int, temperature: float) -> None:
    student, teacher = logits((5, 11), 1), logits((5, 11), 2)
    labels = top_k(teacher, k, temperature)
    p, q = softmax(teacher, temperature), softmax(student, temperature)
    expected = []
    for row in range(5):
        kept = labels.ids[row]
        merged_p = np.append(p[row, kept], np.delete(p[row], kept).sum())
        merged_q = np.append(q[row, kept], np.delete(q[row], kept).sum())
        expected.append(temperature**2 * (merged_p * np.log(merged_p / merged_q)).sum())
    ours = top_k_kl(paddle.to_tensor(student), labels, reduction="none").numpy()
    np.testing.assert_allclose(ours, expected, rtol=1e-5)
    tensors = labels.map(paddle.to_tensor)
    np.testing.assert_array_equal(top_k_kl(paddle.to_tensor(student), tensors, reduction="none").numpy(), ours)


def test_full_top_k_kl_is_the_dense_kl() -> None:
    """With every class kept, top-k KL is the dense KL."""
    student, teacher = paddle.to_tensor(logits((5, 11), 1)), logits((5, 11), 2)
    dense = kl_divergence(student, teacher, temperature=3.0)
    assert float(top_k_kl(student, top_k(teacher, 11, 3.0))) == pytest.approx(float(dense), rel=1e-12)


TOKENS = top_k(logits((3, 5), 2), 2, 3.0)
NEXT_TOKENS = paddle.to_tensor([4, -100, 0])

LOSSES: dict[str, Callable[[Any], Any]] = {
    "kl": lambda x: kl_divergence(x, logits((3, 5), 2), temperature=2.0),
    "cross-entropy": lambda x: soft_cross_entropy(
        x, softmax(logits((3, 5), 2)), temperature=0.7, teacher_is="probabilities"
    ),
    "top-k": lambda x: top_k_kl(x, top_k(logits((3, 5), 2), 2, 3.0)),
    "top-k of all": lambda x: top_k_kl(x, top_k(logits((3, 5), 2), 5, 3.0)),
    "logits": lambda x: logit_mse(x, paddle.to_tensor(logits((3, 5), 2))),
    "mixture": lambda x: DistillLoss(2.0, 0.3)(x, paddle.to_tensor(logits((3, 5), 2)), paddle.to_tensor([0, 4, 2])),
    "tokens, forward": lambda x: token_loss(x, TOKENS, mask=paddle.to_tensor([1, 0, 1]), token_count=7),
    "tokens, between": lambda x: token_loss(x, TOKENS, beta=0.3, hard_labels=NEXT_TOKENS, hard_weight=0.4),
    "tokens, reverse": lambda x: token_loss(x, TOKENS, mask=paddle.to_tensor([1, 1, 0]), beta=1.0, reduction="sum"),
}


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_are_right(name: str) -> None:
    at = logits((3, 5), 1)
    student = paddle.to_tensor(at, stop_gradient=False)
    LOSSES[name](student).backward()
    numeric = np.zeros_like(at)
    for index in np.ndindex(*at.shape):
        ends = []
        for step in (1e-5, -1e-5):
            moved = at.copy()
            moved[index] += step
            ends.append(float(LOSSES[name](paddle.to_tensor(moved))))
        numeric[index] = (ends[0] - ends[1]) / 2e-5
    np.testing.assert_allclose(student.grad.numpy(), numeric, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_computes_in_float32(dtype: str) -> None:
    student = paddle.to_tensor(logits((4, 100), 1)).astype(dtype)
    teacher = paddle.to_tensor(logits((4, 100), 2)).astype(dtype)
    loss = kl_divergence(student, teacher, temperature=4.0)
    assert loss.dtype == paddle.float32
    wide = kl_divergence(student.astype("float64"), teacher.astype("float64"), temperature=4.0)
    assert float(loss) == pytest.approx(float(wide), rel=1e-5)


def test_masked_classes_add_nothing() -> None:
    teacher = np.array([[1.0, 2.0, -np.inf, -np.inf]], np.float32)
    for loss in (
        lambda x: kl_divergence(x, teacher),
        lambda x: soft_cross_entropy(x, teacher),
        lambda x: top_k_kl(x, top_k(teacher, 2)),
    ):
        student = paddle.to_tensor(np.array([[0.5, 0.1, 3.0, -1.0]], np.float32), stop_gradient=False)
        value = loss(student)
        value.backward()
        assert np.isfinite(float(value))
        assert np.isfinite(student.grad.numpy()).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_no_distribution_is_no_zero_loss(bad: float) -> None:
    """A teacher without a distribution is not a loss of zero."""
    student, teacher = paddle.zeros([2, 4]), np.zeros((2, 4), np.float32)
    teacher[0, 1] = bad
    kept = TopK(np.array([[1, 0]] * 2, np.int32), teacher[:, [1, 0]], np.zeros(2, np.float32))
    for loss in (
        kl_divergence(student, teacher, reduction="none"),
        soft_cross_entropy(student, teacher, reduction="none"),
        top_k_kl(student, kept, reduction="none"),
    ):
        assert np.isnan(loss.numpy()).tolist() == [True, False]


def test_bad_input_is_named() -> None:
    x = paddle.zeros([2, 4])
    bad: list[tuple[Callable[[], Any], str]] = [
        (lambda: kl_divergence(x, paddle.zeros([2, 5])), r"student are \[2, 4\], of the teacher \[2, 5\]"),
        (lambda: kl_divergence(x, x, temperature=0), "temperature=0"),
        (lambda: kl_divergence(x, x, reduction="batchmean"), "reduction='batchmean'"),  # type: ignore[arg-type]
        (lambda: kl_divergence(x, x, teacher_is="probs"), "teacher_is='probs'"),  # type: ignore[arg-type]
        (lambda: kl_divergence(x.astype("int64"), x), "int64"),
        (lambda: kl_divergence(x, [[0.0] * 4] * 2), "list"),
        (lambda: top_k_kl(x, top_k(np.zeros((3, 4), np.float32), 2)), "rows do not agree"),
        (lambda: top_k_kl(x, top_k(np.zeros((2, 5), np.float32), 2)), "student has 4 classes, the teacher 5"),
    ]
    for call, words in bad:
        with pytest.raises(SettingsError, match=words):
            call()


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_token_loss_by_definition(beta: float, temperature: float) -> None:
    """The generalized Jensen-Shannon divergence over the tokens kept and the tail; what is masked adds nothing."""
    student, teacher = logits((3, 4, 9), 1), logits((3, 4, 9), 2)
    mask = np.array([[1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]])
    labels = top_k(teacher, 5, temperature)
    p, q = (merged(softmax(values, temperature), labels.ids) for values in (teacher, student))
    m = beta * p + (1 - beta) * q
    if beta == 1:
        expected = (q * np.log(q / p)).sum(-1)
    else:
        expected = (p * np.log(p / m)).sum(-1) * (beta or 1) + (1 - beta) * (q * np.log(q / m)).sum(-1)
    expected = expected * temperature**2
    student[mask == 0] = np.nan
    tensor = paddle.to_tensor(student, stop_gradient=False)
    settings: dict[str, Any] = {"mask": paddle.to_tensor(mask), "beta": beta, "floor": 1e-30}
    losses = token_loss(tensor, labels.map(paddle.to_tensor), reduction="none", **settings)
    np.testing.assert_allclose(losses.numpy(), np.where(mask, expected, 0), rtol=1e-6)
    assert float(token_loss(tensor, labels, **settings)) == pytest.approx((expected * mask).sum() / 4)
    loss = token_loss(tensor, labels, token_count=10, **settings)
    assert float(loss) == pytest.approx((expected * mask).sum() / 10)
    loss.backward()
    gradient = tensor.grad.numpy()
    assert np.isfinite(gradient).all()
    assert not gradient[mask == 0].any()
    assert gradient[mask == 1].any()


def merged(probabilities: Array, ids: Array) -> Array:
    kept = np.take_along_axis(probabilities, ids.astype(int), -1)
    return np.concatenate([kept, 1 - kept.sum(-1, keepdims=True)], -1)


def test_token_loss_of_no_token_is_zero() -> None:
    labels = top_k(logits((2, 6), 1), 3)
    student = paddle.to_tensor(np.full((2, 6), np.nan), stop_gradient=False)
    loss = token_loss(student, labels, mask=paddle.zeros([2], dtype="int64"))
    loss.backward()
    assert float(loss) == 0
    assert not student.grad.numpy().any()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"beta": 1.5}, "beta=1.5"),
        ({"floor": 0.0}, "floor=0.0"),
        ({"mask": np.ones((3,), np.int64)}, "the mask is"),
        ({"mask": np.array([5, -100])}, "the mask holds -100"),
        ({"mask": np.ones((2,), np.float32)}, "expected bool or whole numbers"),
        ({"reduction": "all"}, "reduction='all'"),
    ],
)
def test_token_loss_refuses(options: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        token_loss(paddle.to_tensor(logits((2, 6), 0)), top_k(logits((2, 6), 1), 3), **options)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("soft", ["kl", "cross_entropy", "mse", "top k"])
@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_mixture_is_that_of_pytorch(soft: Any, alpha: float, reduction: Any) -> None:
    """`DistillLoss` takes what PyTorch's takes, and computes the same, gradients included."""
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    from edl.distill.losses import DistillLoss as TorchLoss

    at, hard = logits((6, 5), 1), np.array([0, 3, -100, 4, -100, 1])
    teacher = top_k(logits((6, 5), 2), 3, 2.0) if soft == "top k" else logits((6, 5), 2)
    settings: dict[str, Any] = {"soft": "kl" if soft == "top k" else soft, "reduction": reduction}
    student, theirs = paddle.to_tensor(at, stop_gradient=False), torch.from_numpy(at).requires_grad_()
    loss = DistillLoss(2.0, alpha, **settings)(student, teacher, paddle.to_tensor(hard))
    expected = TorchLoss(2.0, alpha, **settings)(theirs, teacher, torch.from_numpy(hard))
    np.testing.assert_allclose(loss.numpy(), expected.detach().numpy(), rtol=1e-6)
    loss.sum().backward()
    expected.sum().backward()
    np.testing.assert_allclose(student.grad.numpy(), theirs.grad.numpy(), rtol=1e-5, atol=1e-8)


def test_mixture_of_missing_parts() -> None:
    """No row may have a label, labels may be probabilities, and there may be no teacher."""
    x, teacher = paddle.to_tensor(logits((4, 5), 1)), logits((4, 5), 2)
    loss, hard = DistillLoss(2.0, 0.25), paddle.to_tensor([1, 2, 3, 4])
    soft = kl_divergence(x, teacher, temperature=2.0)
    assert float(loss(x, teacher, paddle.full([4], -100, "int64"))) == pytest.approx(0.25 * float(soft))
    entropy = paddle.nn.functional.cross_entropy(x, hard)
    assert float(loss(x, None, hard)) == pytest.approx(float(entropy))
    assert float(loss(x, None, hard.unsqueeze(-1))) == float(loss(x, None, hard.numpy())) == float(loss(x, None, hard))
    known = paddle.nn.functional.one_hot(hard, 5).astype(x.dtype)
    assert float(loss(x, None, known)) == pytest.approx(float(entropy))
    assert float(loss(x, teacher, known)) == pytest.approx(0.25 * float(soft) + 0.75 * float(entropy))
    with pytest.raises(SettingsError, match="labels are missing"):
        loss(x, teacher)
    with pytest.raises(SettingsError, match="neither a teacher's labels nor hard ones"):
        loss(x, None)
    with pytest.raises(SettingsError, match=r"labels hold 5: must be from 0 to 4, or -100"):
        loss(x, teacher, paddle.to_tensor([1, 2, 3, 5]))
    with pytest.raises(SettingsError, match=r"expected whole numbers \[4\]"):
        loss(x, teacher, paddle.to_tensor([1, 2, 3]))
    with pytest.raises(SettingsError, match="ask the teachers for temperature=2"):
        loss(x, top_k(teacher, 3, 1.0), hard)
    for wrong in ({"alpha": 2}, {"temperature": 0}, {"soft": "l1"}, {"teacher_is": "x"}, {"reduction": "x"}):
        with pytest.raises(SettingsError, match=f"{next(iter(wrong))}="):
            DistillLoss(**wrong)  # type: ignore[arg-type]
    assert float(logit_mse(x, teacher)) == pytest.approx(float(((x.numpy() - teacher) ** 2).mean()))


@pytest.mark.parametrize("weight", [0.3, 1.0])
def test_hard_labels_have_their_share(weight: float) -> None:
    """Of each token's loss, divided by the same count; what the mask leaves out may hold anything."""
    student, labels = logits((2, 3, 9), 1), top_k(logits((2, 3, 9), 2), 5)
    mask, hard = np.array([[1, 1, 0], [1, 0, 0]]), np.array([[4, -100, 99], [8, 99, 99]])
    soft = token_loss(paddle.to_tensor(student), labels, reduction="none").numpy()
    entropy = -np.log(softmax(student))[[0, 1], [0, 0], [4, 8]].sum()
    expected = ((1 - weight) * (soft * mask).sum() + weight * entropy) / 3
    settings = {"mask": paddle.to_tensor(mask), "hard_labels": paddle.to_tensor(hard), "hard_weight": weight}
    assert float(token_loss(paddle.to_tensor(student), labels, **settings)) == pytest.approx(expected, rel=1e-5)
    with pytest.raises(SettingsError, match=r"hard_labels are \[6\], the logits \[2, 3, 9\]"):
        token_loss(paddle.to_tensor(student), labels, hard_labels=paddle.zeros([6], "int64"), hard_weight=weight)
    with pytest.raises(SettingsError, match="hard_labels, which are missing"):
        token_loss(paddle.to_tensor(student), labels, hard_weight=weight)
