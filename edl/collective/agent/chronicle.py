"""What an agent leaves in the Store for `edl status` and `edl report`: where its time went, and what happened."""

from __future__ import annotations

import contextlib
import threading
import time

from edl.collective.agent.crew import Crew
from edl.collective.ledger.node import Doing, Ledger, NodeRecord
from edl.collective.ledger.records import LedgerWriter
from edl.discovery.store import Store
from edl.errors import ClosedError, DiscoveryError

__all__ = ["Chronicle"]

_WRITE_EVERY_S = 1.0


class Chronicle:
    """Keeps one agent's ledger up to date. Its methods are for the agent's thread, and never wait for the store.

    What cannot be written now, because the store does not answer, is in what is written next.
    """

    def __init__(self, store: Store, job: str, node: str, workers: int) -> None:
        self._ledger = Ledger(node, workers, time.monotonic(), time.time())
        self._writer = LedgerWriter(store, job, self._ledger)
        self._doing = Doing.RENDEZVOUS
        self._handed_at = 0.0
        self._waiting = threading.Condition()
        self._record: NodeRecord | None = None
        self._events: list[tuple[str, str, int]] = []
        self._closing = False
        self._thread = threading.Thread(target=self._write, name="edl-chronicle", daemon=True)
        self._thread.start()

    def observe(self, doing: Doing, crew: Crew) -> None:
        """Charge the time until now. Call it often; the store is written about once a second."""
        now = time.monotonic()
        due = now - self._handed_at >= _WRITE_EVERY_S
        if not due and doing is self._doing:
            return
        self._doing = doing
        self._ledger.observe(now, doing, list(crew.readings().values()))
        if due:
            self._handed_at = now
            self._hand_over()

    def tell(self, kind: str, text: str, generation: int = -1) -> None:
        """Put an event; kinds are those of `ledger_codec.Event`."""
        with self._waiting:
            self._events.append((kind, text, generation))
            self._waiting.notify()

    def close(self, crew: Crew, *, took_part: bool = True, timeout_s: float = 5.0) -> None:
        """This node's part is over, if it had one. What is not written within `timeout_s` is not."""
        if took_part:
            now = time.monotonic()
            self._ledger.observe(now, self._doing, list(crew.readings().values()))
            self._ledger.end(now)
            self._hand_over()
        with self._waiting:
            self._closing = True
            self._waiting.notify()
        self._thread.join(timeout_s)

    def _hand_over(self) -> None:
        record = self._ledger.record()
        with self._waiting:
            self._record = record
            self._waiting.notify()

    def _write(self) -> None:
        while True:
            with self._waiting:
                while self._record is None and not self._events and not self._closing:
                    self._waiting.wait()
                record, self._record = self._record, None
                events, self._events = self._events, []
                if record is None and not events:
                    return
            for event in events:
                with contextlib.suppress(DiscoveryError, ClosedError):
                    self._writer.tell(*event)
            if record is not None:
                with contextlib.suppress(DiscoveryError, ClosedError):
                    self._writer.write(record)
