"""Requests teachers' labels for sequences created at run time, for loops in which the student generates text."""

from __future__ import annotations

import contextlib
import functools
import operator
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import numpy as np
from typing_extensions import Self

from edl.background import BackgroundLoop
from edl.distill.compress import TopK
from edl.distill.loader import Route, TeachersLike, field_getter, resolve_routes, resolve_teachers
from edl.distill.options import Options
from edl.distill.pipeline.answers import copied
from edl.distill.pipeline.chunk_labeller import ChunkLabeller
from edl.distill.pipeline.request import LabelRequest
from edl.distill.pipeline.session import LabelSession, open_session
from edl.distill.source.chunk import Chunk, Item
from edl.distill.source.cutters import Getter, Router, SequenceListCutter
from edl.distill.source.fingerprint import ItemFingerprint
from edl.distill.source.iterator import SourceIterator
from edl.distill.stats import ReaderStats
from edl.distill.transport.schema import OutputSpec
from edl.errors import ClosedError, SettingsError, SourceError, TemporaryError
from edl.protocol.names import IDS, LOGPROBS, TARGET_LOGPROBS, TARGETS
from edl.protocol.tensors import Array, as_array
from edl.settings import is_above_zero, is_count
from edl.tokenizer_hash import resolve_tokenizer

__all__ = ["Scorer", "on_policy"]

_LOOK_S = 0.05  # how often to check a call that waits for its first teacher; connecting takes longer than this
_FOLLOW_S = 1.0  # between checks of the teachers' version, each of which costs every teacher a request
_IDLE_S = 3600.0  # wait when idle: calls and answers wake the thread


@dataclass(eq=False)
class ScoreCall:
    samples: Sequence[tuple[Any, ...]]  # arrays [tokens, ...], followed by the service's number if there are routes
    future: Future[list[Any]]  # of the labels of each sequence
    owner: object  # kept alive until the call has ended
    deadline: float | None  # on the monotonic clock, None for none
    timeout_s: float | None  # as the user passed it, for messages
    labels: Callable[[Mapping[str, Array | TopK]], Any]  # turns a sequence's outputs into the user's labels
    longest: dict[int | None, int] = field(default_factory=dict)  # by route, tokens of the longest sequence
    began: float = field(default_factory=time.monotonic)  # on the monotonic clock
    item: Item | None = None  # where its rows are; None until it is cut
    unsent: deque[Chunk] = field(default_factory=deque)  # chunks that wait for room
    sent: list[Chunk] = field(default_factory=list)  # chunks in flight or answered


