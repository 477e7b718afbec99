"""Plain `torchrun --rdzv-backend=edl`: its agents meet in an EDL store, and recover as torch's own do not."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from tests.jobs.collective.job import START_S

pytest.importorskip("torch", reason="torchrun comes with PyTorch")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        not any(one.value.endswith(":handler_creator") for one in entry_points(group="torchrun.handlers", name="edl")),
        reason="EDL was installed before it had a rendezvous: pip install --no-deps -e .",
    ),
]

# Says who is there in every step, and ends when the file that it is given exists.
SCRIPT = """\
import os, sys, time
import torch, torch.distributed as dist

dist.init_process_group("gloo")
while True:
    sums = torch.tensor([1, int(os.path.exists(sys.argv[1]))])
    dist.all_reduce(sums)
    print(f"rank {dist.get_rank()} of {int(sums[0])} is {os.getpid()}", flush=True)
    if sums[1] == sums[0]:
        break
    time.sleep(0.05)
dist.destroy_process_group()
print("done", flush=True)
"""


class Job:
    """torchrun's agents of one job, each with a log of its own."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder = folder
        self.url = url
        self.stop = folder / "stop"
        self._id = f"job-{uuid.uuid4().hex[:8]}"
        self._agents: list[subprocess.Popen[bytes]] = []
        self._lost: set[int] = set()
        (folder / "script.py").write_text(SCRIPT)

    def start(self) -> int:
        """Start an agent. Returns its number."""
        number = len(self._agents)
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:3", "--max-restarts", "3"]
        command += ["--rdzv-backend=edl", f"--rdzv-id={self._id}", f"--rdzv-endpoint={self.url}"]
        command += ["--rdzv-conf=last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=4"]
        command += ["script.py", str(self.stop)]
        with (self.folder / f"{number}.log").open("wb") as log:
            environ = {**os.environ, "OMP_NUM_THREADS": "1"}
            self._agents.append(subprocess.Popen(command, cwd=self.folder, env=environ, stdout=log, stderr=log))
        return number

    def log(self, number: int) -> str:
        return (self.folder / f"{number}.log").read_text()

    def until(self, condition: Callable[[], bool], timeout_s: float = START_S) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                logs = "\n".join(f"--- {number}\n{self.log(number)[-3000:]}" for number in range(len(self._agents)))
                pytest.fail(f"not within {timeout_s:g} s:\n{logs}")
            time.sleep(0.05)

    def world(self, number: int) -> tuple[int, int]:
        """How many ranks an agent's worker saw last, and that worker's process."""
        found = re.findall(r"of (\d) is (\d+)$", self.log(number), re.MULTILINE)
        return (int(found[-1][0]), int(found[-1][1])) if found else (0, 0)

    def wait(self, number: int, timeout_s: float = START_S) -> int:
        return self._agents[number].wait(timeout_s)

    def end(self) -> None:
        """Let all agents end well that were not lost."""
        self.stop.touch()
        for number in range(len(self._agents)):
            assert number in self._lost or self.wait(number) == 0, self.log(number)

    def lose(self, number: int) -> None:
        """As when a machine goes, with the agent and its worker."""
        self._lost.add(number)
        for pid in (self._agents[number].pid, self.world(number)[1]):
            os.kill(pid, signal.SIGKILL)

    def kill(self) -> None:
        for agent in self._agents:
            agent.send_signal(signal.SIGTERM)  # it takes its workers with it
            try:
                agent.wait(20)
            except subprocess.TimeoutExpired:
                agent.kill()


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/store.sqlite"


@pytest.fixture
def job(tmp_path: Path, url: str) -> Iterator[Job]:
    job = Job(tmp_path, url)
    try:
        yield job
    finally:
        job.kill()


def test_node_joins_later_and_all_end(job: Job) -> None:
    """A node joins later and the job ends for all."""
    job.start()
    job.until(lambda: job.world(0)[0] == 1)
    job.start()
    job.until(lambda: job.world(0)[0] == 2 and job.world(1)[0] == 2)
    job.end()
    late = job.start()
    assert job.wait(late) == 1
    assert "has ended already: nothing to do" in job.log(late)


def test_killed_worker_is_replaced(job: Job) -> None:
    """A killed worker is replaced with torchs defaults."""
    job.start()
    job.start()
    job.until(lambda: job.world(0)[0] == 2 and job.world(1)[0] == 2)
    before = [job.world(number)[1] for number in range(2)]
    os.kill(before[0], signal.SIGKILL)
    job.until(lambda: all(job.world(each)[0] == 2 and job.world(each)[1] != before[each] for each in range(2)))
    job.end()


def test_the_first_node_may_go_as_any_other(job: Job) -> None:
    job.start()
    job.start()
    job.until(lambda: job.world(0)[0] == 2 and job.world(1)[0] == 2)
    first = next(number for number in range(2) if "rank 0 of 2" in job.log(number))
    job.lose(first)
    job.until(lambda: job.world(1 - first)[0] == 1)
    job.end()


@pytest.mark.consul
class TestConsul:
    @pytest.fixture
    def url(self, request: pytest.FixtureRequest) -> str:
        return str(request.getfixturevalue("consul_agent").url)

    def test_two_nodes_meet(self, job: Job) -> None:
        job.start()
        job.start()
        job.until(lambda: job.world(0)[0] == 2 and job.world(1)[0] == 2)
        job.end()
