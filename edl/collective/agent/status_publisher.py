"""What an agent leaves in the Store for `edl status` and `edl report`: where its time went, and what happened."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from edl.collective.agent.health.step_times import share_step_times
from edl.collective.agent.health.stragglers import StragglerDetector
from edl.collective.agent.worker_group import WorkerGroup
from edl.collective.goodput.node import AgentState, Ledger, NodeRecord
from edl.collective.goodput.records import LedgerWriter, last_step_before
from edl.discovery.store import Store
from edl.errors import ClosedError, DiscoveryError

__all__ = ["StatusPublisher"]

_WRITE_EVERY_S = 1.0
_ASK_S = 3.0
"""So long at most nothing is charged, while it is asked which steps were finished before. It is asked on after that."""


class StatusPublisher:
    """Keeps one agent's ledger up to date. Its methods are for the agent's thread, and never wait for the store.

    What cannot be written now, because the store does not answer, is in what is written next.
    """

    def __init__(self, store: Store, job: str, node: str, workers: int, say: Callable[[str], None]) -> None:
        self._store, self._job, self._node, self._say = store, job, node, say
        self._times: tuple[int, dict[int, float], bool] | None = None
        self._stragglers = StragglerDetector()
        self._compared = -1
        self._ledger = Ledger(node, workers, time.monotonic(), time.time())
        self._writer = LedgerWriter(store, job, self._ledger)
        self._agent_state = AgentState.RENDEZVOUS
        self._handed_at = 0.0
        self._replicated_us = 0
        self._generation = -1
        self._highest = -1
        self._asking: int | None = None
        self._asked_at = 0.0
        self._in_vain = False
        self._waiting = threading.Condition()
        self._record: NodeRecord | None = None
        self._events: list[tuple[str, str, int]] = []
        self._closing = False
        self._thread = threading.Thread(target=self._write, name="edl-status", daemon=True)
        self._thread.start()

    def observe(self, agent_state: AgentState, worker_group: WorkerGroup, replicated_us: int = 0) -> None:
        """Charge the time until now. Call it often; the store is written about once a second.

        Args:
            replicated_us: wall clock of the newest state of which another node has a replica, 0 for none.
        """
        self._replicated_us = replicated_us
        now = time.monotonic()
        self._ask(worker_group.generation, now)
        waits = self._asking is not None and now - self._asked_at < _ASK_S
        due = not waits and now - self._handed_at >= _WRITE_EVERY_S
        if not due and agent_state is self._agent_state:
            return
        self._agent_state = agent_state
        self._ledger.observe(now, agent_state, list(worker_group.read_statuses().values()), self._highest)
        if due:
            self._handed_at = now
            self._hand_over()

    def record_event(self, kind: str, text: str, generation: int = -1) -> None:
        """Put an event; kinds are those of `ledger_codec.Event`."""
        with self._waiting:
            self._events.append((kind, text, generation))
            self._waiting.notify()

    def share_step_times(self, generation: int, own_s: dict[int, float], leads: bool) -> None:
        """Put what this node's ranks took for a step; who leads compares all nodes' and names who is slow."""
        with self._waiting:
            self._times = (generation, own_s, leads)
            self._waiting.notify()

    def close(self, worker_group: WorkerGroup | None, *, timeout_s: float = 5.0) -> None:
        """Write what is left, with the last state of these workers; None if the node had none.

        What cannot be written within `timeout_s` is not.
        """
        if worker_group is not None:
            now = time.monotonic()
            self._ledger.observe(now, self._agent_state, list(worker_group.read_statuses().values()), self._highest)
            self._ledger.end(now)
            self._hand_over()
        with self._waiting:
            self._closing = True
            self._waiting.notify()
        self._thread.join(timeout_s)

    def _ask(self, generation: int, now: float) -> None:
        """In a generation new to this node, find out which steps are no news.

        Workers that were in the one before know that themselves: all ranks finish the same steps.
        """
        before, self._generation = self._generation, generation
        if generation in (before, before + 1):
            return
        with self._waiting:
            self._asking, self._asked_at, self._in_vain = generation, now, False
            self._waiting.notify()

    def _hand_over(self) -> None:
        record = replace(self._ledger.record(), replicated_us=self._replicated_us)
        with self._waiting:
            self._record = record
            self._waiting.notify()

    def _write(self) -> None:
        while True:
            with self._waiting:
                again_s = _WRITE_EVERY_S if self._in_vain else None
                self._waiting.wait_for(lambda: self._closing or not self._nothing_to_do, again_s)
                if self._closing and self._nothing_to_do:
                    return
                asking = self._asking
                record, self._record = self._record, None
                times, self._times = self._times, None
                events, self._events = self._events, []
            if asking is not None:
                self._find_out(asking)
            for event in events:
                with contextlib.suppress(DiscoveryError, ClosedError):
                    self._writer.record_event(*event)
            if record is not None:
                with contextlib.suppress(DiscoveryError, ClosedError):
                    self._writer.write_record(record)
            if times is not None:
                with contextlib.suppress(DiscoveryError, ClosedError):
                    self._compare(*times)

    def _find_out(self, asking: int) -> None:
        """Which steps were finished before a generation. Without an answer the question stays."""
        answered = False
        with contextlib.suppress(DiscoveryError, ClosedError):
            self._highest = last_step_before(self._store, self._job, asking)
            answered = True
        with self._waiting:
            if self._asking == asking:
                self._asking, self._in_vain = None if answered else asking, not answered

    @property
    def _nothing_to_do(self) -> bool:
        asks = self._asking is not None and not self._in_vain
        return self._record is None and not self._events and self._times is None and not asks

    def _compare(self, generation: int, own_s: dict[int, float], leads: bool) -> None:
        if generation != self._compared:
            self._compared, self._stragglers = generation, StragglerDetector()
        stragglers = self._stragglers if leads else None
        for change in share_step_times(self._store, self._job, self._node, generation, own_s, stragglers):
            self._say(str(change))
            self._writer.record_event("straggler", str(change), generation)
