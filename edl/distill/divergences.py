"""Losses that compare the teacher's and the student's distributions, for both PyTorch and PaddlePaddle.

`edl.distill.losses` and `edl.distill.paddle_losses` export them, each with its `Framework`. Neither framework is
imported here.
"""

from __future__ import annotations

import abc
import math
import numbers
from collections.abc import Sequence
from typing import Any, Final, Literal, TypeAlias, TypeVar

import numpy as np

from edl.distill.compress import TopK, check_temperature
from edl.errors import SettingsError
from edl.protocol.tensors import Array
from edl.settings import is_above_zero, is_share

T = TypeVar("T")  # a framework's tensor

Reduction: TypeAlias = Literal["mean", "sum", "none"]
"""How the losses of a batch's rows are reduced, as in torch; `none` returns them unreduced."""

TeacherIs: TypeAlias = Literal["logits", "probabilities"]
"""Kind of the teacher's output."""

NO_LABEL = -100  # of a row without a hard label: `ignore_index` of PyTorch and PaddlePaddle

FLOOR = 1e-6
"""Smallest teacher probability in the reverse direction, so that a token adds at most 14 nats to the loss. With a
smaller floor, a student would learn rounding errors: sums of float32 probabilities have errors of about 1e-7."""

_LOWEST = float(np.finfo(np.float32).min) / 4
"""Log-probability of an impossible class. It is finite, since 0 times infinity is NaN. It is a quarter of the lowest
float32 number, so that no difference overflows; Paddle cannot clip to numbers below float32's range."""
SUM_TOLERANCE = 0.02  # float16 probabilities of many classes sum to 1 only with this accuracy
_LOOKED_AT = 1 << 14  # class ids compared with one another per step, in less than a millisecond


class Framework(abc.ABC):
    """The operations that have different names in PyTorch and PaddlePaddle. `ids` index the last axis."""

    module: Any  # the framework's module, for operations with the same name in both

    @abc.abstractmethod
    def tensor(self, value: Any, like: Any) -> Any:
        """Return an array or a tensor as a tensor on the device of `like`."""

    @abc.abstractmethod
    def cast(self, tensor: Any, dtype: Any) -> Any:
        """Return a tensor converted to a dtype, which is given by name or as the framework's dtype."""

    @abc.abstractmethod
    def pick(self, tensor: Any, ids: Any) -> Any:
        """Return the elements at `ids`."""

    @abc.abstractmethod
    def put(self, tensor: Any, ids: Any, value: float) -> Any:
        """Return a copy of a tensor with `value` at `ids`."""

    @abc.abstractmethod
    def count(self, like: Any, ids: Any, counted: Any) -> Any:
        """Return how often each class occurs among the `counted` ids, int32 in the shape of `like`."""

    @abc.abstractmethod
    def join(self, parts: Sequence[Any]) -> Any:
        """Return parts concatenated along the last axis."""

    @abc.abstractmethod
    def can_look(self, tensor: Any) -> bool:
        """Return whether a tensor's values can be read without waiting for an accelerator."""


FRAMEWORKS: Final[list[Framework]] = []  # those whose losses were imported


def framework_of(tensor: Any) -> Framework:
    """Return the framework of the student's outputs; raise `SettingsError` unless they are a floating-point tensor."""
    for framework in FRAMEWORKS:
        if isinstance(tensor, framework.module.Tensor):
            if tensor.is_floating_point():
                return framework
            raise SettingsError(f"the student's outputs are {tensor.dtype}: expected a floating-point tensor")
    raise SettingsError(f"the student's outputs are {type(tensor).__name__}: expected a floating-point tensor")


# Losses over whole distributions


def soft_cross_entropy(
    student_logits: T,
    teacher: T | Array,
    *,
    temperature: float = 1.0,
    teacher_is: TeacherIs = "logits",
    reduction: Reduction = "mean",
) -> T:
    """Return T² times the cross-entropy between the teacher's and the student's distributions at temperature T.

    The gradient is the same as that of `kl_divergence`; the value is larger by T² times the teacher's entropy.

    Args:
        student_logits: Logits of the student, floating-point [rows, ..., classes].
        teacher: Outputs of the teacher, of the same shape.
        temperature: Temperature T, above 0.
        teacher_is: Kind of the teacher's outputs. Probabilities p become p^(1/T), scaled to sum to 1, as softmax would
            give for the teacher's logits at temperature T. On the CPU, an error is raised if the values are not
            probabilities.
        reduction: Reduction over rows; see `edl.distill.losses`.
    """
    log_p, log_q = _log_probabilities(student_logits, teacher, temperature, teacher_is)
    loss: T = reduced(-expected(log_p, log_q) * temperature**2, reduction)
    return loss


