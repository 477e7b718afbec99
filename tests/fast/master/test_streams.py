"""`edl master --data follow:…` on real processes: a text that grows, with masters and workers that are killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

DEADLINE_S = 60.0
WORKER = """
import contextlib, os, sys
from edl.errors import LeaseLostError
from edl.master import MasterClient, ShardReader

with MasterClient("job") as client, ShardReader(client, "data", explicit=True) as reader:
    from edl.master.datasets import load_dataset
    for shard in reader:
        dataset = load_dataset(client.describe_dataset("data"))
        samples = [getattr(sample, "id", sample) for sample in dataset.read(shard)]
        samples = [sample.decode() if isinstance(sample, bytes) else sample for sample in samples]
        draft = f"out/.{shard.id}.{os.getpid()}"
        with open(draft, "w") as file:
            file.write("\\n".join(samples))
        os.rename(draft, f"out/{shard.start}-{shard.stop}")
        with contextlib.suppress(LeaseLostError):  # on a busy machine it was silent for a second: another has it
            reader.report_done(shard)
"""


class Job:
    """Masters and workers in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "out").mkdir()
        self.environ = {**os.environ, "EDL_DISCOVERY": f"sqlite:///{folder}/store.sqlite"}
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        with (self.folder / "log").open("a") as log:
            process = subprocess.Popen(
                [sys.executable, *arguments], cwd=self.folder, env=self.environ, stdout=log, stderr=log, text=True
            )
        self.processes.append(process)
        return process

    def master(self, location: str, *options: str) -> subprocess.Popen[str]:
        common = ("--shard-size", "10", "--session", "1", "--lease", "1")
        return self.start("-m", "edl", "master", "job", "--data", f"follow:{location}", *common, *options)

    def worker(self) -> subprocess.Popen[str]:
        return self.start("-c", WORKER)

    def done(self) -> list[str]:
        parts = sorted(self.folder.glob("out/[0-9]*"), key=lambda path: int(path.name.partition("-")[0]))
        return [sample for part in parts for sample in part.read_text().split("\n")]

    def wait(self, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not holds():
            assert time.monotonic() < deadline, (self.folder / "log").read_text()
            time.sleep(0.02)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    job = Job(tmp_path)
    yield job
    for process in job.processes:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_growing_text_with_kills(job: Job) -> None:
    log, marker = job.folder / "events.log", job.folder / "events.end"
    command = (str(log), "--end-marker", str(marker))
    master = job.master(*command)
    workers = [job.worker(), job.worker()]
    written = 0

    def write(count: int) -> None:
        nonlocal written
        with log.open("a") as file:
            for _ in range(count):
                file.write(f"line {written}\n")
                written += 1

    for killed in (master, workers[0], None):
        write(133)
        job.wait(lambda: len(job.done()) >= written // 10 * 10 - 20)
        if killed is not None:
            killed.send_signal(signal.SIGKILL)
            killed.wait()
            write(50)
            if killed is master:
                master = job.master(*command)
            else:
                workers.append(job.worker())
    with log.open("a") as file:
        file.write("the last, without an end")
    marker.touch()
    assert master.wait(DEADLINE_S) == 0, (job.folder / "log").read_text()
    assert job.done() == [*(f"line {number}" for number in range(written)), "the last, without an end"]


@pytest.mark.slow
def test_rotated_text_ends_the_master(job: Job) -> None:
    log = job.folder / "events.log"
    log.write_text("line\n" * 100)
    master = job.master(str(log))
    job.worker()
    job.wait(lambda: len(job.done()) == 100)
    log.write_text("another line\n")
    job.wait(lambda: master.poll() is not None)
    assert master.returncode not in (0, 3)
    assert "rotated" in (job.folder / "log").read_text()


@pytest.mark.slow
def test_quiet_text_is_handed_out(job: Job) -> None:
    """What fills no shard is handed out when nothing more comes, and the source ends when nothing came for long."""
    log = job.folder / "events.log"
    log.write_text("".join(f"line {number}\n" for number in range(7)))
    master = job.master(str(log), "--end-after", "3")
    job.worker()
    assert master.wait(DEADLINE_S) == 0, (job.folder / "log").read_text()
    assert job.done() == [f"line {number}" for number in range(7)]
