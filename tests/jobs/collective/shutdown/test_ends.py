"""How a job ends before its script does: by an error on one node, by signals; and a store that was killed meanwhile."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from edl.collective.agent.host_folder import HostFolder
from edl.collective.goodput.records import read_job
from edl.discovery import open_store
from tests.jobs.collective.job import IMPATIENT, ROOT, TRAIN, TRAIN_STATE, Job, stop, wait_until
from tests.plugins_consul import ConsulAgent
from tests.plugins_etcd import EtcdServer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.fixture(
    params=[pytest.param("consul_agent", marks=pytest.mark.consul), pytest.param("etcd_server", marks=pytest.mark.etcd)]
)
def server(request: pytest.FixtureRequest) -> ConsulAgent | EtcdServer:
    found: ConsulAgent | EtcdServer = request.getfixturevalue(request.param)
    return found


def test_an_error_on_one_node_ends_all(tmp_path: Path, server: ConsulAgent | EtcdServer) -> None:
    with Job(tmp_path, options=("--nnodes", "2", "--lease-ttl", "8"), store=server.url) as job:
        nodes = [job.start(), job.start()]
        job.wait_for_world(2)
        before = job.steps()[-1].generation
        server.kill()
        wait_until(lambda: all("does not answer" in node.output for node in nodes), "the outage is noticed")
        server.start()
        wait_until(lambda: all("answers again" in node.output for node in nodes), "the end of it is noticed")
        last = job.wait_for_world(2, after=time.monotonic() + 10.0)  # longer than any lease lasts
        assert {one.generation for one in last} == {before}, "training went on as it was"

        job.tell(1, "raise")
        assert [node.wait() for node in nodes] == [1, 1]
        for node in nodes:
            assert "LookupError: the user's own mistake" in node.output
            assert 'train.py", line' in node.output
            assert f"generation {before + 1}" not in node.output, "not restarted"
        job.nothing_is_left()


def test_errors_are_counted_for_the_job(tmp_path: Path) -> None:
    """Errors are forgiven so often in the whole job."""
    with Job(tmp_path, options=("--nnodes", "2", "--max-restarts", "1", "--lease-ttl", "10")) as job:
        nodes = [job.start(), job.start()]
        first = job.wait_for_world(2)[0].generation
        at = job.tell(0, "raise")
        wait_until(lambda: job.wait_for_world(2, after=at)[0].generation > first, "they go on after the error")
        job.tell(1, "raise")  # on the other node, which has forgiven nothing itself
        assert [node.wait() for node in nodes] == [1, 1]
        assert all("LookupError: the user's own mistake" in node.output for node in nodes)
        job.nothing_is_left()


EARLY = """
import os, sys, time
from pathlib import Path
import torch.distributed as dist
from edl.collective import Checkpointer, State

if __name__ == "__main__":
    folder, node = Path(sys.argv[1]), os.environ["NODE"]
    dist.init_process_group("gloo")
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    state = State(step=-1)
    with Checkpointer(state, interval_steps=1, group=alone) as checkpointer:
        checkpointer.restore()
        while not (folder / f"end-{node}").exists():
            time.sleep(0.05)
            state.step += 1
            (folder / f"at-{node}").write_text(str(state.step))
            checkpointer.save(state.step)
    print("the end of", node)
"""


def test_node_leaves_after_another_ended(tmp_path: Path) -> None:
    """A node leaves while the script has ended on another."""
    (tmp_path / "early.py").write_text(EARLY)
    program, environ = (sys.executable, str(IMPATIENT), "pause=100"), {"PYTHONPATH": str(ROOT)}
    options = ("--nnodes", "1:2", "--lease-ttl", "10")
    with Job(tmp_path, options, ["early.py", str(tmp_path)], environ=environ, program=program) as job:
        early, late = job.start("--nnodes", "2"), job.start("--nnodes", "2")
        wait_until(lambda: all((tmp_path / f"at-{one.name}").exists() for one in (early, late)), "both make steps")
        (tmp_path / f"end-{early.name}").touch()
        wait_until(lambda: "the end of" in early.output, "the script has ended on one")
        at = time.monotonic()
        late.kill(signal.SIGTERM)
        assert late.wait() == 143
        assert time.monotonic() - at < 90.0, "it waits for nobody to pause who makes no more steps"
        early.kill(signal.SIGTERM)
        early.wait()


UNEVEN = """
import os, sys
import torch, torch.distributed as dist

if __name__ == "__main__":
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        os._exit(0)
    dist.all_reduce(torch.ones(1))
"""


@pytest.mark.parametrize(("nodes", "workers"), [(1, 2), (2, 1)])
def test_rank_ending_early_is_named(tmp_path: Path, nodes: int, workers: int) -> None:
    """A rank that ends early again and again is named as the cause."""
    (tmp_path / "uneven.py").write_text(UNEVEN)
    options = ("--nnodes", str(nodes), "--nproc-per-node", str(workers), "--lease-ttl", "10")
    program = (sys.executable, str(IMPATIENT), "fruitless=3")
    with Job(tmp_path, options, ["uneven.py"], environ={"PYTHONPATH": str(ROOT)}, program=program) as job:
        started = [job.start() for _ in range(nodes)]
        assert {node.wait() for node in started} == {1}
        cause = "perhaps because the script had already ended on rank 1: all must make the same steps"
        reason = f"rank 0 lost contact with another one, {cause}"
        for node in started:
            assert f"generation 1 ({reason}" in node.output
            assert f"3 restarts in a row led nowhere; the last because {reason}" in node.output


READING = """
import os, signal
from torch.utils.data import DataLoader, Dataset, get_worker_info