def kl_divergence(
    student_logits: T,
    teacher: T | Array,
    *,
    temperature: float = 1.0,
    teacher_is: TeacherIs = "logits",
    reduction: Reduction = "mean",
) -> T:
    """Return T² times KL(teacher ‖ student) of the distributions at temperature T.

    Args:
        student_logits: Logits of the student, floating-point [rows, ..., classes].
        teacher: Outputs of the teacher, of the same shape.
        temperature: Temperature T, above 0.
        teacher_is: Kind of the teacher's outputs; see `soft_cross_entropy`.
        reduction: Reduction over rows; see `edl.distill.losses`.
    """
    log_p, log_q = _log_probabilities(student_logits, teacher, temperature, teacher_is)
    loss: T = reduced(expected(log_p, log_p - log_q) * temperature**2, reduction)
    return loss


def top_k_kl(student_logits: T, teacher: TopK, *, reduction: Reduction = "mean") -> T:
    """Return T² times KL(teacher ‖ student) over the k kept classes and one class for all others.

    T is the temperature at which the labels were made. If every class is kept, the result equals `kl_divergence`;
    otherwise it is smaller by the divergence within the tail. Without the extra class, the student could move
    probability out of the k classes, or into them, at no cost.

    There is no reverse direction. A teacher that is confident in its top k gives the tail almost no probability, but an
    untrained student gives the tail nearly all of it, so KL(student ‖ teacher) would be huge.

    Args:
        student_logits: Logits of the student, floating-point [rows, ..., classes].
        teacher: Labels of as many rows, as numpy arrays or tensors.
        reduction: Reduction over rows; see `edl.distill.losses`.
    """
    log_p, log_q = bucket_log_probabilities(student_logits, teacher)
    loss: T = reduced(expected(log_p, log_p - log_q) * teacher.temperature**2, reduction)
    return loss


def logit_mse(student_logits: T, teacher_logits: T | Array, *, reduction: Reduction = "mean") -> T:
    """Return the squared difference between logits, averaged over the classes.

    Sources: Ba and Caruana, "Do Deep Nets Really Need to be Deep?", 2014; Kim et al., "Comparing Kullback-Leibler
    Divergence and Mean Squared Error Loss in Knowledge Distillation", 2021.

    Args:
        student_logits: Logits of the student, floating-point [rows, ..., classes].
        teacher_logits: Logits of the teacher, of the same shape.
        reduction: Reduction over rows; see `edl.distill.losses`.
    """
    student, teacher = of_one_shape(student_logits, teacher_logits)
    loss: T = reduced((student - teacher).square().mean(-1), reduction)
    return loss


def _log_probabilities(student_logits: Any, teacher: Any, temperature: float, teacher_is: TeacherIs) -> tuple[Any, Any]:
    check_temperature(temperature)
    _check_teacher_is(teacher_is)
    student, given = of_one_shape(student_logits, teacher)
    framework = framework_of(student)
    if teacher_is == "probabilities":
        if framework.can_look(given):
            low, furthest = float(given.min()), float((given.sum(-1) - 1).abs().max())
            if low < 0 or not furthest <= SUM_TOLERANCE:
                raise SettingsError(
                    f"teacher_is='probabilities', but the smallest label is {low:g} and rows' sums differ by up to "
                    f"{furthest:g} from 1: for logits, pass teacher_is='logits'"
                )
        given = given.log()
    log_softmax = framework.module.nn.functional.log_softmax
    return log_softmax(given / temperature, -1), log_softmax(student / temperature, -1)


# Losses over the tokens of sequences


