"""Teachers in simulated time, to try the dispatcher on: no sockets, no threads, no sleep."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from edl.distill.dispatch.actions import Action, Deliver, FailureKind, RequestFailure, Send
from edl.distill.dispatch.dispatcher import Dispatcher
from edl.distill.dispatch.policy import Policy


@dataclass
class SimTeacher:
    """Computes one request at a time, in order of arrival; `network_s` passes each way."""

    service_s: float
    network_s: float = 0.0005
    straggle: Callable[[], float] = lambda: 1.0
    busy_until: float = 0.0
    served: int = 0

    def reply_at(self, now: float) -> float:
        start = max(now + self.network_s, self.busy_until)
        self.busy_until = start + self.service_s * self.straggle()
        return self.busy_until + self.network_s


class Timeline:
    """A dispatcher, and what happens to it at which time; it is asked only when it says that it wants to be."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self.dispatcher, self.now = dispatcher, 0.0
        self._events: list[tuple[float, int, Callable[[], Sequence[Action] | None]]] = []
        self._order = itertools.count()

    def at(self, when: float, happens: Callable[[], Sequence[Action] | None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), happens))

    def advance(self) -> Sequence[Action] | None:
        """Let the next thing happen, and return what is to be done then; None if nothing happens any more."""
        wanted = self.dispatcher.next_event(self.now)
        if wanted is not None and (not self._events or wanted < self._events[0][0]):
            self.now = max(self.now, wanted)
            return self.dispatcher.tick(self.now)
        if not self._events:
            return None
        self.now, _, happens = heapq.heappop(self._events)
        return happens() or ()


class Simulation(Timeline):
    """Feeds `depth` tasks ahead of the consumer, which takes them in order and at once.

    With `pace`, the source yields so many tasks a second instead, whatever becomes of them.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        teachers: dict[str, SimTeacher],
        *,
        tasks: int,
        depth: int = 0,
        pace: float = 0.0,
    ) -> None:
        super().__init__(dispatcher)
        self.teachers, self.tasks, self.depth, self.pace = teachers, tasks, depth, pace
        self.sends: list[Send] = []
        self.latency: dict[int, float] = {}
        self._added: dict[int, float] = {}
        self.delivered = 0

    def run(self) -> None:
        for name in self.teachers:
            self._apply(self.dispatcher.teacher_up(name, self.now))
        if self.pace:
            for number in range(self.tasks):
                self.at(number / self.pace, lambda number=number: self._add(number))  # type: ignore[misc]
        self._feed()
        while self.delivered < self.tasks:
            actions = self.advance()
            assert actions is not None, f"stuck at {self.now:.3f} s with {self.delivered} of {self.tasks} delivered"
            assert self.now < 3600, f"{self.delivered} of {self.tasks} delivered after an hour"
            self._apply(actions)
            self._feed()
            self._apply(self.dispatcher.set_awaited(self.delivered, self.now))

    def _feed(self) -> None:
        while self.delivered in self.latency:
            self.delivered += 1
        if self.pace:
            return
        depth = self.depth or max(8, 4 * self.dispatcher.capacity)
        while len(self._added) < self.tasks and len(self._added) - self.delivered < depth:
            self._apply(self._add(len(self._added)))

    def _add(self, number: int) -> list[Action]:
        self._added[number] = self.now
        return self.dispatcher.add_task(number, self.now)

    def _apply(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, Send):
                self.sends.append(action)
                when = self.teachers[action.teacher].reply_at(self.now)
                self.at(when, lambda a=action.attempt: self.dispatcher.attempt_answered(a, self.now))  # type: ignore[misc]
            else:
                assert isinstance(action, Deliver), "given up"
                assert action.task not in self.latency, "delivered twice"
                self.latency[action.task] = self.now - self._added[action.task]
                self.teachers[action.teacher].served += 1


def stragglers(share: float, factor: float, seed: int) -> Callable[[], float]:
    rng = random.Random(seed)
    return lambda: factor if rng.random() < share else 1.0


def sends(actions: Sequence[Action]) -> list[Send]:
    """Of some actions, those that send."""
    return [action for action in actions if isinstance(action, Send)]


def connected(*teachers: str, **policy: Any) -> Dispatcher:
    """A dispatcher with teachers that are up."""
    dispatcher = Dispatcher(Policy(**policy))
    for teacher in teachers:
        dispatcher.teacher_up(teacher, 0.0)
    return dispatcher


def fail(
    dispatcher: Dispatcher, send: Send, kind: FailureKind, now: float, words: str = "no", retry_after_s: float = 0.0
) -> list[Action]:
    """Report that an attempt has failed."""
    return dispatcher.attempt_failed(send.attempt, RequestFailure(kind, words, retry_after_s), now)
