"""A journal in memory whose commits wait for the test."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from edl.master.journal import Journal


class GatedJournal(Journal):
    """Appends when the test lets it."""

    def __init__(self) -> None:
        self.groups: list[list[bytes]] = []
        self.snapshots: list[bytes] = []
        self.gate = threading.Semaphore(0)
        self.failure: Exception | None = None

    @property
    def snapshot_due(self) -> bool:
        return len(self.groups) >= 5 and not self.snapshots

    def load(self) -> tuple[bytes | None, list[bytes]]:
        return None, []

    def begin_term(self) -> int:
        return 1

    def append(self, records: Sequence[bytes]) -> None:
        assert self.gate.acquire(timeout=20)
        if self.failure is not None:
            raise self.failure
        self.groups.append(list(records))

    def snapshot(self, state: bytes) -> None:
        self.snapshots.append(state)

    def close(self) -> None:
        pass
