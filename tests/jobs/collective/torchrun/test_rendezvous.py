"""Plain `torchrun --rdzv-backend=edl`: its agents meet in an EDL store, and recover as torch's own do not."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

import pytest

from tests.jobs.collective.job import START_S, Job, Node
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(300)

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
"""


def world(node: Node) -> tuple[int, int, int]:
    """The rank of an agent's worker, how many ranks it saw last, and its process."""
    found = re.findall(r"^rank (\d) of (\d) is (\d+)$", node.output, re.MULTILINE)
    return (int(found[-1][0]), int(found[-1][1]), int(found[-1][2])) if found else (0, 0, 0)


def test_nodes_join_die_and_end(tmp_path: Path) -> None:
    """A node joins later, a worker is killed with torch's defaults, and the first node goes as any other."""
    (tmp_path / "script.py").write_text(SCRIPT)
    program = (sys.executable, "-m", "torch.distributed.run")
    options = ["--nnodes", "1:3", "--max-restarts", "3", "--rdzv-backend=edl"]
    options += [f"--rdzv-endpoint=sqlite:///{tmp_path}/store.sqlite"]
    options += ["--rdzv-conf=last_call_timeout=1,keep_alive_interval=2,keep_alive_max_attempt=5"]
    environ = {"OMP_NUM_THREADS": "1"}
    command = ["script.py", str(tmp_path / "end")]
    with Job(tmp_path, options, command, environ=environ, program=program) as job:
        nodes = [job.start()]
        wait_until(lambda: world(nodes[0])[1] == 1, "one node", START_S)
        nodes.append(job.start())
        wait_until(lambda: all(world(node)[1] == 2 for node in nodes), "two nodes", START_S)
        before = [world(node)[2] for node in nodes]
        os.kill(before[0], signal.SIGKILL)
        wait_until(
            lambda: all(world(node)[1] == 2 and world(node)[2] not in before for node in nodes), "new workers", START_S
        )
        first = next(node for node in nodes if world(node)[0] == 0)
        (other,) = (node for node in nodes if node is not first)
        worker = world(first)[2]
        for pid in (first.pid, worker):
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: world(other)[1] == 1, "the other goes on", START_S)
        job.end()
        assert other.wait() == 0, other.output
        code, said = job.run()
        assert code == 1
        assert "has ended already: nothing to do" in said
