"""A node that is asked to leave while it waits for something: it does not wait for it, and nothing is left behind."""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from edl.collective.job_records import JobState, Node, World, prefix
from edl.discovery import open_store
from tests.jobs.collective.job import ROOT, TRAIN_STATE, Job, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

SOON_S = 60.0
"""A deadline: without the signal that a test sends, what it waits for would take minutes."""

SLOW_IMPORT = "import time, pathlib\npathlib.Path('importing').touch()\ntime.sleep(1000)\n"

# As a user's own file system would be installed.
HANGING = """
import os, pathlib, time
from fsspec.implementations.local import LocalFileSystem

class HangingFileSystem(LocalFileSystem):
    protocol = "hanging"

    @classmethod
    def _strip_protocol(cls, path):
        return LocalFileSystem._strip_protocol(str(path).removeprefix("hanging://"))

    def _open(self, path, mode="rb", **kwargs):
        while "w" in mode and os.path.exists(os.path.join(os.path.dirname(__file__), "hang")):
            pathlib.Path(__file__).with_name("hangs").touch()
            time.sleep(0.05)
        return super()._open(path, mode, **kwargs)
"""


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with Job(tmp_path, options=("--nnodes", "1:2")) as job:
        yield job
        job.nothing_is_left()


def test_unusable_checkpoint_url(job: Job) -> None:
    """A checkpoint url that cannot be used leaves nothing behind."""
    code, said = job.run("--checkpoint", "no-such-protocol://x")
    assert code == 2, said
    assert "no-such-protocol" in said
    assert "Traceback" not in said
    job.nothing_is_left()


def ends_soon(job: Job, number: int) -> None:
    """The newest node, which waits for something, is asked to leave."""
    node, at = job.nodes[-1], time.monotonic()
    node.kill(number)
    assert node.wait() == 128 + number
    assert time.monotonic() - at < SOON_S
    assert "Traceback" not in node.output


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_while_imports_run(job: Job, tmp_path: Path, number: int) -> None:
    """While the scripts imports are imported."""
    (tmp_path / "endless.py").write_text(SLOW_IMPORT)
    (tmp_path / "script.py").write_text("import endless\n")
    job.start("--preload", "endless", command=["script.py"])
    wait_until((tmp_path / "importing").exists, "the import has begun")
    ends_soon(job, number)


def test_while_waiting_to_be_checked(job: Job) -> None:
    """While others are waited for to check one another."""
    node = job.start("--node-check", "--rdzv-conf", "last_call_timeout=1000")
    wait_until(lambda: job.processes() and shared(job), "it has begun")
    with open_store(job.url) as store:
        wait_until(lambda: store.list(prefix(job.name) + "check/waiting/"), "it waits to be checked")
        ends_soon(job, signal.SIGTERM)
        assert not store.list(prefix(job.name) + "check/waiting/")
    assert "checking" not in node.output


def test_while_a_node_is_checked(job: Job) -> None:
    node = job.start("--node-check", "--rdzv-conf", "last_call_timeout=0")
    wait_until(lambda: "checking itself" in node.output, "the check has begun")
    ends_soon(job, signal.SIGTERM)


def test_while_a_failed_jobs_nodes_leave(job: Job) -> None:
    """While the nodes of a job that failed leave."""
    with open_store(job.url) as store, store.lease(10.0) as lease:
        store.put(prefix(job.name) + "world", World(3, JobState.FAILED, message="it raised").encode())
        store.put(prefix(job.name) + "nodes/last", Node("last", "127.0.0.1", 1, 1).encode(), lease)
        job.start("--lease-ttl", "300")
        wait_until(lambda: shared(job), "it looks at the job")
        ends_soon(job, signal.SIGTERM)


def shared(job: Job) -> bool:
    """Whether an agent has begun."""
    return job.shared_memory.exists()


def test_again_while_state_is_stored(tmp_path: Path) -> None:
    """A second time while the last checkpoint is stored."""
    plugin, stored = tmp_path / "plugin", tmp_path / "stored"
    (plugin / "hanging-1.dist-info").mkdir(parents=True)
    (plugin / "hanging-1.dist-info" / "METADATA").write_text("Name: hanging\nVersion: 1\n")
    (plugin / "hanging-1.dist-info" / "entry_points.txt").write_text(
        "[fsspec.specs]\nhanging = hanging:HangingFileSystem\n"
    )
    (plugin / "hanging.py").write_text(HANGING)
    options = ("--nnodes", "1", "--checkpoint", f"hanging://{stored}", "--checkpoint-interval", "0.5")
    environ = {"PYTHONPATH": f"{ROOT}:{plugin}"}
    with Job(tmp_path, options, [str(TRAIN_STATE), str(tmp_path)], environ=environ) as job:
        node = job.start()
        wait_until(lambda: "stored the state" in node.output, "a checkpoint is stored")
        (plugin / "hang").touch()
        wait_until((plugin / "hangs").exists, "a checkpoint hangs, and nothing else is stored or removed")
        before = {path.name for path in stored.glob("step-*") if not path.name.endswith(".tmp")}
        last = job.steps()[-1].step
        wait_until(lambda: job.steps()[-1].step > last, "training goes on")
        node.kill(signal.SIGTERM)
        wait_until(lambda: "the last checkpoint is being stored" in node.output, "it says what it waits for")
        assert node.process.poll() is None
        ends_soon(job, signal.SIGTERM)
        assert "the last checkpoint was not stored" in node.output
        assert before
        assert before <= {path.name for path in stored.iterdir()}
        job.nothing_is_left(state=True)
        shutil.rmtree(job.shared_memory)
