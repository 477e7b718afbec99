"""Labels sequences call by call: what a scorer's thread does between the user's calls and the teachers."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from edl.background import BackgroundLoop
from edl.distill.compress import TopK
from edl.distill.pipeline.chunk_labeller import ChunkLabeller
from edl.distill.source.chunk import Chunk, Item
from edl.distill.source.cutters import Getter
from edl.distill.source.routed_cutters import routed_cutter
from edl.distill.source.routes import Router
from edl.distill.source.sequence_cutters import SequenceListCutter
from edl.errors import ClosedError, TemporaryError
from edl.protocol.tensors import Array

__all__ = ["ScoreCall", "ScoreCalls"]

_LOOK_S = 0.05
"""How often a call is looked at that waits for the first teacher: connecting takes longer."""
_FOLLOW_S = 1.0
"""How often the teachers' version is looked at: that costs each of them a request, and a new version may be so late."""
_IDLE_S = 3600.0  # nothing to do: calls and answers wake the thread


@dataclass(eq=False)
class ScoreCall:
    """Sequences that are scored together.

    Attributes:
        samples: tuples of arrays [tokens, ...]; with routes, of each behind them the number of the service.
        future: of the labels of each sequence.
        owner: kept alive until the call has ended.
        deadline: on the monotonic clock, None for none.
        timeout_s: as the user said it, for messages.
        labels: makes what the user gets of a sequence's outputs.
        longest: by route, tokens of the longest sequence.
        began: on the monotonic clock.
        item: where its rows are; None until it is cut.
        unsent: chunks that wait for room.
        sent: chunks on their way, or answered.
    """

    samples: Sequence[tuple[Any, ...]]
    future: Future[list[Any]]
    owner: object
    deadline: float | None
    timeout_s: float | None
    labels: Callable[[Mapping[str, Array | TopK]], Any]
    longest: dict[int | None, int] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)
    item: Item | None = None
    unsent: deque[Chunk] = field(default_factory=deque)
    sent: list[Chunk] = field(default_factory=list)


