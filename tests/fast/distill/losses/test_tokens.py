"""The token loss against sums written out in numpy float64, and what sequences may hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from edl.distill.compress import TopK, top_k  # noqa: E402
from edl.distill.losses import token_loss  # noqa: E402
from edl.errors import SettingsError  # noqa: E402

Array = np.ndarray[Any, Any]
BETAS = [0.0, 0.5, 1.0]
INF = float("inf")


def logits(shape: tuple[int, ...], seed: int, scale: float = 3.0) -> Array:
    return np.random.default_rng(seed).normal(0, scale, shape)


def softmax(values: Array, temperature: float) -> Array:
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


def test_the_floor_bounds_the_reverse_kl() -> None:
    """A teacher that is sure, and an untrained student: without a floor the reverse KL is infinite."""
    labels = TopK(np.array([[0]], np.int32), np.array([[0.0]], np.float32), np.array([-INF], np.float32))
    student = torch.tensor([[-20.0, 20.0, 20.0]], requires_grad=True)
    for floor in (1e-3, 1e-6):
        assert token_loss(student, labels, beta=1, floor=floor).item() == pytest.approx(-np.log(floor), rel=1e-2)


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


X, L = torch.zeros(2, 4), top_k(np.zeros((2, 4), np.float32), 2, 2.0)
BAD: list[tuple[Callable[[], Any], str]] = [
    (lambda: token_loss(X, L, beta=1.5), "beta=1.5: must be from 0"),
    (lambda: token_loss(X, L, floor=0), "floor=0"),
    (lambda: token_loss(X, L, temperature=1.0), "made at temperature 2, the loss uses 1.0"),
    (lambda: token_loss(X, X), "labels are Tensor: expected TopK"),  # type: ignore[arg-type]
    (lambda: token_loss(X, L, mask=torch.ones(2)), r"the mask is torch.float32"),
    (lambda: token_loss(X, L, mask=torch.tensor([5, -100])), r"the mask holds -100.*labels != -100"),
    (lambda: token_loss(X, L, mask=torch.ones(2, 4, dtype=torch.bool)), r"mask is \[2, 4\].*rows \[2\]"),
    (lambda: token_loss(X, L, token_count=-1), "token_count=-1"),
    (lambda: token_loss(X, L, token_count=torch.ones(2)), r"token_count is of shape \[2\]"),
    (lambda: token_loss(X, L, reduction="batchmean"), "reduction='batchmean'"),  # type: ignore[arg-type]
    (lambda: token_loss(X.long(), L), "torch.int64"),
    (lambda: token_loss(torch.zeros(2, 5), L), "student has 5 classes, the teacher 4"),
    (lambda: token_loss(X, L.map(lambda array: tensor(array) - 9)), "labels name class -"),
]


@pytest.mark.parametrize(("call", "words"), BAD)
def test_bad_input_is_named(call: Callable[[], Any], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        call()


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
    assert given.grad is not None
    assert bool(given.grad.isfinite().all())
    assert not given.grad[mask == 0].any()


@pytest.mark.parametrize(
    ("hard_labels", "hard_weight", "words"),
    [
        (None, 0.5, "hard_labels, which are missing"),
        (torch.tensor([1, 9]), 0.5, "hard_labels hold 9: must be from 0 to 8, or -100"),
        (torch.tensor([1, 2, 3]), 0.5, r"hard_labels are \[3\], the logits have rows \[2\]"),
        (torch.tensor([1, 2]), 1.5, r"hard_weight=1\.5: the share"),
    ],
)
def test_unusable_hard_labels_are_named(hard_labels: Any, hard_weight: float, words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        token_loss(
            tensor(logits((2, 9), 1)), top_k(logits((2, 9), 2), 5), hard_labels=hard_labels, hard_weight=hard_weight
        )


def test_compiles_without_a_break() -> None:
    student, mask = tensor(logits((4, 9), 1)).requires_grad_(), torch.tensor([1, 1, 0, 1])
    ids, values, tail_lse = (
        tensor(array) for array in vars(top_k(logits((4, 9), 2), 3)).values() if isinstance(array, np.ndarray)
    )

    def loss(x: Any, ids: Any, values: Any, tail_lse: Any, mask: Any) -> Any:
        return token_loss(x, TopK(ids, values, tail_lse, classes=9), beta=0.5, mask=mask)

    compiled = torch.compile(loss, backend="eager", fullgraph=True)
    ours = compiled(student, ids, values, tail_lse, mask)
    expected = loss(student, ids, values, tail_lse, mask)
    assert ours.item() == pytest.approx(expected.item(), rel=1e-12)
    (gradient,) = torch.autograd.grad(ours, student)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, student)[0])
