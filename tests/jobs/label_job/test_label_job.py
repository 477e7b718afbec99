"""`edl label --job`: workers that share a job, are killed or stopped, or differ in what they are told."""

from __future__ import annotations

import re
import shutil
import signal
import sqlite3
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edl.cli import label, label_job, main
from edl.discovery import open_store
from edl.distill.cache import SoftLabelCache, load_labels
from edl.errors import SettingsError
from tests.jobs.label_job.processes import Run, Worker, counting_teacher, write_data
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(300)  # on a busy machine a worker takes half a minute to begin

ROWS, SHARD = 6000, 128


@pytest.fixture
def make_run(stack: ExitStack, tmp_path: Path) -> Callable[..., Run]:
    def make(rows: int, *, teachers: int = 1, **model: Any) -> Run:
        served = [counting_teacher(tmp_path, **model) for _ in range(teachers)]
        return stack.enter_context(closing(Run(tmp_path, served, rows)))

    return make


def check(run: Run, *folders: str) -> None:
    labels = load_labels([run.folder / folder for folder in folders])
    assert labels.ids == tuple(range(run.rows))
    x = np.arange(1, run.rows + 1, dtype=np.float32)
    np.testing.assert_array_equal(labels.rows(range(run.rows))["y"], np.stack([x * 2, x + 1], axis=1))


def test_killed_workers_cost_their_shards(make_run: Callable[..., Run]) -> None:
    """Each id has a label, the model's; rows are asked for again only where their worker was killed before it wrote."""
    run = make_run(ROWS, teachers=2, row_s=0.001)
    # A worker that lives is not silent for so long, and the book of a killed one's shards is read before it expires.
    more = ("--worker-timeout", "8", "--shard", str(SHARD), "--batch", "64")
    workers = [run.start(*more, output=output) for output in ("here", "here", "there")]
    lost_rows = 0
    for share, output in ((0.1, "here"), (0.4, "there")):  # the one that leads first
        wait_until(lambda share=share: run.done() > share * ROWS, "shards")  # type: ignore[misc]
        leads = run.report()["pid"]
        victim = next(worker for worker in workers if (worker.pid == leads) == (share == 0.1))
        victim.kill()
        workers.remove(victim)
        lost_rows += SHARD * _leases_of_killed(run, victim)
        workers.append(run.start(*more, output=output))
    assert [worker.wait() for worker in workers] == [0, 0, 0]
    check(run, "here", "there")
    asked = run.asked.rows()
    assert sorted(asked) == list(range(1, ROWS + 1))
    assert asked.total() <= ROWS + lost_rows, f"{asked.total() - ROWS} rows again, {lost_rows} were lost with workers"
    for worker in workers:
        assert "job numbers: 6,000 of 6,000 rows have a label" in worker.out
        assert f"load_labels(['{run.folder}/here', '{run.folder}/there'])" in worker.out
    again = run.start(*more, output="here")
    assert again.wait() == 0
    assert "job numbers is already done; no teacher was asked" in again.out
    assert run.asked.rows() == asked


def _leases_of_killed(run: Run, worker: Worker) -> int:
    """How many shards the book has with a worker that is dead: a master reports once a second, until they expire."""
    wait_until(lambda: run.report()["pid"] != worker.pid, "another leads")
    reported = run.report()["time"]
    wait_until(lambda: run.report()["time"] > reported, "a report")
    return run.leases_of(worker)


def test_stopped_worker_gives_back_at_once(make_run: Callable[..., Run]) -> None:
    """Its shards are others' at once, and not after ten minutes' silence; what was answered is on disk."""
    run = make_run(3000, row_s=0.01)  # 30 s: neither is done when the other begins, or when one is stopped
    more = ("--worker-timeout", "600", "--shard", "50")
    stopped, other = run.start(*more), run.start(*more)
    wait_until(lambda: run.done() >= 300 and run.leases_of(stopped) and run.leases_of(other), "both are at work")
    stopped.process.send_signal(signal.SIGINT)
    assert stopped.wait() == 130, stopped.err
    run.asked.hurry()
    assert "Traceback" not in stopped.err
    assert other.wait() == 0, other.err
    check(run, "labels")
    assert run.asked.rows().total() <= 3000 + 500