def token_loss(
    student_logits: T,
    labels: TopK,
    *,
    mask: T | Array | None = None,
    beta: float = 0.0,
    hard_labels: T | Array | None = None,
    hard_weight: float = 0.0,
    temperature: float | None = None,
    token_count: float | T | None = None,
    floor: float = FLOOR,
    padded_vocabulary: bool = False,
    reduction: Reduction = "mean",
) -> T:
    """Compute T² times the generalized Jensen-Shannon divergence between teacher and student, token by token.

    P and Q are the distributions of the teacher and the student at temperature T, over the k kept tokens and the tail.
    With M = `beta` P + (1 - `beta`) Q the divergence is

    - KL(P ‖ Q), the forward direction, for `beta` 0;
    - `beta` KL(P ‖ M) + (1 - `beta`) KL(Q ‖ M) in between;
    - KL(Q ‖ P'), the reverse direction, for `beta` 1. P' is P with no probability below `floor`, scaled to sum to 1:
      KL(Q ‖ P) is infinite if a teacher's probability is 0.

    Source: Agarwal et al., "On-Policy Distillation of Language Models: Learning from Self-Generated Mistakes", 2024,
    section 2, and TRL's `generalized_jsd_loss`, which defines `beta` in the same way. As in TRL, the loss tends to 0 as
    `beta` tends to 0 or 1, but at exactly 0 or 1 it is a full KL divergence. TRL does not multiply by T².

    The divergence over k tokens and the tail never exceeds the same divergence over the whole vocabulary. The two are
    equal if every token is kept, or if P and Q differ only by a constant factor within the tail.

    Args:
        student_logits: Logits of the student, floating-point [rows, ..., vocabulary].
        labels: Labels of as many rows, as numpy arrays or tensors.
        mask: Token mask, bool or integer [rows, ...], 0 for tokens to ignore. Ignored tokens add nothing to the loss
            and get a gradient of 0, even if their logits or labels are NaN. Values below 0, such as -100 in labels, are
            refused on the CPU. None if all tokens count.
        beta: Direction of the divergence, from 0 (forward KL) to 1 (reverse KL).
        hard_labels: Targets for `hard_weight`, whole numbers [rows, ...]: token t + 1 at row t. Rows with -100 have no
            cross-entropy, but count in the divisor like the other rows.
        hard_weight: Weight of the cross-entropy with `hard_labels`, from 0 to 1; the divergence gets the rest of the
            weight. The two are mixed token by token, so both are divided by the same count.
        temperature: Temperature T, which must equal the labels' temperature; None to use the labels' temperature.
        token_count: Divisor of the sum over tokens with reduction "mean"; None for the number of tokens that the mask
            keeps in this call. With gradient accumulation or several processes, pass the number of tokens in the whole
            optimizer step, such as `num_items_in_batch` of Hugging Face's Trainer, so that each token weighs the same.
        floor: Smallest teacher probability in the reverse direction, above 0 and below 1.
        padded_vocabulary: Whether student and teacher may have different numbers of classes, as models with the same
            tokenizer but different padding of the vocabulary do. A class that only one of the two models has counts
            towards the tail.
        reduction: Reduction: "mean" over tokens, "sum", or "none" for [rows, ...].

    Returns:
        The loss, or losses [rows, ...] with reduction "none"; 0 if the mask keeps no token.

    Raises:
        SettingsError: A shape, type or value is invalid.
    """
    check_divergence(labels, beta, temperature, floor)
    check_reduction(reduction)
    logits: Any = student_logits
    framework = framework_of(logits)
    kept = kept_rows(mask, logits)
    if kept is not None:
        # Mask the inputs too: a gradient of 0 times NaN would be NaN, and padding may hold invalid ids.
        if list(labels.ids.shape[:-1]) != list(kept.shape):
            raise SettingsError(
                f"logits have rows {list(kept.shape)}, top-k labels are {list(labels.ids.shape)}: the rows do not match"
            )
        logits = framework.module.where(kept.unsqueeze(-1), logits, 0.0)
        parts: Any = labels.map(lambda array: framework.tensor(array, logits))
        ids, values = (part.masked_fill(~kept.unsqueeze(-1), 0) for part in (parts.ids, parts.values))
        labels = TopK(ids, values, parts.tail_lse.masked_fill(~kept, 0), labels.temperature, labels.classes)
    targets = hard_targets(hard_labels, hard_weight, logits, kept)
    log_p, log_q = bucket_log_probabilities(logits, labels, padded_vocabulary=padded_vocabulary)
    losses = divergence(log_p, log_q, beta, floor) * labels.temperature**2
    loss: T = total(mixed_losses(losses, logits, targets, hard_weight), kept, token_count, reduction)
    return loss


