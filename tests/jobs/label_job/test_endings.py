"""Workers that end in other ways than by being killed: stopped, with a full disk, with a store that is away."""

from __future__ import annotations

import contextlib
import re
import signal
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from edl.distill.cache import load_labels
from tests.jobs.label_job.processes import Run, until
from tests.plugins_consul import free_ports

pytestmark = pytest.mark.timeout(300)  # on a busy machine a worker takes half a minute to begin

FULL = """
import errno, os, sys, types
from edl.distill.cache import folder

def write(fd, data):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

folder.os = types.SimpleNamespace(**{**vars(os), "write": write})
"""


def check(run: Run, *folders: str) -> None:
    labels = load_labels([run.folder / folder for folder in folders])
    assert labels.ids == tuple(range(run.rows))
    x = np.arange(1, run.rows + 1, dtype=np.float32)
    np.testing.assert_array_equal(labels.rows(range(run.rows))["y"], np.stack([x * 2, x + 1], axis=1))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_stopped_worker_gives_back_at_once(make_run: Callable[..., Run], number: int, code: int) -> None:
    """Its shards are others' at once, and not after a minute's silence; what was answered is on disk."""
    run = make_run(3000, row_s=0.01)  # 30 s: neither is done when the other begins, or when one is stopped
    more = ("--worker-timeout", "60", "--shard", "50")
    stopped, other = run.start(*more), run.start(*more)
    until(lambda: run.done() >= 300 and run.leases_of(stopped) and run.leases_of(other), 60, stopped.err + other.err)
    leads = run.report()["pid"]
    stopped.send(number)
    assert stopped.wait(50) == code, stopped.err
    run.asked.hurry()
    assert "Traceback" not in stopped.err
    assert other.wait(50) == 0, other.err  # it would wait for a minute
    check(run, "labels")
    asked = run.asked.rows()
    assert asked.total() <= 3000 + 500, f"{asked.total()} rows, pid {leads} led, {stopped.pid} was stopped"


def test_full_disk_costs_the_others_nothing(make_run: Callable[..., Run]) -> None:
    """The worker ends with the disk's words, and its shards go to the other, with no failure counted."""
    run = make_run(600, row_s=0.001)
    (run.folder / "sitecustomize.py").write_text(FULL)
    broken = run.start("--shard", "30", output="full", env={"PYTHONPATH": str(run.folder)})
    until(lambda: run.labels() or broken.process.poll() is not None, 90, broken.err)
    other = run.start("--shard", "30")
    assert broken.wait(90) == 1
    assert re.search(r"^edl label: .*full.*No space left on device", broken.err, re.MULTILINE), broken.err
    assert other.wait(90) == 0, other.err
    check(run, "labels")


@pytest.mark.slow
def test_store_that_is_away_for_seconds(make_run: Callable[..., Run]) -> None:
    """Workers wait for it, and go on; what was done stays done."""
    run = make_run(1500, row_s=0.002)
    more = ("--shard", "50", "--worker-timeout", "5")
    workers = [run.start(*more), run.start(*more)]
    until(lambda: run.done() >= 200, 60, workers[0].err)
    with contextlib.closing(sqlite3.connect(run.folder / "store.sqlite", isolation_level=None)) as lock:
        lock.execute("BEGIN EXCLUSIVE")
        time.sleep(8)  # longer than a call of the store waits
        lock.execute("ROLLBACK")
    assert [worker.wait(90) for worker in workers] == [0, 0], workers[0].err + workers[1].err
    check(run, "labels")


def test_poisoned_rows_are_listed(make_run: Callable[..., Run]) -> None:
    """A row that no teacher takes costs its shard only; with a teacher that takes it the job ends well."""
    run = make_run(400, bad=[77], port=free_ports(1)[0])
    worker = run.start("--shard", "40")
    assert worker.wait(90) == 3, worker.err
    assert "1 shard given up, with rows that no teacher labels" in worker.err
    assert re.search(r"rows 40 to 79, 3 failures, the last by .*: sample 76: .*this row is bad", worker.err), worker.err
    assert "399 of" not in worker.out  # what counts is shards
    assert "job numbers: 360 of 400 rows have a label" in worker.out
    assert set(range(400)) - set(load_labels(run.folder / "labels").ids) == {76}, "but the others of it are there too"
    again = run.start()
    assert again.wait(90) == 3, again.err
    assert "sample 76" in again.err
    (teacher,) = run.teachers
    path = Path(next(run.folder.glob("model_*.py")))
    path.write_text(path.read_text().replace("BAD = [77]", "BAD = []"))
    port = teacher.port
    teacher.close()
    run.restart_teacher(path, port)
    retried = run.start("--retry-poisoned")
    assert retried.wait(90) == 0, retried.err
    assert "1 shard that had been given up is tried again" in retried.out
    check(run, "labels")
    assert run.asked.rows()[78] == 1, "no row but the bad one is asked for again"


@pytest.mark.slow
def test_bad_rows_among_several_workers(make_run: Callable[..., Run]) -> None:
    """No worker takes the few bad rows that are left for a mistake of its own, or waits minutes for each of them."""
    bad = [4, 699, 700, 1499, 1998]
    run = make_run(2000, row_s=0.0005, bad=[row + 1 for row in bad])
    workers = [run.start("--shard", "50") for _ in range(3)]
    assert [worker.wait(90) for worker in workers] == [3, 3, 3], workers[0].err
    assert sorted(set(range(2000)) - set(load_labels(run.folder / "labels").ids)) == bad
    for worker in workers:
        assert "5 shards given up" in worker.err
        assert "rows 650 to 699, 3 failures" in worker.err
        assert "rows 700 to 749, 3 failures" in worker.err
