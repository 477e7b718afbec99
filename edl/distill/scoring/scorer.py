"""`Scorer`: teachers' labels of sequences, as a future for each call."""

from __future__ import annotations

import operator
import os
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Literal

import numpy as np
from typing_extensions import Self

from edl.distill.loader import TeachersLike, resolve_routes, resolve_teachers
from edl.distill.options import Options
from edl.distill.pipeline.session import LabelSession
from edl.distill.scoring.calls import ScoreCall, ScoreCalls
from edl.distill.source.cutters import Getter
from edl.distill.source.routes import Router
from edl.distill.stats import ReaderStats
from edl.distill.transport.schema import OutputSpec
from edl.errors import SettingsError, SourceError
from edl.protocol.arrays import as_array
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
        teachers: a service's name, `host:port` of teachers, or `Teachers`; None for what the environment says. Where
            teachers differ by domain, a mapping from domain to these, and under None those of all other domains: each
            call then has `route`.
        top_k: how many of the most probable tokens to answer, as `TopK`.
        targets: ask for the log-probabilities of certain tokens as well: each call then has `targets`.
        temperature: at which the tail's mass is summed up; some teachers know 1 only.
        dtype: "float16" or "float32" for the values of `TopK`, None as the model gives them. Log-probabilities of
            `targets` are float32 in any case.
        version: labels of this version of the model only; empty for any.
        tokenizer: path of the student's tokenizer (a tokenizer.json, or a model's folder), or its hash: teachers of
            another are refused by name. Empty for any.
        discovery: URL of the registry that `teachers` names a service of.
        request_tokens: tokens of a request; None for 2,048, or a quarter of what teachers let wait.
        max_tokens: tokens that teachers have been asked for and not answered, at most.
        options: deadlines, hedging, credentials; see `Options`.

    Attributes:
        targets: as given.

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
        self._router: Router | None = None
        if isinstance(teachers, Mapping):
            groups, self._router = resolve_routes(teachers, lambda values: values, discovery)
        else:
            groups = resolve_teachers(teachers, discovery)
        if len(groups) != 1 and self._router is None:
            raise SettingsError(
                f"each sequence is scored by one service, and {len(groups)} are named: make a Scorer for each, or name "
                "them by domain, as teachers={'math': ..., None: ...}"
            )
        self.targets = targets
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
        routes = self._router.routes if self._router is not None else None
        self._session = LabelSession(groups, output_spec, options or Options(), routes=routes)
        numbers = Router(_field(-1), {index: index for index in range(len(groups))}) if routes is not None else None
        self._calls = ScoreCalls(self._session.labeller, getters, request_tokens, max_tokens, numbers)
        weakref.finalize(self, _let_go, self._session, self._calls).atexit = False  # the session sees to that

    def score(
        self,
        sequences: Sequence[Any],
        *,
        targets: Sequence[Any] | None = None,
        route: Any = None,
        timeout_s: float | None = None,
    ) -> Future[list[Any]]:
        """Ask for the labels of sequences. Returns at once; the arrays may be used again.

        Args:
            sequences: of token ids, each [tokens]: arrays, tensors or lists of integers, of at least one token.
            targets: by sequence, the tokens whose log-probabilities are asked for, [tokens, m] with the same m for all;
                given if and only if the scorer was made with `targets=True`.
            route: the domain of each sequence (a list, an array or a tensor), or one for all of them; where teachers
                are named by domain.
            timeout_s: seconds until the future fails with `TemporaryError`; None for the deadlines of `Options` alone.

        Returns:
            A future of a list with a `TopK` for each sequence, of as many rows as it has tokens; with `targets` a pair
            of the `TopK` and the log-probabilities, float32 [tokens, m]. It may be cancelled. Its errors are those of a
            reader: `NoTeacherError`, `RejectedError`, `BadOutputError`, `SourceError` for a sequence that no teacher
            takes, and `ClosedError`.

        Raises:
            ClosedError: the scorer is closed.
            SettingsError: `targets`, `route` or `timeout_s` cannot be.
            SourceError: `sequences` or `targets` cannot be sent, or no teachers are named for a domain.
        """
        self._session.labeller.check()
        if (targets is not None) != self.targets:
            raise SettingsError(
                "targets are given with each call if, and only if, the scorer is made with targets=True"
            )
        if timeout_s is not None and not is_above_zero(timeout_s):
            raise SettingsError(f"timeout_s={timeout_s!r}: must be a number of seconds above 0, or None")
        samples = _samples(sequences, targets)
        if self._router is not None:
            numbers = self._router.of_batch(route, len(samples), "the call")
            samples = [(*sample, number) for sample, number in zip(samples, numbers, strict=True)]
        elif route is not None:
            raise SettingsError(f"route={route!r}, and this scorer has one service: name teachers by domain")
        future: Future[list[Any]] = Future()
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        # Not a method: the traceback of an error that a future holds would hold the scorer.
        labels = operator.itemgetter(*self._outputs)
        self._calls.add(ScoreCall(samples, future, self, deadline, timeout_s, labels))
        return future

    @property
    def max_sequence(self) -> int:
        """Tokens of the longest sequence that some known teacher takes; 0 where none says."""
        return self._session.labeller.limits.max_sequence()

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


def _let_go(session: LabelSession, calls: ScoreCalls) -> None:
    session.close_without_waiting()
    calls.let_go()


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
