"""Losses over the student's own tokens, against sums over a whole vocabulary."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from edl.distill.losses import sampled_kl, target_labels, token_log_probabilities, token_loss  # noqa: E402
from edl.errors import SettingsError  # noqa: E402

VOCABULARY = 7
INF = float("inf")


def drawn(*shape: int, seed: int) -> Any:
    return torch.from_numpy(np.random.default_rng(seed).normal(0, 2, shape))


def every_token(rows: int) -> Any:
    return torch.arange(VOCABULARY).repeat(rows, 1)


def test_log_probabilities_of_tokens() -> None:
    student, targets = drawn(2, 3, VOCABULARY, seed=1), torch.tensor([[0, 6, 2], [3, -100, 1]])
    found = token_log_probabilities(student, targets, temperature=2.0)
    expected = (student / 2).log_softmax(-1)
    assert found[0, 1].item() == pytest.approx(expected[0, 1, 6].item())
    assert torch.isfinite(found).all()
    several = token_log_probabilities(student, targets.unsqueeze(-1).expand(2, 3, 4), temperature=2.0)
    assert torch.equal(several, found.unsqueeze(-1).expand(2, 3, 4))
    assert token_log_probabilities(student.half(), targets).dtype == torch.float32
    with pytest.raises(SettingsError, match=r"targets are \[3\], logits \[2, 3, 7\]"):
        token_log_probabilities(student, targets[0])


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_estimates_are_unbiased(estimator: Any) -> None:
    """Weighing every token by the student's probability, in place of drawing it, gives the KL and its gradient."""
    student, teacher = drawn(4, VOCABULARY, seed=1).requires_grad_(), drawn(4, VOCABULARY, seed=2).log_softmax(-1)
    log_q = token_log_probabilities(student, every_token(4))
    estimates = sampled_kl(log_q, teacher, estimator=estimator, reduction="none")
    q = student.detach().softmax(-1)
    dense = (student.softmax(-1) * (student.log_softmax(-1) - teacher)).sum(-1)
    torch.testing.assert_close((q * estimates).sum(-1), dense)
    (ours,) = torch.autograd.grad((q * estimates).sum(), student)
    torch.testing.assert_close(ours, torch.autograd.grad(dense.sum(), student)[0])


def test_k3_is_never_negative() -> None:
    log_q, log_p = drawn(1000, seed=1), drawn(1000, seed=2)
    values = {name: sampled_kl(log_q, log_p, estimator=name, reduction="none") for name in ("k1", "k3")}
    assert (values["k1"] < 0).any()
    assert (values["k3"] >= 0).all()


@pytest.mark.parametrize("estimator", ["k1", "k3"])
@pytest.mark.parametrize("teacher", [-INF, 0.0, -200.0])
@pytest.mark.parametrize("student", [-200.0, 0.0])
def test_impossible_tokens_stay_finite(estimator: Any, teacher: float, student: float) -> None:
    x = torch.tensor([student], requires_grad=True)
    loss = sampled_kl(x, torch.tensor([teacher]), estimator=estimator)
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(x.grad).all()


def test_masked_samples_have_no_part() -> None:
    log_q, log_p = drawn(2, 3, seed=1).requires_grad_(), drawn(2, 3, seed=2)
    mask = torch.tensor([[1, 0, 0], [1, 1, 0]])
    rows = sampled_kl(log_q, log_p, reduction="none")
    loss = sampled_kl(log_q, log_p.numpy(), mask=mask)
    assert loss.item() == pytest.approx((rows * mask).sum().item() / 3)
    assert sampled_kl(log_q, log_p, mask=mask, token_count=30).item() == pytest.approx(loss.item() / 10)
    dirty = torch.where(mask != 0, log_q.detach(), float("nan")).requires_grad_()
    sampled_kl(dirty, torch.where(mask != 0, log_p, -INF), mask=mask).backward()
    loss.backward()
    assert torch.equal(dirty.grad, log_q.grad)
    empty = sampled_kl(torch.zeros(2, requires_grad=True), torch.zeros(2), mask=torch.zeros(2, dtype=torch.bool))
    assert empty.item() == 0


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("m", [1, 3, VOCABULARY])
def test_targets_are_labels(m: int, beta: float) -> None:
    """Tokens of the student's choice, and the rest as a single one, for teacher and student alike."""
    student, teacher = drawn(5, VOCABULARY, seed=1), drawn(5, VOCABULARY, seed=2).log_softmax(-1)
    targets = student.topk(m).indices
    labels = target_labels(targets, teacher.gather(-1, targets), classes=VOCABULARY)
    ours = token_loss(student, labels, beta=beta, floor=1e-9, reduction="none")
    p, q = (
        torch.cat([x.gather(-1, targets), (1 - x.gather(-1, targets).sum(-1, keepdim=True)).clamp(min=0)], -1)
        for x in (teacher.exp(), student.softmax(-1))
    )
    if m == VOCABULARY:
        p, q = p[:, :-1], q[:, :-1]
    mixture = beta * p + (1 - beta) * q
    if beta == 0:
        expected = (p * (p / q).log()).sum(-1)
    elif beta == 1:
        expected = (q * (q / p).log()).sum(-1)
    else:
        expected = (beta * p * (p / mixture).log() + (1 - beta) * q * (q / mixture).log()).sum(-1)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-7)


def test_all_mass_in_the_targets() -> None:
    """Rounding may add up to more than 1: the tail is empty then, not NaN."""
    values = torch.tensor([[0.0, -40.0], [1e-6, -INF], [-INF, -INF], [float("nan"), 0.0]])
    labels = target_labels(torch.tensor([[0, 1]] * 4), values)
    assert labels.tail_lse[:3].tolist() == [-INF, -INF, 0.0]
    assert torch.isnan(labels.tail_lse[3])
    student = torch.zeros(2, 4, requires_grad=True)
    loss = token_loss(student, labels[:2], beta=1)
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(student.grad).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rounded_targets_have_no_tail(dtype: Any) -> None:
    """The tail is a small difference of large numbers: -13.8 in truth, -12.2 by float16, and often -inf."""
    with pytest.raises(SettingsError, match="the tail, would be rounding error"):
        target_labels(torch.tensor([[0]]), torch.tensor([[-1e-6]]).to(dtype))
