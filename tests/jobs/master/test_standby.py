"""Masters that stand by: the leader is stopped and comes back, or is killed."""

from __future__ import annotations

import os
import signal
import sqlite3
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from edl.discovery import open_store
from edl.master.reports import read_report
from tests.fast.master.conftest import Create
from tests.jobs.master import processes
from tests.jobs.master.ledgers import counted, read_ledgers
from tests.jobs.master.processes import running, work
from tests.waiting import DEADLINE_S, wait_until


@pytest.mark.timeout(300)
@pytest.mark.parametrize("journal", [None, "store:"])
def test_standby_takes_over(tmp_path: Path, url: str, create: Create, journal: str | None) -> None:
    """The leader is stopped for longer than its lease, another leads and is killed, and the first one leads again."""
    folder = str(tmp_path)
    with running(processes.lead, folder, journal) as first, open_store(url) as store:
        create(2000, shard_size=10, max_failures=100)
        with running(processes.lead, folder, journal) as second, running(work, folder, "w", "d", 0.01) as worker:
            wait_until(lambda: done_units(store) > 100, "some shards")
            term, leader = find_leader(store)
            try:
                stop_between_writes(leader, [*tmp_path.glob("journal.sqlite"), tmp_path / "discovery.sqlite"])
                wait_until(lambda: find_leader(store)[0] > term, "another leader")
            finally:
                os.kill(leader, signal.SIGCONT)
            wait_until(lambda: done_units(store) > 400, "more shards")
            term, killed = find_leader(store)
            os.kill(killed, signal.SIGKILL)
            wait_until(lambda: find_leader(store)[0] > term, "the other leader again")
            worker.join(DEADLINE_S)
            assert worker.exitcode == 0
            for master in (first, second):
                master.join(DEADLINE_S)
                assert master.exitcode == (-signal.SIGKILL if master.pid == killed else 0)
    counts = counted(read_ledgers(tmp_path))
    assert set(counts.values()) == {1}
    assert len(counts) == 2000


def find_leader(store: Any) -> tuple[int, int]:
    """Return the term and the process of the master that leads: on a busy machine it may be the second one."""
    report = read_report(store, "job") or {}
    return report.get("term", 0), report.get("pid", 0)


def done_units(store: Any) -> int:
    report = read_report(store, "job")
    return 0 if report is None or not report["datasets"] else int(report["datasets"][0]["units_done"])


def stop_between_writes(pid: int, files: list[Path]) -> None:
    """Stop a process: in the middle of a write it would hold a file's lock, and nobody else could write."""
    with ExitStack() as stack:
        for file in files:
            locking = stack.enter_context(closing(sqlite3.connect(file, timeout=60, isolation_level=None)))
            locking.execute("BEGIN IMMEDIATE")
        os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: all(is_stopped(thread) for thread in Path(f"/proc/{pid}/task").iterdir()), "a stop")


def is_stopped(thread: Path) -> bool:
    return (thread / "stat").read_text().rpartition(")")[2].split()[0] == "T"