class Numbers(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        if index == 5 and os.environ["EDL_GENERATION"] == "0" and get_worker_info() is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        return index

if __name__ == "__main__":
    print("read", sum(DataLoader(Numbers(), batch_size=None, num_workers=2)))
"""


def test_killed_loader_restarts_workers(tmp_path: Path) -> None:
    """A killed process of a data loader restarts the workers."""
    (tmp_path / "reading.py").write_text(READING)
    with Job(tmp_path, ("--nnodes", "1"), ["reading.py"]) as job:
        code, said = job.run()
        assert code == 0, said
        assert "generation 1 (rank 0: RuntimeError: DataLoader worker (pid" in said
        assert "read 28" in said


STERN = """
import os
from tests.jobs.collective.train import main

if __name__ == "__main__":
    try:
        main()
    except RuntimeError:
        os._exit(3)
"""


@pytest.mark.parametrize("stalled_s", [0.0, 1.2])
def test_exit_code_after_a_lost_node(tmp_path: Path, stalled_s: float) -> None:
    """An exit code because a node was lost is no error of the script, also where the other node stood still."""
    (tmp_path / "stern.py").write_text(STERN)
    environ = {"PYTHONPATH": str(ROOT)}
    with Job(tmp_path, ("--nnodes", "1:2"), ["stern.py", str(tmp_path)], environ=environ) as job:
        stays, lost = job.start(), job.start()
        job.wait_for_world(2)
        workers = lost.workers
        stop(job, lost)  # so that only the end of its lease tells of the loss, long after the exit code
        for pid in workers:
            os.kill(pid, signal.SIGKILL)
        if stalled_s:  # its renewal is late, so it takes the lost node to be late as well
            stop(job, stays)
            time.sleep(stalled_s)
            stays.kill(signal.SIGCONT)
        job.wait_for_world(1, after=time.monotonic())
        job.end()
        assert stays.wait() == 0
        assert f"lost {job.member(lost)}" in stays.output


def test_killed_agents_state_is_kept_an_hour(tmp_path: Path) -> None:
    """What a killed agent left is kept for an hour since it died."""
    with Job(tmp_path, ("--nnodes", "1")) as job:
        node = job.start()
        job.wait_for_world(1)
        (owner,) = job.shared_memory.glob("*/node")
        long_ago = time.time() - 7200
        os.utime(owner, (long_ago, long_ago))
        wait_until(lambda: owner.stat().st_mtime > long_ago + 3600, "it shows that it lives")
        node.signal_all(signal.SIGKILL)
        node.process.wait()
        HostFolder(f"{job.name}-other", "other").close(keep=False)
        assert owner.exists(), "it died just now"
        os.utime(owner, (long_ago, long_ago))
        HostFolder(f"{job.name}-other", "other").close(keep=False)
        assert not job.shared_memory.exists()


def test_ctrl_c_ends_and_job_resumes(tmp_path: Path) -> None:
    """Ctrl c ends it cleanly and the same job goes on later."""
    with Job(tmp_path, options=("--nnodes", "1", "--nproc-per-node", "2")) as job:
        node = job.start()
        job.wait_for_world(2)
        os.killpg(node.pid, signal.SIGINT)
        assert node.wait() == 130
        assert "Traceback" not in node.output
        job.nothing_is_left()

        # Once more, and asked twice in a moment, while the workers cannot even be asked.
        node = job.start(command=[str(TRAIN), str(tmp_path)])
        at = time.monotonic()
        job.wait_for_world(2, after=at)
        for pid in node.workers:
            os.kill(pid, signal.SIGSTOP)
        node.kill(signal.SIGTERM)
        node.kill(signal.SIGTERM)
        assert node.wait() == 143
        job.nothing_is_left()
        steps = sorted({one.step for one in job.steps()})
        assert steps == list(range(len(steps)))


def test_error_is_in_the_jobs_history(tmp_path: Path) -> None:
    """An error is a line of the jobs history."""
    script = tmp_path / "raise.py"
    script.write_text("def fail():\n    raise ValueError('no such thing')\n\nfail()\n")
    with Job(tmp_path, ("--nnodes", "1"), command=[str(script)]) as job:
        assert job.run()[0] == 1
        with open_store(job.url) as store:
            (error,) = [event for event in read_job(store, job.name).events if event.kind == "error"]
        assert error.text.endswith("exit code 1 (rank 0): ValueError: no such thing")
        assert "\n" not in error.text


def test_last_agent_here_is_continued(tmp_path: Path) -> None:
    """Two terminals on one machine: the first leaves, the second goes on alone and is killed, and one starts again."""
    with Job(tmp_path, command=[str(TRAIN_STATE), str(tmp_path)]) as job:
        one, other = job.start(), job.start()
        job.wait_for_world(2)
        one.kill(signal.SIGTERM)
        one.wait()
        alone = job.wait_for_world(1, after=time.monotonic())[0]
        reached = wait_until(lambda: [at for at in job.steps() if at.step > alone.step + 20], "steps alone")[0]
        other.signal_all(signal.SIGKILL)
        begun = time.monotonic()
        last = job.start()
        again = job.wait_for_world(1, after=begun)[0]
        # A step may be in the log and not in memory yet when the kill comes. The first one's state is twenty behind.
        assert again.step >= reached.step, last.output
        job.end()
        assert last.wait() == 0
        job.nothing_is_left()
