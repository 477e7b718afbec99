"""The chunked head: the same loss and gradients, and never the logits of all tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from edl.distill.compress import top_k  # noqa: E402
from edl.distill.losses import chunked_token_loss, token_loss  # noqa: E402
from edl.errors import SettingsError  # noqa: E402

FEATURES, VOCABULARY = 6, 12


def drawn(*shape: int, seed: int) -> Any:
    return torch.from_numpy(np.random.default_rng(seed).normal(0, 1, shape))


def make(rows: tuple[int, ...]) -> tuple[Any, Any, Any]:
    """States, a head's weight, and labels with four tokens kept."""
    hidden, weight = drawn(*rows, FEATURES, seed=1), drawn(VOCABULARY, FEATURES, seed=2)
    return hidden.requires_grad_(), weight.requires_grad_(), top_k(drawn(*rows, VOCABULARY, seed=3).numpy(), 4)


class LargestTensor(TorchDispatchMode):
    """Notes the most elements that a result of an operation has, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else [result]:
            if isinstance(value, torch.Tensor):
                self.elements = max(self.elements, value.numel())
        return result


@pytest.mark.parametrize(
    ("beta", "chunk_tokens", "masked", "hard_weight"),
    [(0.0, 4, True, 0.0), (0.0, None, False, 0.3), (0.5, 1, True, 0.3), (0.5, 100, False, 0.0), (1.0, 4, True, 0.3)],
)
def test_same_loss_and_gradients(beta: float, chunk_tokens: int | None, masked: bool, hard_weight: float) -> None:
    """As `token_loss` of all logits, whose gradients are checked there."""
    hidden, weight, labels = make((3, 5))
    mask = torch.from_numpy(np.random.default_rng(4).integers(0, 2, (3, 5))) if masked else None
    hard = torch.from_numpy(np.random.default_rng(5).integers(0, VOCABULARY, (3, 5)))
    options: dict[str, Any] = {"mask": mask, "beta": beta, "hard_labels": hard, "hard_weight": hard_weight}
    expected = token_loss(hidden @ weight.T, labels, **options)
    ours = chunked_token_loss(hidden, weight, labels, chunk_tokens=chunk_tokens, **options)
    assert ours.item() == pytest.approx(expected.item(), rel=1e-12)
    for ours_grad, theirs in zip(
        torch.autograd.grad(ours, (hidden, weight)), torch.autograd.grad(expected, (hidden, weight)), strict=True
    ):
        torch.testing.assert_close(ours_grad, theirs)


def test_all_logits_never_exist() -> None:
    """Guards the memory: of 64 tokens times 12 logits, 8 times 12 exist at a time, forward and backward."""
    hidden, weight, labels = make((64,))
    with LargestTensor() as chunked:
        chunked_token_loss(hidden, weight, labels, chunk_tokens=8).backward()
    with LargestTensor() as whole:
        token_loss(hidden @ weight.T, labels).backward()
    assert whole.elements == 64 * VOCABULARY
    assert chunked.elements == 64 * FEATURES  # the states themselves


def test_a_mask_of_zeros_is_a_zero_loss() -> None:
    """Every parameter has a gradient all the same: DDP waits for those that have none."""
    hidden, weight, labels = make((2, 3))
    loss = chunked_token_loss(hidden, weight, labels, mask=torch.zeros(2, 3, dtype=torch.bool))
    loss.backward()
    assert loss.item() == 0
    assert (hidden.grad == 0).all()
    assert (weight.grad == 0).all()


def test_the_head_may_be_a_module() -> None:
    """Also with a bias, under autocast, and with a count that is given."""
    hidden, _, labels = make((5,))
    head = torch.nn.Linear(FEATURES, VOCABULARY)
    states = hidden.detach().float().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        loss = chunked_token_loss(states, head, labels, token_count=torch.tensor(10), chunk_tokens=2)
        expected = token_loss(head(states), labels, token_count=10)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    loss.backward()
    assert head.bias.grad is not None
    with torch.no_grad():
        assert chunked_token_loss(states, head, labels).item() > 0


def test_bad_input_is_named() -> None:
    hidden, weight, labels = make((5,))
    with pytest.raises(SettingsError, match=r"hidden states are \[5, 6\], top-k labels \[4, 4\]"):
        chunked_token_loss(hidden, weight, labels[:4])
    with pytest.raises(SettingsError, match="chunk_tokens=0"):
        chunked_token_loss(hidden, weight, labels, chunk_tokens=0)
    with pytest.raises(SettingsError, match="int64"):
        chunked_token_loss(hidden.long(), weight, labels)
    with pytest.raises(SettingsError, match="student has 11 classes, the teacher 12"):
        chunked_token_loss(hidden, weight[:11], labels)
