"""The losses of tokens against sums written out in numpy float64, and what sequences may hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from edl.distill.compress import TopK, top_k  # noqa: E402
from edl.distill.losses import (  # noqa: E402
    chunked_token_loss,
    sampled_kl,
    target_labels,
    token_log_probabilities,
    token_loss,
)
from edl.errors import SettingsError  # noqa: E402

Array = np.ndarray[Any, Any]
BETAS = [0.0, 0.5, 1.0]
INF = float("inf")


def logits(shape: tuple[int, ...], seed: int, scale: float = 3.0) -> Array:
    return np.random.default_rng(seed).normal(0, scale, shape)


def softmax(values: Array, temperature: float = 1.0) -> Array:
    weights = np.exp((values - values.max(-1, keepdims=True)) / temperature)
    return weights / weights.sum(-1, keepdims=True)


def kl(p: Array, q: Array) -> float:
    return float(sum(a * (np.log(a) - np.log(b)) for a, b in zip(p, q, strict=True) if a > 0))


def jsd_by_hand(p: Array, q: Array, beta: float, floor: float) -> float:
    """The definition, for one token."""
    if beta == 0:
        return kl(p, q)
    if beta == 1:
        floored = np.maximum(p, floor)
        return kl(q, floored / floored.sum())
    m = beta * p + (1 - beta) * q
    return beta * kl(p, m) + (1 - beta) * kl(q, m)


def loss_by_hand(
    student: Array, teacher: Array, k: int, beta: float, temperature: float = 1.0, floor: float = 1e-6
) -> Array:
    """From both whole distributions: the k likeliest of the teacher's, and the rest summed up."""
    rows = []
    for s, t in zip(student.reshape(-1, student.shape[-1]), teacher.reshape(-1, teacher.shape[-1]), strict=True):
        order = np.argsort(-t)
        p, q = softmax(t, temperature)[order], softmax(s, temperature)[order]
        if k < len(order):
            p, q = np.append(p[:k], p[k:].sum()), np.append(q[:k], q[k:].sum())
        rows.append(temperature**2 * jsd_by_hand(p, q, beta, floor))
    return np.array(rows).reshape(student.shape[:-1])


def tensor(array: Array) -> Any:
    return torch.from_numpy(array.copy())


def drawn(*shape: int, seed: int) -> Any:
    return tensor(logits(shape, seed, 1.5))


@pytest.mark.parametrize("temperature", [0.5, 4.0])
@pytest.mark.parametrize("k", [1, 4, 10, 11])
def test_divergences_by_definition(k: int, temperature: float) -> None:
    student, teacher = logits((2, 3, 11), 1), logits((2, 3, 11), 2)
    for beta in (0.0, 0.1, 0.5, 0.9, 1.0):
        rows = token_loss(tensor(student), top_k(teacher, k, temperature), beta=beta, reduction="none")
        expected = loss_by_hand(student, teacher, k, beta, temperature)
        np.testing.assert_allclose(rows.numpy(), expected, rtol=2e-6, atol=1e-9, err_msg=f"beta={beta}")


@pytest.mark.parametrize("bad", [float("nan"), -INF])
@pytest.mark.parametrize("beta", BETAS)
def test_padding_may_hold_anything(beta: float, bad: float) -> None:
    """Logits and labels of tokens that do not count, negative ids included, reach neither the loss nor its gradient."""
    labels = top_k(logits((3, 7), 2).astype(np.float32), 3).map(tensor)
    clean, mask = tensor(logits((3, 7), 1)).requires_grad_(), torch.tensor([True, True, False])
    token_loss(clean, labels, mask=mask, beta=beta).backward()
    labels.ids[2], labels.values[2], labels.tail_lse[2] = -100, bad, bad
    dirty = clean.detach().clone()
    dirty[2] = bad
    dirty.requires_grad_()
    token_loss(dirty, labels, mask=mask, beta=beta).backward()
    assert torch.equal(dirty.grad, clean.grad)


@pytest.mark.parametrize("beta", BETAS)
def test_no_tokens_are_a_zero_loss(beta: float) -> None:
    labels = top_k(logits((2, 3, 7), 2), 3)
    for count in (None, 0, torch.tensor(0)):
        student = torch.full((2, 3, 7), float("nan"), requires_grad=True)
        loss = token_loss(student, labels, mask=torch.zeros(2, 3, dtype=torch.int64), beta=beta, token_count=count)
        loss.backward()
        assert loss.item() == 0
        assert student.grad.tolist() == torch.zeros(2, 3, 7).tolist()
    student = torch.zeros(0, 7, requires_grad=True)
    loss = token_loss(student, TopK(np.zeros((0, 2), np.int32), np.zeros((0, 2), np.float32), np.zeros(0, np.float32)))
    loss.backward()
    assert loss.item() == 0
    assert student.grad.shape == (0, 7)


