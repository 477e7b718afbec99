"""What `edl run` says to a user who got something wrong, and that it does so before anything is lost."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from edl.collective.agent.exit_codes import ExitCode
from edl.collective.job_records import Node, prefix
from edl.discovery import open_store
from tests.jobs.collective.job import ROOT, START_S, TRAIN_STATE, Job, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with Job(tmp_path, options=("--nnodes", "1:2")) as job:
        yield job


def edl_run(*arguments: str, cwd: Path, environ: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "edl", "run", *arguments]
    return subprocess.run(command, cwd=cwd, env=environ, capture_output=True, text=True, timeout=START_S, check=False)


def test_another_script_is_not_another_node(job: Job, tmp_path: Path) -> None:
    """It would stop the training that is there."""
    job.start()
    steps = len(job.wait_for_world(1))
    other = tmp_path / "hello.py"
    other.write_text("print('hello')")
    code, said = job.run(command=[str(other)])
    assert code == 2, said
    assert f"job {job.name} runs train.py, and this is hello.py: another --rdzv-id starts another job" in said
    assert {one.generation for one in job.steps()} == {0}
    wait_until(lambda: len(job.steps()) > steps, "the training goes on")
    job.end()
    assert job.nodes[0].wait() == 0


def test_unused_job_takes_another_script(job: Job, tmp_path: Path) -> None:
    """A job that nobody runs may go on with another script."""
    names = [tmp_path / name for name in ("first.py", "second.py")]
    for name in names:
        name.write_text("raise SystemExit(7)")
        code, said = job.run("--nnodes", "1", command=[str(name)])
        assert code == 1, said
        assert "runs first.py" not in said


def test_unwritable_storage_is_found_first(job: Job) -> None:
    """Storage that cannot be written is found before the training."""
    code, said = job.run("--checkpoint", "/proc/checkpoints")
    assert code == 2, said
    assert "checkpoints cannot be stored at /proc/checkpoints" in said
    assert not job.steps()
    job.nothing_is_left()


def test_node_without_a_place_waits(job: Job) -> None:
    """A node without a place says that it waits."""
    for _ in range(2):
        job.start()
    job.wait_for_world(2)
    reserve = job.start()
    words = "the job has its 2 nodes, and no place for more: waiting for one"
    wait_until(lambda: words in reserve.output, "it says so")
    job.end()
    assert [node.wait() for node in job.nodes] == [0, 0, 0]


def test_node_reports_missing_nodes(tmp_path: Path) -> None:
    """A node says how many are missing and how long it waits."""
    with Job(tmp_path, options=("--nnodes", "2:3", "--rdzv-conf", "join_timeout=377")) as job:
        first = job.start()
        words = "1 of at least 2 nodes are here: waiting up to 377 s for more (--rdzv-conf join_timeout=SECONDS)"
        wait_until(lambda: words in first.output, "it says so when it comes")
        second = job.start()
        job.wait_for_world(2)
        lost, said = job.member(second), first.output.count(words)
        second.signal_all(signal.SIGKILL)
        wait_until(lambda: first.output.count(words) > said, "it says so when the other is lost")
        assert f"the workers are stopped: lost {lost}" in first.output
        first.kill(signal.SIGTERM)
        assert first.wait() == 143
    shutil.rmtree(job.shared_memory, ignore_errors=True)


def test_older_jobs_state_is_not_used(job: Job, tmp_path: Path) -> None:
    """The store was removed and made anew: a state in memory of then would count as newer than any of now."""
    first = job.start(command=[str(TRAIN_STATE), str(tmp_path)])
    wait_until(lambda: any(one.step > 5 for one in job.steps()), "steps that are in memory")
    first.kill()
    first.process.wait()
    wait_until(lambda: not job.processes(), "its workers die with it")
    for file in tmp_path.glob("store.sqlite*"):
        file.unlink()
    with open_store(job.url):  # made anew
        again = job.start(command=[str(TRAIN_STATE), str(tmp_path)])
        job.wait_for_world(1, after=job.steps()[-1].time)
        assert "left a state in memory, of a job before this one: it is removed" in again.output
    job.end()
    assert again.wait() == 0
    shutil.rmtree(job.shared_memory, ignore_errors=True)


def test_torchrun_rendezvous_is_ignored(tmp_path: Path) -> None:
    """Torchruns ways to meet are told to mean nothing."""
    script = tmp_path / "hello.py"
    script.write_text("print('hello')")
    arguments = ["--standalone", "--rdzv-backend", "c10d", "--rdzv-endpoint", "10.0.0.1:29500", "--node-rank", "0"]
    done = edl_run(*arguments, str(script), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "edl run: --rdzv-backend, --rdzv-endpoint: not used here; nodes meet in the store, sqlite:///" in done.stderr


def test_log_lines_are_json(tmp_path: Path) -> None:
    """Each line of the agent's is an object with what the line names; the script's own lines stay as they are."""
    (tmp_path / "hello.py").write_text("print('hello')")
    done = edl_run(
        "--standalone", "--no-prewarm", "--rdzv-backend=c10d", "--log-format", "json", "hello.py", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "hello\n"
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    # On a busy machine a line more says what takes longer than two seconds.
    unused, began, ended = (line for line in lines if not line["message"].startswith("importing what"))
    assert (unused["level"], unused["command"]) == ("warning", "edl run")
    assert unused["message"].startswith("--rdzv-backend: not used here")
    assert (began["generation"], began["world_size"]) == (0, 1)
    assert began["logger"] == "edl.collective.agent.reconciler"
    assert ended["message"] == f"job {ended['job']} has ended: the script ended on every node"


@pytest.mark.parametrize("options", [["-r", "3"], ["-t", "0:1"], []])
def test_printed_files_stay_where_announced(options: list[str], tmp_path: Path) -> None:
    """What workers print into files stays where it is said to be."""
    (tmp_path / "hello.py").write_text("print('hello', 'file')")
    (tmp_path / "temporary").mkdir()
    environ = {**os.environ, "TMPDIR": str(tmp_path / "temporary")}
    done = edl_run("--standalone", "--no-prewarm", *options, "hello.py", cwd=tmp_path, environ=environ)
    assert done.returncode == 0, done.stderr
    folders = list((tmp_path / "temporary").glob("edl-*"))
    if not options:
        assert not folders
        return
    (folder,) = folders
    assert f"what the workers print is kept in {folder} (--log-dir FOLDER)" in done.stderr
    assert [path.read_text() for path in folder.rglob("stdout.log")] == ["hello file\n"]


def test_empty_output_folder_is_removed(tmp_path: Path) -> None:
    """A folder for output that nothing came into does not stay."""
    (tmp_path / "hello.py").write_text("")
    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    done = edl_run("--store", "redis://x", "-r", "3", "hello.py", cwd=tmp_path, environ=environ)
    assert done.returncode == 2, done.stderr
    assert not list(tmp_path.glob("edl-*"))


def test_unreachable_store_is_no_failure(tmp_path: Path) -> None:
    """A store that cannot be reached is no failure of the script."""
    (tmp_path / "hello.py").write_text("print('hello')")
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # and nobody listens
        store = f"consul://127.0.0.1:{silent.getsockname()[1]}"
        done = edl_run("--store", store, "--rdzv-id", "x", "hello.py", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (ExitCode.TRY_AGAIN, ""), done.stderr
    assert "cannot be reached" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--rzdv-id", "x", "train.py"], "did you mean --rdzv-id instead of --rzdv-id?"),
        (["--nnodes", "2", "--rzdv-id", "x", "train.py"], "did you mean --rdzv-id instead of --rzdv-id?"),
        (["--nnodes", "2"], "which script?"),
        (["--log-dir", "/proc/logs", "hello.py"], "--log-dir /proc/logs"),
        (["--store", "redis://x", "hello.py"], "unknown scheme 'redis'"),
    ],
)
def test_wrong_usage_is_one_line(arguments: list[str], words: str, tmp_path: Path) -> None:
    (tmp_path / "hello.py").write_text("print('hello')")
    done = edl_run(*arguments, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert words in done.stderr
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr


def test_node_reports_memory_for_joiners(tmp_path: Path) -> None:
    """A node says how much memory those who come will need."""
    command = [str(TRAIN_STATE), str(tmp_path)]
    with Job(tmp_path, ("--nnodes", "1:2"), command, environ={"PYTHONPATH": str(ROOT)}) as job:
        job.start()
        job.wait_for_world(1)
        with open_store(job.url) as store:
            records = f"{prefix(job.name)}nodes/"
            wait_until(lambda: any(Node.decode(one.value).slot_nbytes for one in store.list(records)), "one says it")
        job.start()
        job.wait_for_world(2)
        job.end()
        assert [node.wait() for node in job.nodes] == [0, 0]