def divergence(log_p: Any, log_q: Any, beta: float, floor: float) -> Any:
    """Return the generalized Jensen-Shannon divergence [rows, ...] of distributions [rows, ..., buckets]."""
    if beta == 0:
        return expected(log_p, log_p - log_q)
    module = framework_of(log_q).module
    log_q = log_q.clip(min=_LOWEST)
    if beta == 1:
        floored = module.nn.functional.log_softmax(log_p.clip(min=math.log(floor)), -1)
        return (log_q.exp() * (log_q - floored)).sum(-1)
    log_p = log_p.clip(min=_LOWEST)
    log_m = module.logaddexp(log_p + math.log(beta), log_q + math.log1p(-beta))
    teacher, student = log_p.exp() * (log_p - log_m), log_q.exp() * (log_q - log_m)
    return (beta * teacher + (1 - beta) * student).sum(-1)


def hard_targets(hard_labels: Any, hard_weight: float, rows_of: Any, kept: Any | None) -> Any | None:
    """Return the hard labels that contribute to the loss, int64 [rows, ...]; None if their weight is 0.

    `rows_of`: a tensor [rows, ..., any]. Labels of rows outside `kept` may have any value.
    """
    if not is_share(hard_weight):
        raise SettingsError(f"hard_weight={hard_weight!r}: the share of the cross-entropy must be from 0 to 1")
    if hard_weight == 0:
        return None
    if hard_labels is None:
        raise SettingsError(f"hard_weight={hard_weight} mixes in the cross-entropy with hard_labels, which are missing")
    framework = framework_of(rows_of)
    targets = framework.tensor(hard_labels, rows_of)
    if targets.is_floating_point():
        raise SettingsError(f"hard_labels are {targets.dtype}: expected whole numbers")
    rows = list(rows_of.shape[:-1])
    if list(targets.shape) != rows:
        raise SettingsError(
            f"hard_labels are {list(targets.shape)}, but the logits have rows {rows}: they do not match"
        )
    targets = framework.cast(targets, "int64")
    return targets if kept is None else targets.masked_fill(~kept, NO_LABEL)


def mixed_losses(losses: Any, student_logits: Any, targets: Any | None, hard_weight: float) -> Any:
    """Return losses [rows, ...] mixed with the cross-entropy with hard labels."""
    if targets is None:
        return losses
    hard = _cross_entropy(student_logits, targets)
    # The divergence may be NaN, so it is not multiplied by 0.
    return hard if hard_weight == 1 else (1 - hard_weight) * losses + hard_weight * hard


def kept_rows(mask: Any | None, rows_of: Any) -> Any | None:
    """Return a bool or integer mask [rows, ...] as bool; None for None. `rows_of`: a tensor [rows, ..., any]."""
    if mask is None:
        return None
    framework = framework_of(rows_of)
    mask = framework.tensor(mask, rows_of)
    if mask.is_floating_point():
        raise SettingsError(f"the mask is {mask.dtype}: expected bool or whole numbers, 0 for tokens to ignore")
    rows = list(rows_of.shape[:-1])
    if list(mask.shape) != rows:
        raise SettingsError(f"the mask is {list(mask.shape)}, but the logits have rows {rows}: they do not match")
    if mask.dtype == framework.module.bool:
        return mask
    if framework.can_look(mask) and bool((mask < 0).any()):
        raise SettingsError(f"the mask holds {int(mask.min())}: use 0 for tokens to ignore, or pass labels != -100")
    return mask > 0


def total(losses: Any, kept: Any | None, token_count: Any, reduction: Reduction) -> Any:
    """Return losses [rows, ...], their sum, or their sum divided by the number of tokens (at least 1)."""
    if kept is not None:
        losses = framework_of(losses).module.where(kept, losses, 0.0)
    if reduction != "mean":
        return reduced(losses, reduction)
    return losses.sum() / divisor(token_count, math.prod(losses.shape) if kept is None else kept.sum(), losses)


def divisor(token_count: Any, here: Any, losses: Any) -> Any:
    """Return the divisor for a sum of losses: the given count, or this call's token count."""
    framework = framework_of(losses)
    count = here if token_count is None else token_count
    if isinstance(count, framework.module.Tensor):
        if math.prod(count.shape) != 1:
            raise SettingsError(f"token_count has shape {list(count.shape)}: expected a single number")
        return framework.cast(framework.tensor(count, losses).detach().reshape([]), losses.dtype).clip(min=1)
    if not isinstance(count, numbers.Real) or not 0 <= float(count) < math.inf or (count == 0 and int(here)):
        raise SettingsError(f"token_count={count!r}: must be a number of tokens, or None to count those in the mask")
    return max(float(count), 1.0)


