"""Publishes in the Store, for `edl status` and `edl report`, where an agent's time went and what happened."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from dataclasses import replace

from edl.collective.agent.worker_group import WorkerGroup
from edl.collective.goodput.ledger import AgentState, Ledger, NodeRecord
from edl.collective.goodput.summary import LedgerWriter, last_step_before
from edl.discovery.store import Store
from edl.errors import ClosedError, DiscoveryError

__all__ = ["StatusPublisher"]

logger = logging.getLogger(__name__)

_WRITE_EVERY_S = 1.0  # `edl status --watch` shows each second; more often would load a store of hundreds of nodes
_QUERY_S = 3.0
"""How long charging may wait for the store to say which steps were finished before.

An election of its leader may delay the answer. After that the query continues, and until it is answered such steps
count as new.
"""


class StatusPublisher:
    """Keeps an agent's ledger up to date. Its methods are for the agent's thread, and only `close` waits for the store.

    A write that fails because the store does not answer is included in the next one.
    """

    def __init__(self, store: Store, job: str, node: str, workers: int) -> None:
        self._store = store
        self._job = job
        self._node = node
        self._worker_group: WorkerGroup | None = None
        self._ledger = Ledger(node, workers, time.monotonic(), time.time())
        self._writer = LedgerWriter(store, job, self._ledger)
        self._agent_state = AgentState.RENDEZVOUS
        self._handed_at = 0.0
        self._replicated_us = 0
        self._generation = -1
        self._finished_before = -1
        self._queried_generation: int | None = None
        self._queried_at = 0.0
        self._query_failed = False
        self._changed = threading.Condition()
        self._record: NodeRecord | None = None
        self._events: list[tuple[str, str, int]] = []
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="edl-status", daemon=True)
        self._thread.start()

    def follow_workers(self, worker_group: WorkerGroup) -> None:
        """Charge time by these workers' status pages from now on. Without workers, `close` writes no record."""
        self._worker_group = worker_group

    def charge_time(self, agent_state: AgentState, replicated_us: int = 0) -> None:
        """Charge the time until now. Call it often; the store is written about once a second.

        Args:
            agent_state: What the agent did until now, where the workers' status pages do not say more.
            replicated_us: Wall clock, in microseconds since 1970, of the newest state that another node has a replica
                of; 0 for none.
        """
        assert self._worker_group is not None, "follow_workers is called first"
        self._replicated_us = replicated_us
        now = time.monotonic()
        self._query_new_generation(self._worker_group.generation, now)
        waits = self._queried_generation is not None and now - self._queried_at < _QUERY_S
        due = not waits and now - self._handed_at >= _WRITE_EVERY_S
        if not due and agent_state is self._agent_state:
            return
        self._agent_state = agent_state
        self._observe_workers(self._worker_group, now)
        if due:
            self._handed_at = now
            self._hand_over_record()

    def record_event(self, kind: str, text: str, generation: int = -1) -> None:
        """Publish an event.

        Args:
            kind: One of the kinds of `edl.collective.goodput.ledger.Event`.
            text: What happened, in one line.
            generation: Generation that it belongs to; -1 for none.
        """
        with self._changed:
            self._events.append((kind, text, generation))
            self._changed.notify()

    def close(self, *, timeout_s: float = 5.0) -> None:
        """Write what is left, with the workers' last status, for at most `timeout_s` seconds."""
        if self._worker_group is not None:
            now = time.monotonic()
            self._observe_workers(self._worker_group, now)
            self._ledger.end(now)
            self._hand_over_record()
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(timeout_s)

    def _observe_workers(self, worker_group: WorkerGroup, now: float) -> None:
        statuses = list(worker_group.read_statuses().values())
        self._ledger.observe(now, self._agent_state, statuses, self._finished_before)

    def _query_new_generation(self, generation: int, now: float) -> None:
        """When this node enters a generation without the one before, find out which steps were finished before it.

        Workers that were in the previous generation know that themselves, since all ranks finish the same steps.
        """
        before = self._generation
        self._generation = generation
        if generation in (before, before + 1):
            return
        with self._changed:
            self._queried_generation = generation
            self._queried_at = now
            self._query_failed = False
            self._changed.notify()

    def _hand_over_record(self) -> None:
        record = replace(self._ledger.record(), replicated_us=self._replicated_us)
        with self._changed:
            self._record = record
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                again_s = _WRITE_EVERY_S if self._query_failed else None
                self._changed.wait_for(lambda: self._closing or self._has_work, again_s)
                if self._closing and not self._has_work:
                    return
                queried = self._queried_generation
                record, self._record = self._record, None
                events, self._events = self._events, []
            if queried is not None:
                self._query_finished_steps(queried)
            for event in events:
                with contextlib.suppress(DiscoveryError, ClosedError):
                    self._writer.record_event(*event)
            if record is not None:
                with contextlib.suppress(DiscoveryError, ClosedError):
                    self._writer.write_record(record)

    def _query_finished_steps(self, generation: int) -> None:
        """Ask the store which steps were finished before a generation; without an answer, the next round asks again."""
        answered = False
        with contextlib.suppress(DiscoveryError, ClosedError):
            self._finished_before = last_step_before(self._store, self._job, generation)
            answered = True
        with self._changed:
            if self._queried_generation == generation:
                self._queried_generation = None if answered else generation
                self._query_failed = not answered

    @property
    def _has_work(self) -> bool:
        queries = self._queried_generation is not None and not self._query_failed
        return bool(self._record is not None or self._events or queries)
