"""What an agent leaves in the Store for `edl status` and `edl report`: where its time went, and what happened."""

from __future__ import annotations

import contextlib
import time

from edl.collective.crew import Crew
from edl.collective.ledger_node import Doing, Ledger
from edl.collective.ledger_store import LedgerWriter
from edl.discovery.store import Store
from edl.errors import DiscoveryError

__all__ = ["Chronicle"]

_WRITE_EVERY_S = 1.0


class Chronicle:
    """Keeps one agent's ledger up to date. Used from the agent's thread only.

    What cannot be written now, because the store does not answer, is in what is written next.
    """

    def __init__(self, store: Store, job: str, node: str, workers: int) -> None:
        self._ledger = Ledger(node, workers, time.monotonic(), time.time())
        self._writer = LedgerWriter(store, job, self._ledger)
        self._doing = Doing.RENDEZVOUS
        self._written_at = 0.0

    def observe(self, doing: Doing, crew: Crew, write: bool = True) -> None:
        """Charge the time until now. Call it often; the store is written about once a second.

        Args:
            write: whether the store is believed to answer.
        """
        now = time.monotonic()
        due = now - self._written_at >= _WRITE_EVERY_S
        if not due and doing is self._doing:
            return
        self._doing = doing
        self._ledger.observe(now, doing, list(crew.readings().values()))
        if due and write:
            self._written_at = now
            with contextlib.suppress(DiscoveryError):
                self._writer.write()

    def tell(self, kind: str, text: str, generation: int = -1) -> None:
        """Put an event; kinds are those of `ledger_codec.Event`."""
        with contextlib.suppress(DiscoveryError):
            self._writer.tell(kind, text, generation)

    def close(self, crew: Crew) -> None:
        """This node's part is over."""
        now = time.monotonic()
        self._ledger.observe(now, self._doing, list(crew.readings().values()))
        self._ledger.end(now)
        with contextlib.suppress(DiscoveryError):
            self._writer.write()