# The mixture with a hard loss


class MixedLoss:
    """A soft loss against the teacher, mixed with the cross-entropy; see `DistillLoss` of each framework."""

    def __init__(
        self,
        temperature: float = 4.0,
        alpha: float = 0.9,
        *,
        soft: Literal["kl", "cross_entropy", "mse"] = "kl",
        teacher_is: TeacherIs = "logits",
        reduction: Reduction = "mean",
    ) -> None:
        super().__init__()  # initializes the framework's module
        check_temperature(temperature)
        check_alpha(alpha)
        if soft not in ("kl", "cross_entropy", "mse"):
            raise SettingsError(f"soft={soft!r}: must be 'kl', 'cross_entropy' or 'mse'")
        _check_teacher_is(teacher_is)
        if soft == "mse" and teacher_is != "logits":
            raise SettingsError("soft='mse' compares logits: it cannot use a teacher's probabilities")
        check_reduction(reduction)
        self.temperature = temperature
        self.alpha = alpha
        self.soft = soft
        self.teacher_is: TeacherIs = teacher_is
        self.reduction: Reduction = reduction

    def forward(self, student_logits: Any, teacher: Any, labels: Any = None) -> Any:
        """Compute the loss.

        Args:
            student_logits: Logits of the student, [rows, ..., classes].
            teacher: Outputs of the teacher, of the same shape, or `TopK`. None to compute only the hard loss, for
                example for batches without teachers.
            labels: True classes, whole numbers [rows, ...] or [rows, ..., 1], or probabilities in the shape of the
                logits; required unless `alpha` is 1 and `teacher` is not None. Rows with label -100 do not count in the
                hard loss, which is 0 if all rows have this label.

        Returns:
            The loss, or losses [rows, ...] with reduction "none".

        Raises:
            SettingsError: Labels are missing, or the shapes do not match.
        """
        if self.alpha == 1 and teacher is not None:
            return self._soft(student_logits, teacher)
        if labels is None:
            raise SettingsError(
                f"labels are missing: alpha={self.alpha} includes a hard loss; only alpha=1 needs no labels"
                if teacher is not None
                else "both the teacher's labels and hard labels are missing"
            )
        hard = self._hard(student_logits, labels)
        return hard if teacher is None else self.alpha * self._soft(student_logits, teacher) + (1 - self.alpha) * hard

    def extra_repr(self) -> str:
        """Return the settings, for `repr`."""
        return f"temperature={self.temperature:g}, alpha={self.alpha:g}, soft={self.soft!r}"

    def _soft(self, student_logits: Any, teacher: Any) -> Any:
        if isinstance(teacher, TopK):
            if self.soft != "kl":
                raise SettingsError(f"top-k labels require soft='kl', not {self.soft!r}")
            _check_made_at(teacher, self.temperature)
            return top_k_kl(student_logits, teacher, reduction=self.reduction)
        if self.soft == "mse":
            return logit_mse(student_logits, teacher, reduction=self.reduction)
        loss = kl_divergence if self.soft == "kl" else soft_cross_entropy
        return loss(
            student_logits,
            teacher,
            temperature=self.temperature,
            teacher_is=self.teacher_is,
            reduction=self.reduction,
        )

    def _hard(self, student_logits: Any, labels: Any) -> Any:
        """Return the cross-entropy with hard labels; a mean is taken over the rows that have a label."""
        framework = framework_of(student_logits)
        labels, rows = framework.tensor(labels, student_logits), list(student_logits.shape[:-1])
        given = f"labels are {labels.dtype} {list(labels.shape)}, logits {list(student_logits.shape)}"
        if labels.is_floating_point():
            if list(labels.shape) != list(student_logits.shape):
                raise SettingsError(f"{given}: expected whole numbers {rows}, or probabilities of the logits' shape")
            logits = widened(student_logits)
            log_q = framework.module.nn.functional.log_softmax(logits, -1)
            return reduced(-(framework.cast(labels, logits.dtype) * log_q).sum(-1), self.reduction)
        if math.prod(labels.shape) != math.prod(rows):
            raise SettingsError(f"{given}: expected whole numbers {rows}")
        targets = framework.cast(labels, "int64").reshape(rows)
        losses = _cross_entropy(student_logits, targets)
        if self.reduction != "mean":
            return reduced(losses, self.reduction)
        labelled = framework.cast((targets != NO_LABEL).sum(), losses.dtype)
        return losses.sum() / labelled.clip(min=1)  # the frameworks' own mean over no rows is NaN