class ScoreCalls:
    """Sends calls in the order in which they arrive, and limits the number of pending tokens."""

    def __init__(
        self,
        labeller: ChunkLabeller,
        getters: Mapping[str, Getter],
        request_tokens: int | None,
        max_tokens: int,
        router: Router | None = None,
    ) -> None:
        self._labeller = labeller
        self._getters = getters
        self._router = router
        self._request_tokens = request_tokens
        self._max_tokens = max_tokens
        self._added: deque[ScoreCall] = deque()
        self._calls: deque[ScoreCall] = deque()  # used only by the loop's thread; oldest first
        self._closed = False
        self._lock = threading.Lock()  # guards `_closed` and added calls
        self.tokens = 0  # pending
        self._abandoned = False
        self._made_at = time.monotonic()
        self._followed_at: dict[int, float] = {}  # by service
        self._loop = BackgroundLoop("edl-score", self._step)

    def add(self, call: ScoreCall) -> None:
        """Add a call. A call without sequences is completed at once, because no answer will wake the thread."""
        if not call.samples:
            call.future.set_result([])
            return
        for sample in call.samples:
            route = None if self._router is None else self._router.of_sample(sample, "a sequence")
            call.longest[route] = max(call.longest.get(route, 0), _length(sample))
        call.future.add_done_callback(self._drop_cancelled)
        with self._lock:
            taken = not self._closed
            if taken:
                self._added.append(call)
        if taken:
            self._loop.wake()
        else:
            _fail(call, _closed_error())

    def _drop_cancelled(self, future: Future[list[Any]]) -> None:
        if future.cancelled():
            self._loop.wake()

    def let_go(self) -> None:
        """End all calls. The scorer's finalizer calls this, so it only sets a flag and wakes the thread."""
        self._abandoned = True
        self._loop.wake()

    def close(self) -> None:
        """End open calls with `ClosedError`. Call this after the labeller has been closed."""
        self._loop.close()
        self._end_all()

    # The thread

    def _step(self) -> float | None:
        if self._labeller.closed or self._abandoned:
            self._end_all()
            return None
        while self._added:
            self._calls.append(self._added.popleft())
        now = time.monotonic()
        for call in list(self._calls):
            if self._closed:  # a future's callback has closed the scorer, and all calls have ended
                return None
            if self._has_ended(call, now):
                self._drop(call)
        wait_s = min(self._follow_versions(now), self._send())
        deadlines = [call.deadline for call in self._calls if call.deadline is not None]
        return max(min([wait_s, *(deadline - now for deadline in deadlines)]), 0.0)

    def _follow_versions(self, now: float) -> float:
        routes = {route for call in self._calls for route in call.longest}
        services = {index for route in routes for index in self._labeller.asked(route)}
        return min((self._follow_version(index, now) for index in services), default=_IDLE_S)

    def _follow_version(self, index: int, now: float) -> float:
        sent = [chunk for call in self._calls for chunk in call.sent if chunk.route in (None, index)]
        if any(chunk.done for chunk in sent):
            return _IDLE_S
        if sent and not (self._labeller.refuses_versions and not self._labeller.has_live_teacher(index)):
            return _FOLLOW_S if self._labeller.refuses_versions else _IDLE_S
        due_s = self._followed_at.get(index, self._made_at) + _FOLLOW_S - now
        if due_s > 0:
            return max(due_s, _LOOK_S) if sent else _IDLE_S
        self._labeller.follow_version(index)
        self._followed_at[index] = time.monotonic()
        return _FOLLOW_S

    def _send(self) -> float:
        """Send chunks as room permits; return the seconds until the next check."""
        wait_s = _IDLE_S
        for call in list(self._calls):
            if self._closed:  # as above
                break
            try:
                if call.item is None:
                    if self._awaits_teacher(call):
                        wait_s = _LOOK_S
                        continue  # others do not wait for it
                    self._cut(call)
                while call.unsent:
                    chunk = call.unsent[0]
                    if self.tokens and self.tokens + chunk.rows > self._max_tokens:
                        return wait_s
                    call.unsent.popleft()
                    call.sent.append(chunk)
                    self.tokens += chunk.rows
                    self._labeller.estimate_answers(chunk)
                    self._labeller.submit(chunk, self._answered, lambda: self._labeller.closed)
            except Exception as exc:  # noqa: BLE001 - raised again where the result is asked for
                self._drop(call)
                _fail(call, exc)
        return wait_s

    def _awaits_teacher(self, call: ScoreCall) -> bool:
        labeller = self._labeller
        return any(
            labeller.lacks_teacher(call.began, route) or labeller.awaits_sequence(rows, call.began, route)
            for route, rows in call.longest.items()
        )

    def _cut(self, call: ScoreCall) -> None:
        labeller = self._labeller
        cutter = SequenceListCutter(self._getters, self._request_tokens, labeller.services, router=self._router)

        def set_limits(longest: Mapping[int | None, int]) -> None:
            for route in longest:
                part = cutter.routes[route]
                part.fit = functools.partial(labeller.rows_that_fit, route=route)
                part.max_rows = labeller.max_rows(lambda: labeller.closed, route)
                part.max_sequence = labeller.max_sequence(route)

        call.item, ready = cutter.put(call.samples, set_limits)
        call.unsent.extend([*ready, *cutter.finish()])

    def _answered(self, surplus_nbytes: int = 0) -> None:
        self._loop.wake()

    def _has_ended(self, call: ScoreCall, now: float) -> bool:
        if call.future.cancelled():
            call.future.set_running_or_notify_cancel()
            return True
        failed = next((chunk.error for chunk in call.sent if chunk.error is not None), None)
        if failed is not None:
            _fail(call, failed)
            return True
        if call.item is not None and not call.unsent and all(chunk.done for chunk in call.sent):
            self._labeller.record_delivery(call.item.rows)
            try:
                scores = [call.labels(_outputs(*part)) for part in call.item.parts]
            except Exception as exc:  # noqa: BLE001 - raised again where the result is asked for
                _fail(call, exc)
            else:
                if call.future.set_running_or_notify_cancel():
                    call.future.set_result(scores)
            return True
        if call.deadline is not None and now >= call.deadline:
            done = sum(chunk.rows for chunk in call.sent if chunk.done)
            words = f"not all sequences were scored within {call.timeout_s:g} s ({done} tokens were)"
            _fail(call, TemporaryError(words))
            return True
        for chunk in call.sent:
            if chunk.done:  # its room is free for other calls
                self.tokens -= chunk.left
                chunk.left = 0
        return False

    def _drop(self, call: ScoreCall) -> None:
        with contextlib.suppress(ValueError):  # a future's callback has closed the scorer
            self._calls.remove(call)
        self.tokens -= sum(chunk.left for chunk in call.sent)
        open_chunks = [chunk for chunk in call.sent if not chunk.done]
        if open_chunks:
            self._labeller.cancel(open_chunks)
        for chunk in call.sent:
            chunk.left = 0
        call.owner = None

    def _end_all(self) -> None:
        """End all calls, and refuse new ones. Call it in the loop's thread, or after the thread has ended."""
        with self._lock:
            self._closed = True
            calls = [*self._calls, *self._added]
            self._calls.clear()
            self._added.clear()
        for call in calls:
            _fail(call, _closed_error())


