"""What is learned from teachers, in plain values, so that `HfArgumentParser` reads them from a command line."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Optional, get_args

from edl.errors import SettingsError
from edl.settings import is_above_zero, is_count, is_share

__all__ = ["DistillArguments", "Task"]

# `HfArgumentParser` reads Optional[...] and Literal[...], in these words.
Task = Literal["causal-lm", "masked-lm", "classification"]

_TOP_K = 64
"""Of tokens: what `edl serve --hf` answers at most unless it is told another number."""


@dataclass(frozen=True)
class DistillArguments:
    """How a `DistillTrainer` learns from its teachers.

    Attributes:
        task: what a row is: "causal-lm" (row t holds token t and the prediction of token t + 1), "masked-lm" (row t
            predicts token t itself) or "classification" (a row is a sample, with the logits of its classes).
        top_k: largest log-probabilities of a row that are asked for. None: 64 of tokens, and whole logits of classes.
        beta: of `edl.distill.losses.token_loss`: 0 forward KL, 1 reverse KL, Jensen-Shannon between.
        temperature: of the teachers' labels and the loss, which is multiplied by its square.
        hard_weight: the share of the cross-entropy with the batch's own labels, from 0 to 1; the loss with the
            teachers' labels has the rest.
        chunked_head: compute the logits of some tokens at a time, so that those of all tokens never exist together
            while training. Models that change logits behind their head are refused.
        padded_vocabulary: whether student and teacher may have different numbers of tokens, as padding makes them.
        eval_teachers: whether evaluations ask the teachers as well, and `eval_loss` is the training's loss. If not, it
            is the cross-entropy alone, and no teacher is needed.
        outputs: the teachers' output. Empty: "logprobs" of tokens, "logits" of classes.
        tokenizer: path or hash of the student's tokenizer: teachers of another are refused. None: that of
            `processing_class`, if it has one. Empty: any.
        ahead: batches that are read, and labelled, while the present step is trained.

    Raises:
        SettingsError: a value that cannot be.
    """

    task: Task = "causal-lm"
    top_k: Optional[int] = field(default=None, metadata={"help": "log-probabilities of a row that are asked for"})  # noqa: UP045
    beta: float = field(default=0.0, metadata={"help": "0 forward KL, 1 reverse KL, Jensen-Shannon between"})
    temperature: float = field(default=1.0, metadata={"help": "of the labels and the loss"})
    hard_weight: float = field(default=0.0, metadata={"help": "share of the cross-entropy with the batch's own labels"})
    chunked_head: bool = field(default=False, metadata={"help": "never hold the logits of all tokens together"})
    padded_vocabulary: bool = field(default=False, metadata={"help": "student and teacher may pad their vocabularies"})
    eval_teachers: bool = field(default=False, metadata={"help": "evaluations ask the teachers as well"})
    outputs: str = field(default="", metadata={"help": "the teachers' output"})
    tokenizer: Optional[str] = field(default=None, metadata={"help": "path or hash of the student's tokenizer"})  # noqa: UP045
    ahead: int = field(default=16, metadata={"help": "batches that are labelled while a step is trained"})

    def __post_init__(self) -> None:
        if self.task not in get_args(Task):
            raise SettingsError(f"task={self.task!r}: must be one of {', '.join(get_args(Task))}")
        if self.top_k is not None and not is_count(self.top_k):
            raise SettingsError(f"top_k={self.top_k!r}: must be a whole number of at least 1, or None")
        if not is_share(self.beta):
            raise SettingsError(f"beta={self.beta!r}: must be from 0 (forward KL) to 1 (reverse KL)")
        if not is_above_zero(self.temperature) or self.temperature == float("inf"):
            raise SettingsError(f"temperature={self.temperature!r}: must be a finite number above 0")
        if not is_share(self.hard_weight):
            raise SettingsError(f"hard_weight={self.hard_weight!r}: must be from 0 to 1")
        if self.chunked_head and self.task == "classification":
            raise SettingsError("chunked_head=True is for the vocabularies of language models: leave it out")

    @property
    def of_tokens(self) -> bool:
        """Whether a row is a token."""
        return self.task != "classification"

    @property
    def output(self) -> str:
        """The teachers' output."""
        return self.outputs or ("logprobs" if self.of_tokens else "logits")

    @property
    def kept(self) -> int | None:
        """How many log-probabilities of a row are asked for, None for all."""
        return self.top_k if self.top_k is not None or not self.of_tokens else _TOP_K
