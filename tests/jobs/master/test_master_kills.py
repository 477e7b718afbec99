"""The master is killed at random moments, and workers are: every sample is counted exactly once."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import pytest

from edl.datasets import ShardSettings, open_dataset
from edl.discovery import Store, open_store
from edl.master.naming import election_key
from edl.master.reports import read_report
from tests.jobs.master.ledgers import counted, read_ledgers
from tests.jobs.master.processes import lead, start, work
from tests.waiting import wait_until

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
    assert report is not None
    assert report["state"] == "done"
    assert report["datasets"][0]["units_done"] == SAMPLES
    counts = counted(read_ledgers(tmp_path))
    assert len(counts) == SAMPLES
    assert set(counts.values()) == {1}
