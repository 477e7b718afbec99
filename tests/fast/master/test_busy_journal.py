"""A journal's file that another process holds for a while: a master that stands still in the middle of a commit."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable
from pathlib import Path

from edl.master import MasterClient, MasterServer, ShardReader
from tests.fast.master.processes import until

Lead = Callable[..., MasterServer]


def test_busy_journal_is_waited_for(
    lead: Lead, create: Callable[..., None], client: MasterClient, tmp_path: Path
) -> None:
    """The master stands by, and workers wait, until the file is free; nothing is done twice."""
    master = lead()
    create(100)
    with ShardReader(client, "d") as reader:
        iterator = iter(reader)
        shards = [next(iterator)]
        with contextlib.closing(sqlite3.connect(tmp_path / "journal.sqlite", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            reader.report_done(shards[0], wait=False)
            until(lambda: not master.is_leader or master.failure)
            assert master.failure is None, "it stands by"
        assert master.wait_leading(30), master.failure
        shards += iterator
    assert sorted(shard.start for shard in shards) == list(range(0, 100, 10))
    assert client.status()["datasets"][0]["units_done"] == 100
