"""Teachers in simulated time, to try the dispatcher on: no sockets, no threads, no sleep."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from edl.distill.dispatch.actions import Action, Deliver, FailureKind, GiveUp, RequestFailure, Send
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
    sent: list[int] = field(default_factory=list)

    def reply_at(self, now: float) -> float:
        start = max(now + self.network_s, self.busy_until)
        self.busy_until = start + self.service_s * self.straggle()
        return self.busy_until + self.network_s


class Simulation:
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
        self.dispatcher, self.teachers, self.tasks, self.depth, self.pace = dispatcher, teachers, tasks, depth, pace
        self.now = 0.0
        self.sends: list[Send] = []
        self.answers: dict[int, str] = {}
        self.given_up: dict[int, GiveUp] = {}
        self.latency: dict[int, float] = {}
        self._added: dict[int, float] = {}
        self._events: list[tuple[float, int, Callable[[], list[Action]]]] = []
        self._order = itertools.count()
        self._on_way: dict[int, str] = {}
        self.delivered = 0

    def at(self, when: float, event: Callable[[], list[Action]]) -> None:
        heapq.heappush(self._events, (when, next(self._order), event))

    def run(self, until_s: float = 3600.0) -> None:
        for name in self.teachers:
            self._apply(self.dispatcher.teacher_up(name, self.now))
        if self.pace:
            for number in range(self.tasks):
                self.at(number / self.pace, lambda number=number: self._add(number))  # type: ignore[misc]
        self._feed()
        while self.delivered < self.tasks:
            tick = self.dispatcher.next_event(self.now)
            if tick is not None and (not self._events or tick < self._events[0][0]):
                self.now = tick
                self._apply(self.dispatcher.tick(self.now))
            elif self._events:
                self.now, _, event = heapq.heappop(self._events)
                self._apply(event())
            else:
                raise AssertionError(f"stuck at {self.now:.3f} s with {self.delivered} of {self.tasks} delivered")
            assert self.now < until_s, f"{self.delivered} of {self.tasks} delivered after {until_s} s"
            self._feed()
            self._apply(self.dispatcher.set_awaited(self.delivered, self.now))

    def _feed(self) -> None:
        while self.delivered in self.answers or self.delivered in self.given_up:
            self.delivered += 1
        if self.pace:
            return
        depth = self.depth or max(8, 4 * self.dispatcher.capacity)
        while len(self._added) < self.tasks and len(self._added) - self.delivered < depth:
            self._apply(self._add(len(self._added)))

    def _add(self, number: int) -> list[Action]:
        self._added[number] = self.now
        return self.dispatcher.add_task(number, self.now)

    def _apply(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Send):
                teacher = self.teachers[action.teacher]
                self.sends.append(action)
                teacher.sent.append(action.task)
                self._on_way[action.attempt] = action.teacher
                self.at(teacher.reply_at(self.now), lambda a=action: self._reply(a))
            elif isinstance(action, Deliver):
                assert action.task not in self.answers, "delivered twice"
                self.answers[action.task] = action.teacher
                self.latency[action.task] = self.now - self._added[action.task]
                self.teachers[action.teacher].served += 1
            else:
                self.given_up[action.task] = action

    def _reply(self, send: Send) -> list[Action]:
        if self._on_way.pop(send.attempt, None) is None:
            return []
        return self.dispatcher.attempt_answered(send.attempt, self.now)


def stragglers(share: float, factor: float, seed: int) -> Callable[[], float]:
    rng = random.Random(seed)
    return lambda: factor if rng.random() < share else 1.0


def sends(actions: list[object]) -> list[Send]:
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