@pytest.mark.parametrize("beta", BETAS)
def test_impossible_tokens_stay_finite(beta: float) -> None:
    """The teacher masks classes 2 to 5, all of the tail with k = 2, the student 3 to 5."""
    teacher = np.array([[1.0, 2.0, -INF, -INF, -INF, -INF]], np.float32)
    for k in (2, 3, 6):
        student = torch.tensor([[0.5, 0.1, -1.0, -INF, -INF, -INF]], requires_grad=True)
        loss = token_loss(student, top_k(teacher, k), beta=beta)
        loss.backward()
        assert torch.isfinite(student.grad).all()
        p, q = softmax(teacher[0].astype(np.float64), 1), softmax(student.detach()[0].double().numpy(), 1)
        if k == 2:  # the classes of the tail as a single one, for the floor is added to each
            p, q = (np.append(x[[1, 0]], x[2:].sum()) for x in (p, q))
        if k != 3:  # which of the classes without mass is kept is not said
            assert loss.item() == pytest.approx(jsd_by_hand(p, q, beta, 1e-6), rel=1e-5)


@pytest.mark.parametrize("beta", [0.5, 1.0])
def test_a_student_that_cannot_say_it(beta: float) -> None:
    """A student whose mask forbids what the teacher wants: infinite forward, as it is; finite otherwise."""
    labels = top_k(np.array([[5.0, 0.0, 0.0, 0.0]], np.float32), 2)
    student = torch.tensor([[-INF, 0.0, 1.0, 2.0]], requires_grad=True)
    assert token_loss(student, labels).item() == INF
    loss = token_loss(student, labels, beta=beta)
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(student.grad).all()


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("classes", [6, 12])
def test_vocabularies_may_be_padded(classes: int, beta: float) -> None:
    """Of 9 and `classes` tokens the first 6 at least are common; what a side does not have is in the other's tail."""
    student, teacher = logits((5, classes), 1), logits((5, 9), 2)
    k = 4
    rows = token_loss(tensor(student), top_k(teacher, k), beta=beta, padded_vocabulary=True, reduction="none")
    for row in range(5):
        p, q = softmax(teacher[row], 1), softmax(student[row], 1)
        kept = [i for i in np.argsort(-p)[:k] if i < classes]
        expected = jsd_by_hand(np.append(p[kept], 1 - p[kept].sum()), np.append(q[kept], 1 - q[kept].sum()), beta, 1e-6)
        # A token that the student has not is a bucket of its own, where only the floor is.
        assert rows[row].item() == pytest.approx(expected, rel=1e-4 if beta == 1 else 1e-6)
    if beta == 0.5:
        x = tensor(student).requires_grad_()
        assert torch.autograd.gradcheck(
            lambda y: token_loss(y, top_k(teacher, k), beta=beta, padded_vocabulary=True), (x,), fast_mode=True
        )


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_all_of_the_students_classes(beta: float) -> None:
    """A student all of whose classes are kept has no tail, whatever padding the teacher has."""
    student, teacher = logits((5, 4), 1), logits((5, 9), 2)
    teacher[:, 4:] -= 20
    x, expected = tensor(student).requires_grad_(), loss_by_hand(student, teacher[:, :4], 4, beta).mean()
    for k in (4, 6):
        loss = token_loss(x, top_k(teacher, k), beta=beta, padded_vocabulary=True)
        assert loss.item() == pytest.approx(expected, rel=1e-4)
        assert torch.autograd.grad(loss, x)[0].isfinite().all()


