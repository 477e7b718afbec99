"""Three `edl label --job` processes, killed at any moment, the one that leads as well, and others started."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

import numpy as np
import pytest

from edl.distill.cache import load_labels
from tests.jobs.label_job.processes import Run, Worker, until

pytestmark = pytest.mark.timeout(300)  # on a busy machine a worker takes half a minute to begin

ROWS = 20_000
SHARD = 256


@pytest.mark.slow
def test_each_row_is_labelled_once(make_run: Callable[..., Run]) -> None:
    """Each id has a label, the model's; rows are asked for again only where their worker was killed before it wrote."""
    run = make_run(ROWS, teachers=2, row_s=0.0006)
    begun = time.monotonic()
    # A worker that lives is not silent for so long, and the book of a killed one's shards is read before it expires.
    more = ("--worker-timeout", "8", "--shard", str(SHARD), "--batch", "64")
    workers = [run.start(*more, output=output) for output in ("here", "here", "there")]
    lost_rows = 0
    for share, output in ((0.1, "here"), (0.3, "there"), (0.5, "here")):
        until(lambda share=share: run.done() > share * ROWS, 60, workers[-1].err)  # type: ignore[misc]
        leads = run.report()["pid"]
        victim = next(worker for worker in workers if (worker.pid == leads) == (share != 0.3))
        victim.kill()
        workers.remove(victim)
        lost_rows += SHARD * _leases_of_killed(run, victim)
        workers.append(run.start(*more, output=output))
    assert [worker.wait(90) for worker in workers] == [0, 0, 0]
    took_s = time.monotonic() - begun

    labels = load_labels([run.folder / "here", run.folder / "there"])
    assert labels.ids == tuple(range(ROWS))
    x = np.arange(1, ROWS + 1, dtype=np.float32)
    np.testing.assert_array_equal(labels.rows(range(ROWS))["y"], np.stack([x * 2, x + 1], axis=1))
    asked = run.asked.rows()
    assert sorted(asked) == list(range(1, ROWS + 1))
    assert lost_rows > 0
    assert asked.total() <= ROWS + lost_rows, f"{asked.total() - ROWS} rows again, {lost_rows} were lost with workers"
    shown = [re.search(r"^[\d,]+ of 20,000 rows, .*\d workers?, ", worker.err, re.MULTILINE) for worker in workers]
    assert any(shown), f"progress of the whole in {[worker.err for worker in workers]}"  # who comes late sees none
    for worker in workers:
        assert "job numbers: 20,000 of 20,000 rows have a label" in worker.out
        assert f"load_labels(['{run.folder}/here', '{run.folder}/there'])" in worker.out
    print(f"{took_s:.1f} s, {asked.total() - ROWS} rows asked again, at most {lost_rows}")

    again = run.start(*more, output="here")
    assert again.wait(90) == 0
    assert "job numbers is done already, and no teacher was asked" in again.out
    assert run.asked.rows() == asked


def _leases_of_killed(run: Run, worker: Worker) -> int:
    """How many shards the book has with a worker that is dead: a master reports once a second, until they expire."""
    pid = run.report()["pid"]
    if pid == worker.pid:  # another is to lead first
        until(lambda: run.report()["pid"] != worker.pid, 60)
    reported = run.report()["time"]
    until(lambda: run.report()["time"] > reported, 60)
    return run.leases_of(worker)