class ScoreCalls:
    """Sends calls in the order in which they come, with a bound on the tokens under way.

    Args:
        labeller: of a single service, or of several of which one labels a sequence.
        getters: by input name, how to find it in a sample.
        router: finds in a sample which service labels it; None where there is one.
        request_tokens: of a request; None for what teachers take.
        max_tokens: under way at most; a request that is larger goes alone.
    """

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
        self._calls: deque[ScoreCall] = deque()  # of the loop's thread alone, the oldest first
        self._closed = False
        self._lock = threading.Lock()  # of `_closed` and what is added
        self._tokens = 0
        self._abandoned = False
        self._made_at = time.monotonic()
        self._followed_at: dict[int, float] = {}  # by service
        self._loop = BackgroundLoop("edl-score", self._step)

    def add(self, call: ScoreCall) -> None:
        """Take in a call. One without sequences has all its labels, and no answer would ever wake the thread for it."""
        if not call.samples:
            call.future.set_result([])
            return
        for sample in call.samples:
            route = None if self._router is None else self._router.of_sample(sample, "a sequence")
            call.longest[route] = max(call.longest.get(route, 0), _length(sample))
        call.future.add_done_callback(self._ended)
        with self._lock:
            taken = not self._closed
            if taken:
                self._added.append(call)
        if taken:
            self._loop.wake()
        else:
            _fail(call, _closed_error())

    def _ended(self, future: Future[list[Any]]) -> None:
        """Let go of what was asked for a call that nobody waits for any more."""
        if future.cancelled():
            self._loop.wake()

    def let_go(self) -> None:
        """End, where nobody is left to call: a finalizer may do this, in the middle of anything."""
        self._abandoned = True
        self._loop.wake()

    def close(self) -> None:
        """End open calls with `ClosedError`, after the labeller was closed."""
        self._loop.close()
        self._end_all()

    @property
    def tokens(self) -> int:
        """Tokens under way."""
        return self._tokens

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
        """Follow the teachers to another version before a call whose labels would not be mixed with those of this.

        Returns:
            Seconds until the next look.
        """
        routes = {route for call in self._calls for route in call.longest}
        services = {index for route in routes for index in self._labeller.limits.asked(route)}
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
        """Send what there is room for; return the seconds until the next look."""
        wait_s = _IDLE_S
        for call in list(self._calls):
            if self._closed:  # as above
                break
            try:
                if call.item is None:
                    if self._awaits_teacher(call):
                        wait_s = _LOOK_S
                        continue  # others need not wait for it
                    self._cut(call)
                while call.unsent:
                    chunk = call.unsent[0]
                    if self._tokens and self._tokens + chunk.rows > self._max_tokens:
                        return wait_s
                    call.unsent.popleft()
                    call.sent.append(chunk)
                    self._tokens += chunk.rows
                    self._labeller.estimate_answers(chunk)
                    self._labeller.submit(chunk, self._answered, lambda: self._labeller.closed)
            except Exception as exc:  # noqa: BLE001 - raised again where the result is asked for
                self._drop(call)
                _fail(call, exc)
        return wait_s

    def _awaits_teacher(self, call: ScoreCall) -> bool:
        """Return whether a call waits for the first teacher of a route, or for one that takes its longest sequence.

        Raises:
            NoTeacherError: it has waited long enough.
        """
        limits = self._labeller.limits
        return any(
            limits.lacks_teacher(call.began, route) or limits.awaits_sequence(rows, call.began, route)
            for route, rows in call.longest.items()
        )

    def _cut(self, call: ScoreCall) -> None:
        cutter = self._cutter() if self._router is None else routed_cutter(self._router, self._cutter)
        limits = self._labeller.limits
        reading = cutter.read(call.samples)
        for route, part in cutter.by_route():
            if route in call.longest:
                part.fit = functools.partial(limits.rows_that_fit, route=route)
                part.max_rows = limits.max_rows(lambda: self._labeller.closed, route)
                part.max_sequence = limits.max_sequence(route)
        call.item, ready = cutter.cut(reading)
        call.unsent.extend([*ready, *cutter.finish()])

    def _cutter(self) -> SequenceListCutter:
        return SequenceListCutter(self._getters, self._request_tokens, self._labeller.services)

    def _answered(self, surplus_nbytes: int = 0) -> None:
        """Note, on the event loop, that a chunk may be done."""
        self._loop.wake()

    def _has_ended(self, call: ScoreCall, now: float) -> bool:
        """Return whether a call has its answers, or never will; its future says which."""
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
        self._release(call)
        return False

    def _release(self, call: ScoreCall) -> None:
        """Let others have the room of what is answered."""
        done = [chunk for chunk in call.sent if chunk.done and chunk.left]
        for chunk in done:
            self._tokens -= chunk.left
            chunk.left = 0

    def _drop(self, call: ScoreCall) -> None:
        with contextlib.suppress(ValueError):  # a future's callback has closed the scorer
            self._calls.remove(call)
        self._tokens -= sum(chunk.left for chunk in call.sent)
        open_chunks = [chunk for chunk in call.sent if not chunk.done]
        if open_chunks:
            self._labeller.cancel(open_chunks)
        for chunk in call.sent:
            chunk.left = 0
        call.owner = None

    def _end_all(self) -> None:
        """End all calls, and take in no more. In the loop's thread, or when that has ended."""
        with self._lock:
            self._closed = True
            calls = [*self._calls, *self._added]
            self._calls.clear()
            self._added.clear()
        for call in calls:
            _fail(call, _closed_error())


def _length(sample: tuple[Any, ...]) -> int:
    """Return the length of a sequence; 1 of a single value, which the cutter refuses."""
    return len(sample[0]) if sample[0].ndim else 1


def _closed_error() -> ClosedError:
    return ClosedError("the scorer was closed before the sequences were scored")


def _fail(call: ScoreCall, error: BaseException) -> None:
    if (call.future.cancelled() or not call.future.done()) and call.future.set_running_or_notify_cancel():
        call.future.set_exception(error)


def _outputs(chunk: Chunk, start: int, stop: int) -> Mapping[str, Array | TopK]:
    """Return a sequence's outputs as arrays of its own: the user may keep a sequence, and not all of its request."""
    outputs = chunk.outputs[0]
    assert outputs is not None
    return {name: _copied(output[start:stop]) for name, output in outputs.items()}


def _copied(output: Array | TopK) -> Array | TopK:
    return output.map(lambda array: array.copy()) if isinstance(output, TopK) else output.copy()