@pytest.mark.parametrize("weight", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_hard_labels_have_their_share(weight: float, beta: float) -> None:
    """Of each token's loss, divided by the same count; what the mask leaves out may hold anything."""
    student, teacher = logits((3, 4, 9), 1), logits((3, 4, 9), 2)
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]])
    hard = torch.randint(9, (3, 4))
    entropy = -np.log(np.take_along_axis(softmax(student, 1.0), hard.numpy()[..., None], -1))[..., 0]
    soft = loss_by_hand(student, teacher, 5, beta, temperature=2.0)
    expected = ((1 - weight) * soft + weight * entropy) * mask.numpy()
    hard[mask == 0] = 99
    student[mask.numpy() == 0] = np.nan
    given = tensor(student).requires_grad_()
    options: dict[str, Any] = {"mask": mask, "beta": beta, "hard_labels": hard, "hard_weight": weight}
    losses = token_loss(given, top_k(teacher, 5, 2.0), reduction="none", **options)
    np.testing.assert_allclose(losses.detach().numpy(), expected, rtol=1e-5, atol=1e-9)
    loss = token_loss(given, top_k(teacher, 5, 2.0), token_count=10, **options)
    assert loss.item() == pytest.approx(expected.sum() / 10, rel=1e-5)
    loss.backward()
    assert bool(given.grad.isfinite().all())
    assert not given.grad[mask == 0].any()


# The chunked head: the same loss and gradients, and never the logits of all tokens.

FEATURES, CLASSES = 6, 12


def head_of(rows: tuple[int, ...]) -> tuple[Any, Any, Any]:
    """States, a head's weight, and labels with four tokens kept."""
    hidden, weight = drawn(*rows, FEATURES, seed=1), drawn(CLASSES, FEATURES, seed=2)
    return hidden.requires_grad_(), weight.requires_grad_(), top_k(logits((*rows, CLASSES), 3), 4)


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
    hidden, weight, labels = head_of((3, 5))
    mask = torch.from_numpy(np.random.default_rng(4).integers(0, 2, (3, 5))) if masked else None
    hard = torch.from_numpy(np.random.default_rng(5).integers(0, CLASSES, (3, 5)))
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
    hidden, weight, labels = head_of((64,))
    with LargestTensor() as chunked:
        chunked_token_loss(hidden, weight, labels, chunk_tokens=8).backward()
    with LargestTensor() as whole:
        token_loss(hidden @ weight.T, labels).backward()
    assert whole.elements == 64 * CLASSES
    assert chunked.elements == 64 * FEATURES  # the states themselves


def test_a_mask_of_zeros_is_a_zero_loss() -> None:
    """Every parameter has a gradient all the same: DDP waits for those that have none."""
    hidden, weight, labels = head_of((2, 3))
    loss = chunked_token_loss(hidden, weight, labels, mask=torch.zeros(2, 3, dtype=torch.bool))
    loss.backward()
    assert loss.item() == 0
    assert (hidden.grad == 0).all()
    assert (weight.grad == 0).all()


def test_the_head_may_be_a_module() -> None:
    hidden, _, labels = head_of((5,))
    head = torch.nn.Linear(FEATURES, CLASSES)
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


# Losses over the student's own tokens, against sums over a whole vocabulary.

VOCABULARY = 7


def test_log_probabilities_of_tokens() -> None:
    student, targets = drawn(2, 3, VOCABULARY, seed=1), torch.tensor([[0, 6, 2], [3, -100, 1]])
    found = token_log_probabilities(student, targets, temperature=2.0)
    expected = (student / 2).log_softmax(-1)
    assert found[0, 1].item() == pytest.approx(expected[0, 1, 6].item())
    assert torch.isfinite(found).all()
    several = token_log_probabilities(student, targets.unsqueeze(-1).expand(2, 3, 4), temperature=2.0)
    assert torch.equal(several, found.unsqueeze(-1).expand(2, 3, 4))
    assert token_log_probabilities(student.half(), targets).dtype == torch.float32


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_estimates_are_unbiased(estimator: Any) -> None:
    """Weighing every token by the student's probability, in place of drawing it, gives the KL and its gradient."""
    student, teacher = drawn(4, VOCABULARY, seed=1).requires_grad_(), drawn(4, VOCABULARY, seed=2).log_softmax(-1)
    log_q = token_log_probabilities(student, torch.arange(VOCABULARY).repeat(4, 1))
    estimates = sampled_kl(log_q, teacher, estimator=estimator, reduction="none")
    q = student.detach().softmax(-1)
    dense = (student.softmax(-1) * (student.log_softmax(-1) - teacher)).sum(-1)
    torch.testing.assert_close((q * estimates).sum(-1), dense)
    assert bool((estimates >= 0).all()) == (estimator == "k3")
    (ours,) = torch.autograd.grad((q * estimates).sum(), student)
    torch.testing.assert_close(ours, torch.autograd.grad(dense.sum(), student)[0])


