"""PaddlePaddle: losses are PyTorch's, gradients included, which test_losses.py checks; `distill` around a loader."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of paddle's own imports
    paddle = pytest.importorskip("paddle", reason="PaddlePaddle is not installed")
torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from edl.distill import Options, paddle_losses  # noqa: E402
from edl.distill import losses as torch_losses  # noqa: E402
from edl.distill.compress import top_k  # noqa: E402
from edl.distill.paddle import distill  # noqa: E402
from edl.distill.paddle_losses import DistillLoss, kl_divergence, token_loss  # noqa: E402
from edl.errors import SettingsError  # noqa: E402
from tests.fast.distill.conftest import Serve  # noqa: E402
from tests.fast.distill.losses.test_tokens import logits  # noqa: E402

Array = np.ndarray[Any, Any]
SHAPE = (6, 5)
HARD = np.array([0, 3, -100, 4, -100, 1])
MASK = np.array([1, 1, 0, 1, 0, 1])


TEACHER = logits(SHAPE, 2)
WEIGHTS = np.exp(TEACHER) / np.exp(TEACHER).sum(-1, keepdims=True)
MASKED = np.where([True, True, True, False, False], TEACHER, -np.inf)
BROKEN = np.where(np.arange(30).reshape(SHAPE) == 7, np.nan, TEACHER)
KEPT, ALL = top_k(TEACHER, 3, 2.0), top_k(TEACHER, 5, 2.0)
WIDE = top_k(logits((6, 8), 3), 4)  # of a vocabulary that is padded
CASES: dict[str, Callable[[Any, Any, Callable[[Array], Any]], Any]] = {
    "kl": lambda it, x, of: it.kl_divergence(x, of(TEACHER), temperature=4.0),
    "kl, probabilities": lambda it, x, of: it.kl_divergence(x, WEIGHTS, temperature=2.0, teacher_is="probabilities"),
    "cross-entropy": lambda it, x, of: it.soft_cross_entropy(x, of(TEACHER), temperature=0.7, reduction="sum"),
    "top-k, tensors": lambda it, x, of: it.top_k_kl(x, KEPT.map(of)),
    "top-k of all": lambda it, x, of: it.top_k_kl(x, ALL),
    "kl, masked classes": lambda it, x, of: it.kl_divergence(x, MASKED),
    "top-k, masked classes": lambda it, x, of: it.top_k_kl(x, top_k(MASKED, 3)),
    "top-k, NaN": lambda it, x, of: it.top_k_kl(x, replace(ALL, values=ALL.values * BROKEN), reduction="none"),
    "mse": lambda it, x, of: it.logit_mse(x, of(TEACHER)),
    "mixture, rows": lambda it, x, of: it.DistillLoss(2.0, 0.3, soft="mse", reduction="none")(x, TEACHER, of(HARD)),
    "mixture, no teacher": lambda it, x, of: it.DistillLoss(2.0, 0.3)(x, None, of(HARD)),
    "mixture, column": lambda it, x, of: it.DistillLoss(2.0, 0.3)(x, TEACHER, HARD[:, None]),  # as in paddle's data
    "mixture, no labels": lambda it, x, of: it.DistillLoss(2.0, 0.3)(x, TEACHER, of(0 * HARD - 100)),
    "mixture, known mixture": lambda it, x, of: it.DistillLoss(2.0, 0.3)(x, TEACHER, of(WEIGHTS)),
    "masked tokens": lambda it, x, of: it.token_loss(x, KEPT, mask=of(MASK), token_count=7),
    "masked tokens, between": lambda it, x, of: it.token_loss(
        x, KEPT.map(of), mask=of(MASK), beta=0.3, reduction="none"
    ),
    "masked tokens, reverse": lambda it, x, of: it.token_loss(x, KEPT, mask=of(MASK), beta=1.0, reduction="sum"),
    "masked tokens, hard": lambda it, x, of: it.token_loss(
        x, KEPT, mask=of(MASK), hard_labels=of(HARD), hard_weight=0.4
    ),
    "tokens, hard alone": lambda it, x, of: it.token_loss(x, KEPT, hard_labels=of(HARD), hard_weight=1.0),
    "tokens, padded vocabulary": lambda it, x, of: it.token_loss(x, WIDE, beta=0.5, padded_vocabulary=True),
    "masked tokens, none": lambda it, x, of: it.token_loss(x, KEPT, mask=of(0 * MASK)),
}


@pytest.mark.parametrize("name", CASES)
def test_losses_are_those_of_pytorch(name: str) -> None:
    """What a mask leaves out may hold anything."""
    at = logits(SHAPE, 1)
    if name.startswith("masked"):
        at[MASK == 0] = np.nan
    student, theirs = paddle.to_tensor(at, stop_gradient=False), torch.from_numpy(at.copy()).requires_grad_()
    loss = CASES[name](paddle_losses, student, paddle.to_tensor)
    expected = CASES[name](torch_losses, theirs, lambda array: torch.from_numpy(array.copy()))
    np.testing.assert_allclose(loss.numpy(), expected.detach().numpy(), rtol=1e-5, atol=1e-9)
    loss.sum().backward()
    expected.sum().backward()
    np.testing.assert_allclose(student.grad.numpy(), theirs.grad.numpy(), rtol=1e-5, atol=1e-8)


X = paddle.zeros([2, 4])
L = top_k(np.zeros((2, 4), np.float32), 2)
BAD: list[tuple[Callable[[], Any], str]] = [
    (lambda: kl_divergence(X.astype("int64"), X), "int64"),
    (lambda: kl_divergence(X, [[0.0] * 4] * 2), "list"),
    (lambda: token_loss(X, L, mask=np.array([5, -100])), "the mask holds -100"),
    (lambda: token_loss(X, L, mask=np.ones(2, np.float32)), "expected bool or whole numbers"),
    (lambda: token_loss(X, L, token_count=paddle.ones([2])), r"token_count has shape \[2\]"),
    (lambda: token_loss(X, replace(L, ids=np.array([[0, 1], [2, 2]]))), "class 2 more than once"),
    (lambda: DistillLoss()(X, X, paddle.to_tensor([1, 4])), r"labels hold 4: must be from 0 to 3, or -100"),
    (lambda: DistillLoss()(X, X, paddle.to_tensor([1, 2, 3])), r"expected whole numbers \[2\]"),
]


@pytest.mark.parametrize(("call", "words"), BAD)
def test_bad_input_is_named(call: Callable[[], Any], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        call()


class Numbers(paddle.io.Dataset):  # type: ignore[misc,name-defined]
    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return np.full(4, index, np.float32), index


@pytest.mark.filterwarnings("ignore")
def test_batches_have_labels_as_tensors(serve: Serve) -> None:
    data = paddle.io.DataLoader(Numbers(), batch_size=8, shuffle=True)
    teacher, options = serve("echo"), Options(teacher_timeout_s=60)
    with distill(data, teacher.endpoint, inputs=["x", None], outputs="y", options=options) as loader:
        assert len(loader) == 7
        for _ in range(2):
            seen: list[int] = []
            for (x, numbers), soft in loader:
                assert isinstance(soft, paddle.Tensor)
                assert (soft[:, 0].numpy() == numbers.numpy()).all()
                assert (x[:, 0].numpy() == numbers.numpy()).all()
                seen += numbers.tolist()
            assert sorted(seen) == list(range(50))