def _cross_entropy(student_logits: Any, targets: Any) -> Any:
    """Return the cross-entropy [rows, ...] with classes, int64 [rows, ...]; 0 for rows without a class (-100)."""
    framework, classes = framework_of(student_logits), student_logits.shape[-1]
    _check_classes(framework, targets, classes)
    flat = widened(student_logits).reshape([-1, classes])
    cross_entropy = framework.module.nn.functional.cross_entropy
    losses = cross_entropy(flat, targets.reshape([-1]), ignore_index=NO_LABEL, reduction="none")
    return losses.reshape(list(targets.shape))


# Parts of all losses


def expected(log_p: Any, values: Any) -> Any:
    """Return the sum of p times `values`; values with probability 0 add 0, even if infinite. NaN stays NaN."""
    p = log_p.exp()
    return (p * framework_of(values).module.where(p > 0, values, 0.0)).sum(-1)


def widened(tensor: T) -> T:
    """Return the student's outputs as at least float32."""
    framework = framework_of(tensor)
    half = framework.module.float16, framework.module.bfloat16
    wide: T = framework.cast(tensor, "float32") if tensor.dtype in half else tensor  # type: ignore[attr-defined]
    return wide


def of_one_shape(student: Any, teacher: Any) -> tuple[Any, Any]:
    """Return the student's outputs and the teacher's, with the same dtype and shape [rows, ..., classes]."""
    student = widened(student)
    teacher = teachers_part(teacher, student)
    if list(student.shape) != list(teacher.shape) or student.ndim < 2:
        raise SettingsError(
            f"the student's logits are {list(student.shape)}, the teacher's {list(teacher.shape)}: "
            "both must be [rows, ..., classes]"
        )
    return student, teacher


def teachers_part(value: Any, student: Any) -> Any:
    """Return labels as a tensor on the student's device, with the student's dtype and without a gradient."""
    framework = framework_of(student)
    return framework.cast(framework.tensor(value, student).detach(), student.dtype)


def reduced(rows: T, reduction: Reduction) -> T:
    """Return per-row losses, their mean or their sum."""
    check_reduction(reduction)
    if reduction == "none":
        return rows
    found: T = getattr(rows, reduction)()
    return found


def bucket_log_probabilities(student_logits: Any, teacher: TopK, *, padded_vocabulary: bool = False) -> tuple[Any, Any]:
    """Return log-probabilities of teacher and student, [rows, ..., k + 1], the tail last; [..., k] without a tail."""
    student = widened(student_logits)
    framework = framework_of(student)
    module, log_softmax = framework.module, framework.module.nn.functional.log_softmax
    ids = framework.cast(framework.tensor(teacher.ids, student), "int64")
    _check_top_k(framework, student, teacher, ids, padded_vocabulary)
    scaled = student if teacher.temperature == 1 else student / teacher.temperature  # dividing would copy
    whole = scaled.logsumexp(-1, keepdim=True)
    kept = teachers_part(teacher.values, student) / teacher.temperature
    # The lowest finite number in place of -inf: the gradient of logsumexp over -inf alone is NaN.
    lowest = float(module.finfo(scaled.dtype).min)
    if padded_vocabulary:
        tail = teachers_part(teacher.tail_lse, student)
        known = ids < student.shape[-1]
        ids = ids.masked_fill(~known, 0)
        # Counted, not set: the 0 that replaces an unknown class would otherwise overwrite a known class 0.
        named = framework.count(scaled, ids, known) > 0
        tail = module.logaddexp(tail, kept.masked_fill(known, lowest).logsumexp(-1))  # of only -inf, Paddle returns NaN
        # If all classes of the student are kept, there is no tail: the teacher's covers classes that the student lacks.
        tail = tail.masked_fill(named.all(-1), -math.inf)
        buckets = framework.join([kept.masked_fill(~known, -math.inf), tail.unsqueeze(-1)])
        log_p = buckets - buckets.logsumexp(-1, keepdim=True)  # Paddle's `log_softmax` of -inf is about -64
        log_q = (framework.pick(scaled, ids) - whole).masked_fill(~known, -math.inf)
        left_out = scaled.masked_fill(named, lowest)
    else:
        log_q = framework.pick(scaled, ids) - whole
        if teacher.k == student.shape[-1]:  # no class is left out
            return log_softmax(kept, -1), log_q
        tail = teachers_part(teacher.tail_lse, student)
        log_p = log_softmax(framework.join([kept, tail.unsqueeze(-1)]), -1)
        left_out = framework.put(scaled, ids, lowest)
    return log_p, framework.join([log_q, left_out.logsumexp(-1, keepdim=True) - whole])