def _length(sample: tuple[Any, ...]) -> int:
    """Return the length of a sequence; 1 for a single value, which the cutter will reject."""
    return len(sample[0]) if sample[0].ndim else 1


def _closed_error() -> ClosedError:
    return ClosedError("the scorer was closed before the sequences were scored")


def _fail(call: ScoreCall, error: BaseException) -> None:
    if (call.future.cancelled() or not call.future.done()) and call.future.set_running_or_notify_cancel():
        call.future.set_exception(error)


def _outputs(chunk: Chunk, start: int, stop: int) -> Mapping[str, Array | TopK]:
    """Return copies of a sequence's outputs, so that keeping them does not keep the rest of the request."""
    outputs = chunk.outputs[0]
    assert outputs is not None
    return {name: copied(output[start:stop]) for name, output in outputs.items()}


class Scorer:
    """Asks language-model teachers for the labels of sequences; many calls may be pending at a time.

    ::

        scorer = Scorer("qwen-teacher", top_k=64, tokenizer="student/")
        future = scorer.score([ids, more_ids])
        ...
        first, second = future.result()   # TopK with a row for each token

    Row t of a label belongs to token t, and is the teacher's prediction of token t + 1 (the last row predicts the token
    after the end). Requests are filled, resent and hedged as by a `DistillReader`. Thread-safe.

    Args:
        teachers: A service's name, `host:port` of teachers, or `Teachers`; None to read the environment. If teachers
            differ by domain, a mapping from each domain to one of these forms; the key None applies to all other
            domains, and each call needs `route`.
        top_k: Number of most probable tokens to return per row, as `TopK`.
        targets: Whether to ask for the log-probabilities of given tokens as well; each call then needs `targets`.
        temperature: Temperature of the tail; some teachers support only 1.
        dtype: Type of the values of `TopK`, "float16" or "float32"; None for the model's own. Log-probabilities of
            `targets` are always float32.
        version: Use only labels of this model version; empty for any.
        tokenizer: Path of the student's tokenizer (a tokenizer.json, or a model's folder), or its hash. Teachers with a
            different tokenizer are not used. Empty for any.
        discovery: URL of the registry for the service in `teachers`.
        request_tokens: Tokens per request; None for 2,048, or a quarter of the tokens that teachers queue, if that is
            less.
        max_tokens: Largest number of pending tokens; further calls wait.
        options: Deadlines, hedging and credentials; see `Options`.

    Attributes:
        targets: Whether calls need `targets`, as given.

    Raises:
        SettingsError: An argument is invalid.
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
                f"each sequence is scored by one service, not {len(groups)}: create a Scorer for each service, or name "
                "the services by domain, as teachers={'math': ..., None: ...}"
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
        getters: Mapping[str, Getter] = {name: operator.itemgetter(index) for index, name in enumerate(names)}
        numbers = (  # follow each sequence's arrays
            Router(operator.itemgetter(-1), {index: index for index in range(len(groups))}) if self._router else None
        )

        self._session: LabelSession
        self._calls: ScoreCalls

        def keep(session: LabelSession) -> None:
            self._session = session
            self._calls = ScoreCalls(session.labeller, getters, request_tokens, max_tokens, numbers)
            weakref.finalize(self, _let_go, session, self._calls).atexit = False  # the session closes itself at exit

        open_session(LabelRequest(output_spec, groups, options or Options(), router=self._router), keep)

    def score(
        self,
        sequences: Sequence[Any],
        *,
        targets: Sequence[Any] | None = None,
        route: Any = None,
        timeout_s: float | None = None,
    ) -> Future[list[Any]]:
        """Request the labels of sequences. Returns at once; the arrays may be reused.

        Args:
            sequences: Sequences of token ids, each [tokens] with at least one token: arrays, tensors or lists of
                integers.
            targets: For each sequence, the tokens whose log-probabilities are requested, [tokens, m], with the same m
                for all sequences. Required if the scorer was created with `targets=True`, otherwise not allowed.
            route: If `teachers` is a mapping: the domain of each sequence (a list, an array or a tensor), or one domain
                for all sequences.
            timeout_s: Seconds until the future fails with `TemporaryError`; None for the deadlines of `Options` only.

        Returns:
            A future. Its result is a list with a `TopK` for each sequence, which has one row per token; with `targets`,
            a pair of the `TopK` and the log-probabilities, float32 [tokens, m]. You can cancel the future. Its
            errors are those of a reader: `NoTeacherError`, `RejectedError`, `BadOutputError`, `SourceError` for a
            sequence that no teacher accepts, and `ClosedError`.

        Raises:
            ClosedError: The scorer is closed.
            SettingsError: `targets`, `route` or `timeout_s` is invalid.
            SourceError: `sequences` or `targets` cannot be sent, or a domain has no teachers.
        """
        self._session.labeller.check()
        if (targets is not None) != self.targets:
            raise SettingsError("pass targets with each call if, and only if, the scorer was created with targets=True")
        if timeout_s is not None and not is_above_zero(timeout_s):
            raise SettingsError(f"timeout_s={timeout_s!r}: must be a number of seconds above 0, or None")
        samples = _samples(sequences, targets)
        if self._router is not None:
            numbers = self._router.of_batch(route, len(samples), "the call")
            samples = [(*sample, number) for sample, number in zip(samples, numbers, strict=True)]
        elif route is not None:
            raise SettingsError(f"route={route!r}, but this scorer has one service: name teachers by domain")
        future: Future[list[Any]] = Future()
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        labels = operator.itemgetter(*self._outputs)  # not a method, which an error's traceback would keep alive
        self._calls.add(ScoreCall(samples, future, self, deadline, timeout_s, labels))
        return future

    @property
    def max_sequence(self) -> int:
        """Length in tokens of the longest sequence that any known teacher accepts; 0 if unknown."""
        return self._session.labeller.max_sequence()

    def stats(self) -> ReaderStats:
        """Return the counters so far, which count tokens as rows; may be called from any thread."""
        return self._session.stats()

    def close(self) -> None:
        """End all connections; pending calls end with `ClosedError`. May be called twice."""
        self._session.close()
        self._calls.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _let_go(session: LabelSession, calls: ScoreCalls) -> None:
    session.close_without_waiting()
    calls.let_go()


def _samples(sequences: Sequence[Any], targets: Sequence[Any] | None) -> list[tuple[Any, ...]]:
    """Return tuples of copied arrays, so that the caller may reuse its arrays."""
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


P = TypeVar("P")


def on_policy(
    prompts: Iterable[P],
    generate: Callable[[P], Sequence[Any]],
    teacher: Scorer,
    *,
    ahead: int = 1,
    route: Route = None,
    timeout_s: float | None = None,
) -> Generator[tuple[P, Sequence[Any], list[Any]], None, None]:
    """Generate from prompts, and yield the sequences with their labels in the order of the prompts.

    The teacher scores a batch while the next ones are generated. With `ahead=1`, the student that generates a batch is
    one optimizer step older than the student that trains on the batch. With `ahead=0`, it is the same student, and the
    loop waits for the batch's labels.

    Args:
        prompts: Batches of prompts, of any type.
        generate: Function that returns the sequences of a batch, each with prompt and continuation, in a form that
            `Scorer.score` accepts. It is called in the iterating thread and may return several sequences per prompt.
            Prompts and sequences must not be changed before they are yielded.
        teacher: Scorer of the sequences. If it was created with `targets`, the targets are the next tokens: token t + 1
            at row t, and the last token again at the last row.
        ahead: Number of later batches that have been generated, and are being scored, when a batch is yielded.
        route: If the scorer's `teachers` is a mapping: key, position or function that finds, in a batch of prompts, the
            domain of each sequence, or a single domain for all sequences.
        timeout_s: Seconds until a batch fails; see `Scorer.score`.

    Yields:
        The prompts, the sequences, and their labels: a `TopK` for each sequence; with `targets`, a pair of the `TopK`
            and the log-probabilities of the next tokens, float32 [tokens, 1].

    Raises:
        SettingsError: `ahead` is below 0.
        SourceError: There are fewer sequences than prompts, or prompts or sequences were changed before they were
            yielded.
        EDLError: The future of `Scorer.score` failed.
    """
    if ahead < 0:
        raise SettingsError(f"ahead={ahead}: must be 0 or more")
    find = None if route is None else field_getter(route)
    waiting: deque[tuple[P, Sequence[Any], Future[list[Any]], ItemFingerprint]] = deque()
    try:
        for number, batch in enumerate(SourceIterator(prompts)):
            sequences = generate(batch)
            _check_generated(number, batch, sequences)
            values = None if find is None else find(batch)
            targets = [_next_tokens(sequence) for sequence in sequences] if teacher.targets else None
            future = teacher.score(sequences, targets=targets, route=values, timeout_s=timeout_s)
            made = ItemFingerprint(f"the prompts or sequences of batch {number}", (batch, sequences), {})
            waiting.append((batch, sequences, future, made))
            while len(waiting) > ahead:
                yield _scored(*waiting.popleft())
        while waiting:
            yield _scored(*waiting.popleft())
    finally:
        for _, _, future, _ in waiting:
            future.cancel()


def _check_generated(number: int, prompts: Any, sequences: Any) -> None:
    """Check that there is a sequence for each prompt, if the batch has a type that shows the number of prompts."""
    texts = isinstance(prompts, list) and all(isinstance(prompt, str | list) for prompt in prompts)
    least = len(prompts) if texts or getattr(prompts, "ndim", None) else 1
    if hasattr(sequences, "__len__") and len(sequences) < least:
        raise SourceError(
            f"generate returned {len(sequences)} sequences for batch {number}, which has {least} prompts or more: "
            "return at least one for each prompt, in the same order"
        )


def _next_tokens(sequence: Any) -> Array:
    tokens = np.atleast_1d(as_array(sequence, "sequence"))  # the scorer refuses a single number, with its name
    return np.concatenate([tokens[1:], tokens[-1:]])[:, None]


def _scored(
    batch: P, sequences: Sequence[Any], future: Future[list[Any]], made: ItemFingerprint
) -> tuple[P, Sequence[Any], list[Any]]:
    labels = future.result()
    made.check()
    return batch, sequences, labels
