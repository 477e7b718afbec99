"""`Scorer`: teachers' labels of sequences, as a future for each call."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Literal

import numpy as np
from typing_extensions import Self

from edl.distill.loader import TeachersLike, resolve_teachers
from edl.distill.options import Options
from edl.distill.pipeline.session import LabelSession
from edl.distill.scoring.calls import ScoreCall, ScoreCalls
from edl.distill.source.arrays import as_array
from edl.distill.source.cutters import Getter
from edl.distill.stats import ReaderStats
from edl.distill.transport.schema import OutputSpec
from edl.errors import SettingsError, SourceError
from edl.protocol.names import IDS, LOGPROBS, TARGET_LOGPROBS, TARGETS
from edl.settings import is_above_zero, is_count
from edl.tokenizer_hash import resolve_tokenizer

__all__ = ["Scorer"]


class Scorer:
    """Asks language-model teachers for the labels of sequences, many calls at a time.

    ::

        scorer = Scorer("qwen-teacher", top_k=64, tokenizer="student/")
        future = scorer.score([ids, more_ids])
        ...
        first, second = future.result()   # TopK of as many rows as each sequence has tokens

    Row t of a label belongs to token t, and is the teacher's prediction of token t + 1 (the last row predicts what
    would follow). Requests are filled, sent again and hedged as a reader's are. Thread-safe.

    Args:
        teachers: a service's name, `host:port` of teachers, or `Teachers`; None for what the environment says.
        top_k: how many of the most probable tokens to answer, as `TopK`.
        targets: ask for the log-probabilities of certain tokens as well: each call then has `targets`.
        temperature: at which the tail's mass is summed up; some teachers know 1 only.
        dtype: "float16" or "float32" for the values of `TopK`, None as the model gives them. Log-probabilities of
            `targets` are float32 in any case.
        version: labels of this version of the model only; empty for any.
        tokenizer: path of the student's tokenizer (a tokenizer.json, or a model's folder), or its hash: teachers of
            another are refused by name. Empty for any.
        discovery: URL of the registry that `teachers` names a service of.
        request_tokens: tokens of a request; None for 2,048, or fewer where teachers take no more.
        max_tokens: tokens that teachers have been asked for and not answered, at most.
        options: deadlines, hedging, credentials; see `Options`.

    Raises:
        SettingsError: an argument that cannot be.
    """

    def __init__(
        self,
        teachers: TeachersLike = None,
        *,
        top_k: int = 64,
        targets: bool = False,
        temperature: float = 1.0,
        dtype: Literal["float16", "float32"] | None = None,
        version: str = "",
        tokenizer: str | os.PathLike[str] = "",
        discovery: str | None = None,
        request_tokens: int | None = None,
        max_tokens: int = 1 << 16,
        options: Options | None = None,
    ) -> None:
        for name, value in (("top_k", top_k), ("max_tokens", max_tokens), ("request_tokens", request_tokens or 1)):
            if not is_count(value):
                raise SettingsError(f"{name}={value!r}: must be a whole number of at least 1")
        groups = resolve_teachers(teachers, discovery)
        if len(groups) != 1:
            raise SettingsError(f"a scorer asks one service, and {len(groups)} are named: make a Scorer for each")
        self._targets = targets
        self._outputs = (LOGPROBS, TARGET_LOGPROBS) if targets else (LOGPROBS,)
        output_spec = OutputSpec(
            self._outputs,
            top_k=top_k,
            temperature=temperature,
            dtype=dtype,
            version=version,
            tokenizer=resolve_tokenizer(os.fspath(tokenizer)),
        )
        names = (IDS, TARGETS) if targets else (IDS,)
        getters: Mapping[str, Getter] = {name: _field(index) for index, name in enumerate(names)}
        self._session = LabelSession(groups, output_spec, options or Options())
        self._calls = ScoreCalls(self._session.labeller, getters, request_tokens, max_tokens)
        weakref.finalize(self, _let_go, self._session, self._calls).atexit = False  # the session sees to that

    def score(
        self,
        sequences: Sequence[Any],
        *,
        targets: Sequence[Any] | None = None,
        timeout_s: float | None = None,
    ) -> Future[list[Any]]:
        """Ask for the labels of sequences. Returns at once; the arrays may be used again.

        Args:
            sequences: of token ids, each [tokens]: arrays, tensors or lists of integers, of at least one token.
            targets: by sequence, the tokens whose log-probabilities are asked for, [tokens, m] with the same m for all;
                given if and only if the scorer was made with `targets=True`.
            timeout_s: seconds until the future fails with `TemporaryError`; None for the deadlines of `Options` alone.

        Returns:
            A future of a list with a `TopK` for each sequence, of as many rows as it has tokens; with `targets` a pair
            of the `TopK` and the log-probabilities, float32 [tokens, m]. It may be cancelled. Its errors are those of a
            reader: `NoTeacherError`, `RejectedError`, `BadOutputError`, `SourceError` for a sequence that no teacher
            takes, and `ClosedError`.

        Raises:
            ClosedError: the scorer is closed.
            SettingsError: `targets` or `timeout_s` cannot be.
            SourceError: `sequences` or `targets` cannot be sent.
        """
        self._session.labeller.check()
        if (targets is not None) != self._targets:
            raise SettingsError(
                "targets are given with each call if, and only if, the scorer is made with targets=True"
            )
        if timeout_s is not None and not is_above_zero(timeout_s):
            raise SettingsError(f"timeout_s={timeout_s!r}: must be a number of seconds above 0, or None")
        samples = _samples(sequences, targets)
        future: Future[list[Any]] = Future()
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._calls.add(ScoreCall(samples, future, self, deadline, timeout_s, self._labels))
        return future

    @property
    def max_sequence(self) -> int:
        """Tokens of the longest sequence that some known teacher takes; 0 where none says."""
        return self._session.labeller.max_sequence()

    def stats(self) -> ReaderStats:
        """Return what has been done so far, in tokens where it says rows; may be called from any thread."""
        return self._session.stats()

    def close(self) -> None:
        """End all connections; calls under way end with `ClosedError`. May be called twice."""
        self._session.close()
        self._calls.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _labels(self, outputs: Mapping[str, Any]) -> Any:
        found = tuple(outputs[name] for name in self._outputs)
        return found if self._targets else found[0]


def _let_go(session: LabelSession, calls: ScoreCalls) -> None:
    session.close_without_waiting()
    calls.wake()


def _field(index: int) -> Callable[[Any], Any]:
    return lambda value: value[index]


def _samples(sequences: Sequence[Any], targets: Sequence[Any] | None) -> list[tuple[Any, ...]]:
    """Return tuples of arrays of their own: the caller may go on with what it gave."""
    if isinstance(sequences, str | bytes) or not hasattr(sequences, "__len__"):
        raise SourceError(f"sequences of type {type(sequences).__name__}: expected a list of sequences of token ids")
    columns = [(IDS, sequences)] if targets is None else [(IDS, sequences), (TARGETS, targets)]
    if targets is not None and len(targets) != len(sequences):
        raise SourceError(f"{len(targets)} targets for {len(sequences)} sequences")
    arrays = [
        [np.array(as_array(part, f"sequence {number}, {name}")) for number, part in enumerate(column)]
        for name, column in columns
    ]
    return list(zip(*arrays, strict=True))