def test_poisoned_rows_are_listed(make_run: Callable[..., Run]) -> None:
    """A row that no teacher takes costs its shard only; with a teacher that takes it the job ends well."""
    run = make_run(400, bad=[77])
    workers = [run.start("--shard", "40") for _ in range(2)]
    for worker in workers:
        assert worker.wait() == 3, worker.err
        assert "1 shard given up, with rows that no teacher could label" in worker.err
        assert re.search(r"rows 40 to 79, 3 failures, the last by .*: sample 76: .*this row is bad", worker.err)
        assert "job numbers: 360 of 400 rows have a label" in worker.out
    assert set(range(400)) - set(load_labels(run.folder / "labels").ids) == {76}, "but the others of it are there too"
    assert main(["label", *run.arguments(), "--retry-poisoned", "--outputs", "y,z"]) == 1, "nothing is put back"
    (teacher,) = run.teachers
    path = Path(next(run.folder.glob("model_*.py")))
    path.write_text(path.read_text().replace("BAD = [77]", "BAD = []"))
    port = teacher.port
    teacher.close()
    run.restart_teacher(path, port)
    retried = run.start("--retry-poisoned")
    assert retried.wait() == 0, retried.err
    assert "1 shard that had been given up is being retried" in retried.out
    check(run, "labels")
    assert run.asked.rows()[78] == 1, "no row but the bad one is asked for again"


def test_one_version_for_all_workers(make_run: Callable[..., Run], tmp_path: Path) -> None:
    """A worker whose teachers have another version waits for those of the job's, and says so."""
    run = make_run(1000, row_s=0.005)
    with counting_teacher(tmp_path, version="2", scale=3.0) as newer:
        newer.wait_ready()  # before the first begins: it must not be done when the other comes
        first = run.start("--shard", "50", "--worker-timeout", "600")
        wait_until(lambda: run.asked.rows().total() >= 1, "the teacher is asked")
        (older,) = run.teachers
        older.pause()  # so that the job is not done, however long the other takes to begin
        arguments = run.arguments()
        arguments[arguments.index("--teachers") + 1] = newer.endpoint
        other = run.start_as([*arguments, "--timeout", "5"])
        assert other.wait() == 1
        older.resume()
        assert "has version '2' of model 'm', but version='1' is requested" in other.err
    assert first.wait() == 0, first.err
    with SoftLabelCache(0, run.folder / "labels") as cache:
        assert [key.version for key in cache.keys()] == ["1"]  # noqa: SIM118


def test_other_jobs_are_refused(
    make_run: Callable[..., Run], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other options, other data, and a journal that is gone with its process; what is done is not asked for again."""
    run = make_run(300)
    assert main(["label", *run.arguments()]) == 0
    asked = run.asked.rows()

    def said(*more: str) -> str:
        capsys.readouterr()
        assert main(["label", *run.arguments(), *more]) == 1
        return capsys.readouterr().err

    for more, words in (
        (["--outputs", "y,z"], "--outputs: y,z here, y in the job"),
        (["--model-version", "2"], "--model-version: 2 here, 1 in the job"),
        (["--top-k", "2", "--dataset", "d"], "--top-k: 2 here, none in the job; --dataset: d here, none in the job"),
    ):
        assert f"edl label: job 'numbers' has other data or options: {words}. " in said(*more)
    write_data(run.data, 299)
    assert "299 rows here, 300 in the job" in said()
    x = np.arange(600, dtype=np.float32).reshape(300, 2)
    np.savez(run.data, x=x)
    assert "rows or their ids have different content here than in the job" in said()
    np.savez(run.data, x=x.astype(np.float64))
    assert "inputs x float64[2] here, x float32[2] in the job" in said()
    write_data(run.data, 300)
    with np.load(run.data) as file:
        x = file["x"]
    x[151] += 1  # a row that is not looked at, in a file whose checksum says so
    np.savez(run.data, x=x)
    assert "some rows have different content here than in the job" in said()
    assert main(["label", *run.arguments(), "--no-data-check"]) == 0
    with sqlite3.connect(run.folder / "labels" / "labels.sqlite") as db:
        db.execute("DELETE FROM label WHERE id < 7")
    assert "7 rows are missing, though the job had finished them" in said("--no-data-check")
    shutil.rmtree(run.folder / "labels")
    assert "300 rows are missing" in said("--no-data-check")
    assert run.asked.rows() == asked
    monkeypatch.setattr(label_job, "_LEASE_S", 1.0)
    monkeypatch.setattr(label_job, "_LOOK_S", 0.01)  # it looks while it is elected and cannot lead yet
    with open_store(run.store) as store:
        for entry in store.list("journals/"):
            store.delete(entry.key)
    with pytest.raises(SettingsError, match="the progress of job 'numbers' is in a different journal"):
        label.main(run.arguments("labels", "--no-data-check"))
