"""All workers of a job do the same: other data, other options and another version of the model are refused by name."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from edl.cli import cmd_label, main
from edl.cli.label import job
from edl.discovery import open_store
from edl.distill.cache import SoftLabelCache, load_labels
from edl.errors import SettingsError
from tests.jobs.label_job.processes import Run, counting_teacher, write_data

pytestmark = pytest.mark.timeout(300)  # on a busy machine a worker takes half a minute to begin

SAMPLES = """
import numpy as np

class Numbers:
    def __len__(self):
        return 300
    def __getitem__(self, at):
        return np.array([at + 1, 7], np.float32)

def stream():
    return iter(Numbers()[at] for at in range(300))
"""


@pytest.fixture
def run(make_run: Callable[..., Run]) -> Run:
    """A job that is done, by a worker that is not there any more."""
    run = make_run(300)
    assert main(["label", *run.arguments()]) == 0
    return run


OTHER = [
    (["--outputs", "y,z"], "--outputs: y,z here, y in the job"),
    (["--top-k", "2"], "--top-k: 2 here, none in the job"),
    (["--dtype", "float16"], "--dtype: float16 here, none in the job"),
    (["--dataset", "other"], "--dataset: other here, none in the job"),
    (["--model-version", "2"], "--model-version: 2 here, 1 in the job"),
    (["--top-k", "2", "--dataset", "d"], "--top-k: 2 here, none in the job; --dataset: d here, none in the job"),
]


def test_other_options_are_refused(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    for more, words in OTHER:
        capsys.readouterr()
        assert main(["label", *run.arguments(), *more]) == 1
        assert f"edl label: job 'numbers' is another one: {words}. " in capsys.readouterr().err


def test_other_data_are_refused(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """Another length, another content, and an id more."""
    asked = run.asked.rows()

    def said(*more: str) -> str:
        capsys.readouterr()
        assert main(["label", *run.arguments(), *more]) == 1
        return capsys.readouterr().err

    write_data(run.data, 299)
    assert "299 rows here, 300 in the job" in said()
    x = np.arange(600, dtype=np.float32).reshape(300, 2)
    np.savez(run.data, x=x)
    assert "rows or their ids have another content here than in the job" in said()
    np.savez(run.data, x=x.astype(np.float64))
    assert "inputs x float64[2] here, x float32[2] in the job" in said()
    write_data(run.data, 300)
    with np.load(run.data) as file:
        x = file["x"]
    x[151] += 1  # a row that is not looked at, in a file whose checksum says so
    np.savez(run.data, x=x)
    assert "some rows have another content here than in the job" in said()
    assert main(["label", *run.arguments(), "--no-data-check"]) == 0
    assert run.asked.rows() == asked


def test_one_version_for_all_workers(make_run: Callable[..., Run], tmp_path: Path) -> None:
    """A worker whose teachers have another version waits for those of the job's, and says so."""
    run = make_run(1000, row_s=0.005)
    with counting_teacher(tmp_path, version="2", scale=3.0) as newer:
        newer.wait_ready()  # before the first begins: it must not be done when the other comes
        first = run.start("--shard", "50", "--worker-timeout", "60")
        run.asked_until(1)
        (older,) = run.teachers
        older.pause()  # so that the job is not done, however long the other takes to begin
        arguments = run.arguments()
        arguments[arguments.index("--teachers") + 1] = newer.endpoint
        other = run.start_as([*arguments, "--timeout", "5"])
        assert other.wait(90) == 1
        older.resume()
        assert "has version '2' of model 'm', and version='1' is asked for" in other.err
    assert first.wait(90) == 0, first.err
    with SoftLabelCache(0, run.folder / "labels") as cache:
        assert [key.version for key in cache.keys()] == ["1"]  # noqa: SIM118
    assert load_labels(run.folder / "labels").rows([9])["y"].tolist() == [[20.0, 11.0]]


def test_worker_that_cannot_lead_says_why(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job whose journal was a file of another process, which has ended: nothing hangs, and nothing begins anew."""
    monkeypatch.setattr(job, "_LEASE_S", 1.0)
    with open_store(run.store) as store:
        for entry in store.list("journals/"):
            store.delete(entry.key)
    begun = time.monotonic()
    with pytest.raises(SettingsError, match="what is done of job 'numbers' stands in another journal"):
        cmd_label.main(run.arguments())
    assert time.monotonic() - begun < 20


def test_names_that_no_store_could_hold(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a/b", "", "x" * 101):
        arguments = ["label", "data.npz", "--inputs", "x", "--outputs", "y", "--output", "none", "--job", name]
        assert main(arguments) == 2
        assert "expected 1 to 100 characters without a slash" in capsys.readouterr().err


def test_what_cannot_be_shared_is_refused(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows that are read in sequence, with the remedy; and options without a job."""
    path = run.folder / "samples.py"
    path.write_text(SAMPLES)
    arguments = run.arguments()
    arguments[0] = f"{path}:stream"
    assert main(["label", *arguments]) == 2
    assert "is read in sequence: return a Dataset with __len__ and __getitem__" in capsys.readouterr().err
    at = arguments.index("--job")
    del arguments[at : at + 2]
    assert main(["label", *arguments]) == 2
    assert "--store belongs to a run of several processes: name it with --job" in capsys.readouterr().err


@pytest.mark.slow
def test_worker_processes_load_samples(make_run: Callable[..., Run]) -> None:
    """`--workers` keeps working: two labelling processes, each with two that load."""
    pytest.importorskip("torch", reason="PyTorch is not installed")
    run = make_run(300)
    path = run.folder / "samples.py"
    path.write_text(SAMPLES)
    arguments = run.arguments()
    arguments[0] = f"{path}:Numbers"
    workers = [run.start_as([*arguments, "--workers", "2"]) for _ in range(2)]
    assert [worker.wait(200) for worker in workers] == [0, 0], workers[0].err + workers[1].err
    assert load_labels(run.folder / "labels").ids == tuple(range(300))
    assert run.asked.rows() == dict.fromkeys(range(1, 301), 1)
