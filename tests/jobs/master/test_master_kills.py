"""Masters are killed, or stopped and come back, and workers are killed: every sample is counted exactly once."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import threading
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from edl.datasets import ShardSettings, open_dataset
from edl.discovery import Store, open_store
from edl.master.naming import election_key, read_report
from tests.fast.master.conftest import Create
from tests.jobs.master.processes import counted, lead, read_ledgers, running, start, work
from tests.waiting import DEADLINE_S, wait_until

SAMPLES = 20_000
KILLS = 10
FEWEST = 4
"""Of a machine that is done before."""
WORKERS = 8
PAUSE_S = 0.02


def _next_leader(store: Store, version: int) -> int:
    """Wait until another master leads than that of this version; return the new one's."""

    def leads() -> int:
        entry = store.get(election_key("job"))
        return entry.version if entry is not None and entry.version > version else 0

    return wait_until(leads, "another master leads")


@pytest.mark.timeout(400)
@pytest.mark.parametrize("journal", [None, "store:"])
def test_every_sample_once_over_kills(tmp_path: Path, journal: str | None) -> None:
    settings = ShardSettings(shard_size=20, shuffle=True, seed=3, max_failures=1000, session_s=3.0)
    spec = {"d": open_dataset(f"range:{SAMPLES}", settings).spec.SerializeToString()}
    folder, chance = str(tmp_path), random.Random(7)
    master = start(lead, folder, journal, spec)
    workers = {f"w{number}": start(work, folder, f"w{number}", "d", PAUSE_S) for number in range(WORKERS)}
    kills = killed = 0
    try:
        with open_store(f"sqlite:///{tmp_path}/discovery.sqlite") as store:
            led = 0
            while kills < KILLS:
                led = _next_leader(store, led)
                threading.Event().wait(chance.uniform(0.0, 0.5))
                if master.exitcode is not None:
                    break  # all is done
                master.kill()
                master.join(60)
                master = start(lead, folder, journal, spec)
                kills += 1
                if kills % 3 == 0:
                    name = chance.choice(sorted(workers))
                    workers.pop(name).kill()
                    workers[f"{name}x"] = start(work, folder, f"{name}x", "d", PAUSE_S)
                    killed += 1
            master.join(200)
            assert master.exitcode == 0
            report = read_report(store, "job")
        for process in workers.values():
            process.join(120)
            assert process.exitcode == 0
    finally:
        for process in (master, *workers.values()):
            process.kill()
            process.join(10)
    assert kills >= FEWEST
    assert killed == kills // 3
    assert report["state"] == "done"
    assert report["datasets"][0]["units_done"] == SAMPLES
    counts = counted(read_ledgers(tmp_path))
    assert len(counts) == SAMPLES
    assert set(counts.values()) == {1}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("journal", [None, "store:"])
def test_standby_takes_over(tmp_path: Path, url: str, create: Create, journal: str | None) -> None:
    """The leader is stopped for longer than its lease, another leads and is killed, and the first one leads again."""
    folder = str(tmp_path)
    with running(lead, folder, journal) as first, open_store(url) as store:
        create(2000, shard_size=10, max_failures=100)
        with running(lead, folder, journal) as second, running(work, folder, "w", "d", 0.01) as worker:
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
