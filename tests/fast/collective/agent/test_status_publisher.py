"""What an agent leaves in the store while the store does not always answer."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import pytest

from edl.collective.agent import status_publisher
from edl.collective.agent.status_publisher import StatusPublisher
from edl.collective.agent.workers.worker_group import WorkerGroup
from edl.collective.goodput.node import AgentState, Ledger, NodeRecord
from edl.collective.goodput.records import LedgerWriter, read_job
from edl.collective.worker_status import WorkerStatus
from edl.discovery.sqlite.store import SqliteStore
from edl.discovery.store import Entry
from edl.errors import DiscoveryError
from tests.waiting import wait_until


class _Refusing(SqliteStore):
    """Lists nothing the first times that it is asked."""

    refusals = 2

    def list(self, prefix: str) -> list[Entry]:
        if self.refusals:
            self.refusals -= 1
            raise DiscoveryError("no leader")
        return super().list(prefix)


@dataclass
class _CameLate:
    """What a publisher reads of a worker group, whose workers are of a generation that is new to this node."""

    generation: int = 5
    workers: dict[int, WorkerStatus] = field(default_factory=dict)

    def read_statuses(self) -> dict[int, WorkerStatus]:
        return self.workers


def test_unanswered_question_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A question without an answer is asked again."""
    monkeypatch.setattr(status_publisher, "_WRITE_EVERY_S", 0.01)
    with _Refusing(str(tmp_path / "discovery.sqlite")) as store:
        before = NodeRecord("before", 1, 1, generation=3, step=7)
        LedgerWriter(store, "job", Ledger("before", 1, 0.0, 1.0)).write_record(before)
        publisher = StatusPublisher(store, "job", "late", 1)
        publisher.follow_workers(cast(WorkerGroup, _CameLate()))

        def known() -> list[int]:
            publisher.charge_time(AgentState.RUNNING)
            return [] if store.refusals else [one.reached for one in read_job(store, "job").nodes if one.reached >= 0]

        wait_until(lambda: known() == [7], "steps that were finished before are charged as new ones")
        publisher.close()