@pytest.mark.parametrize("estimator", ["k1", "k3"])
@pytest.mark.parametrize("teacher", [-INF, 0.0, -200.0])
@pytest.mark.parametrize("student", [-200.0, 0.0])
def test_impossible_samples_stay_finite(estimator: Any, teacher: float, student: float) -> None:
    x = torch.tensor([student], requires_grad=True)
    loss = sampled_kl(x, torch.tensor([teacher]), estimator=estimator)
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(x.grad).all()


def test_masked_samples_have_no_part() -> None:
    log_q, log_p = (drawn(2, 3, seed=1) - 9).requires_grad_(), drawn(2, 3, seed=2) - 9
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
    expected = [jsd_by_hand(*pair, beta, 1e-9) for pair in zip(p.numpy(), q.numpy(), strict=True)]
    np.testing.assert_allclose(ours.numpy(), expected, rtol=1e-5, atol=1e-7)


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


X, L = torch.zeros(2, 4), top_k(np.zeros((2, 4), np.float32), 2, 2.0)
BAD: list[tuple[Callable[[], Any], str]] = [
    (lambda: token_loss(X, L, beta=1.5), "beta=1.5: must be from 0"),
    (lambda: token_loss(X, L, floor=0), "floor=0"),
    (lambda: token_loss(X, L, temperature=1.0), "have temperature 2, but the loss uses 1.0"),
    (lambda: token_loss(X, X), "labels are Tensor: expected TopK"),  # type: ignore[arg-type]
    (lambda: token_loss(X, L, mask=torch.ones(2)), r"the mask is torch.float32"),
    (lambda: token_loss(X, L, mask=torch.tensor([5, -100])), r"the mask holds -100.*labels != -100"),
    (lambda: token_loss(X, L, mask=torch.ones(2, 4, dtype=torch.bool)), r"mask is \[2, 4\].*rows \[2\]"),
    (lambda: token_loss(X, L, token_count=-1), "token_count=-1"),
    (lambda: token_loss(X, replace(L, ids=np.array([[0, 1], [2, 2]]))), "class 2 more than once"),
    (lambda: target_labels(torch.tensor([[3, 1, 3]]), torch.full((1, 3), -2.0)), "class 3 more than once"),
    (lambda: target_labels(torch.tensor([[3, 1]]), torch.full((1, 2), -0.1)), "the probabilities of a row sum to 1.8"),
    (lambda: sampled_kl(X, X + 1), "the teacher's log-probabilities reach up to 1"),
    (lambda: token_loss(X, L, token_count=torch.ones(2)), r"token_count has shape \[2\]"),
    (lambda: token_loss(X, L, reduction="batchmean"), "reduction='batchmean'"),  # type: ignore[arg-type]
    (lambda: token_loss(X.long(), L), "torch.int64"),
    (lambda: token_loss(X, L, hard_weight=0.5), "hard_labels, which are missing"),
    (lambda: token_loss(X, L, hard_weight=0.5, hard_labels=torch.tensor([1, 4])), "hold 4: must be from 0 to 3, or -"),
    (
        lambda: token_loss(X, L, hard_weight=0.5, hard_labels=torch.ones(3).long()),
        r"are \[3\], but the logits have rows",
    ),
    (lambda: token_loss(X, L, hard_weight=1.5, hard_labels=torch.tensor([1, 2])), r"hard_weight=1\.5: the share"),
    (lambda: chunked_token_loss(X, torch.zeros(4, 4), L[:1]), r"hidden states are \[2, 4\], top-k labels \[1, 2\]"),
    (lambda: chunked_token_loss(X, torch.zeros(4, 4), L, chunk_tokens=0), "chunk_tokens=0"),
    (lambda: chunked_token_loss(X, torch.zeros(3, 4), L), "student has 3 classes, but the teacher has 4"),
    (lambda: token_log_probabilities(X, torch.zeros(3).long()), r"targets are \[3\], logits \[2, 4\]"),
    # Of a tail that is a small difference of large numbers.
    (lambda: target_labels(torch.tensor([[0]]), torch.zeros(1, 1, dtype=torch.bfloat16)), "be rounding error"),
    (lambda: target_labels(X, X), "expected whole numbers and floating-point"),
    (lambda: sampled_kl(X, X, estimator="k2"), "must be 'k1' or 'k3'"),  # type: ignore[arg-type]
    (lambda: sampled_kl(X, torch.zeros(2, 5)), r"are \[2, 4\], the teacher's \[2, 5\]"),
]


@pytest.mark.parametrize(("call", "words"), BAD)
def test_bad_input_is_named(call: Callable[[], Any], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        call()