# Checks that raise `SettingsError`; values are checked only if they can be read without waiting


def check_reduction(reduction: Reduction) -> None:
    """Check that a reduction is known."""
    if reduction not in ("mean", "sum", "none"):
        raise SettingsError(f"reduction={reduction!r}: must be 'mean', 'sum' or 'none'")


def check_alpha(alpha: float) -> None:
    """Check the weight of a soft loss."""
    if not is_share(alpha):
        raise SettingsError(f"alpha={alpha!r}: the share of the soft loss must be from 0 to 1")


def _check_teacher_is(teacher_is: TeacherIs) -> None:
    if teacher_is not in ("logits", "probabilities"):
        raise SettingsError(f"teacher_is={teacher_is!r}: must be 'logits' or 'probabilities'")


def check_divergence(labels: TopK, beta: float, temperature: float | None, floor: float) -> None:
    """Check the labels and settings of a token loss."""
    if not isinstance(labels, TopK):
        raise SettingsError(f"labels are {type(labels).__name__}: expected TopK; edl.distill.compress.top_k makes them")
    if not is_share(beta):
        raise SettingsError(f"beta={beta!r}: must be from 0 (forward KL) to 1 (reverse KL)")
    if not is_above_zero(floor) or floor >= 1:
        raise SettingsError(f"floor={floor!r}: must be a probability above 0 and below 1")
    if temperature is not None:
        _check_made_at(labels, temperature)


def _check_made_at(labels: TopK, temperature: float) -> None:
    if temperature != labels.temperature:
        raise SettingsError(
            f"top-k labels have temperature {labels.temperature:g}, but the loss uses {temperature!r}: "
            "request labels at that temperature"
        )


def _check_classes(framework: Framework, labels: Any, classes: int) -> None:
    if not framework.can_look(labels):
        return
    found = labels.numpy()
    wrong = found[((found < 0) & (found != NO_LABEL)) | (found >= classes)]
    if wrong.size:
        raise SettingsError(f"labels hold {int(wrong[0])}: must be from 0 to {classes - 1}, or {NO_LABEL}")


def check_distinct(framework: Framework, ids: Any) -> None:
    """Check that no row of top-k labels has a class twice; only the first rows are checked."""
    if not framework.can_look(ids):
        return
    rows = ids.numpy().reshape(-1, ids.shape[-1])[: max(_LOOKED_AT // ids.shape[-1], 1)]
    rows = np.sort(rows[rows.any(axis=-1)], axis=-1)  # padding is rows of zeros
    twice = rows[:, 1:][rows[:, 1:] == rows[:, :-1]]
    if twice.size:
        raise SettingsError(f"a row of top-k labels has class {int(twice[0])} more than once: classes must be distinct")


def _check_top_k(framework: Framework, student: Any, teacher: TopK, ids: Any, padded_vocabulary: bool) -> None:
    classes = student.shape[-1]
    if list(student.shape[:-1]) != list(ids.shape[:-1]):
        raise SettingsError(f"logits are {list(student.shape)}, top-k labels {list(ids.shape)}: the rows do not match")
    if not padded_vocabulary and (teacher.k > classes or teacher.classes not in (None, classes)):
        raise SettingsError(
            f"the student has {classes} classes, but the teacher has {teacher.classes or f'at least {teacher.k}'}"
        )
    if not framework.can_look(ids):
        return
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or (high >= classes and not padded_vocabulary):
        raise SettingsError(
            f"the student has {classes} classes, but the labels contain class {low if low < 0 else high}"
        )
    check_distinct(framework, ids)
