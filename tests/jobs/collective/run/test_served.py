"""`edl run --rdzv-endpoint HOST:PORT`: nodes that meet at one of them, as with torchrun's c10d, without any server."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from edl.collective.agent.exit_codes import ExitCode
from tests.jobs.collective.job import Job, wait_until
from tests.plugins_consul import free_ports

OTHER_HOST = ("--rdzv-conf", "is_host=0,join_timeout=60")  # such a node only connects, as one on another host does
SILENCE_S = 5
STATE_SCRIPT = Path(__file__).parents[1] / "train_state.py"


def own_name() -> str:
    """An address of this host that others may use; the loopback's if it has no other."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("203.0.113.1", 1))
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_run_meets_at_an_endpoint(tmp_path: Path) -> None:
    """The first node waits for the store; who serves it dies, and another agent of its host goes on with the job."""
    url = f"edl://{own_name()}:{free_ports(1)[0]}"
    with Job(tmp_path, ("--nnodes", "1:3", "--lease-ttl", "10"), store=url) as job:
        elsewhere = job.start(*OTHER_HOST)
        wait_until(lambda: "waiting for the store at" in elsewhere.output, "it says what it waits for")
        server = job.start()
        first = job.wait_for_world(2)
        assert "serves the job's store" in server.output
        heir = job.start()
        second = job.wait_for_world(3)
        assert second[0].step > first[0].step
        assert "serves the job's store" not in heir.output
        at = time.monotonic()
        server.signal_all(signal.SIGKILL)
        third = job.wait_for_world(2, after=at)
        assert third[0].step >= second[0].step - 1, "the state was in memory"
        wait_until(lambda: "serves the job's store" in heir.output, "another agent of the host serves")
        at = time.monotonic()
        job.start(*OTHER_HOST)
        job.wait_for_world(3, after=at)
        job.end()
        assert [node.wait() for node in job.nodes if node is not server] == [ExitCode.DONE] * 3
        assert "the others went on without this node" not in elsewhere.output
        server.wait()
        job.nodes.remove(server)
        job.nothing_is_left()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_run_loses_the_host_of_its_store(tmp_path: Path) -> None:
    """The others end with exit code 75 and keep their state; the same commands go on with the job from there."""
    url = f"edl://127.0.0.1:{free_ports(1)[0]}"
    with Job(tmp_path, ("--nnodes", "1:2"), store=url) as job:
        server = job.start()
        wait_until(lambda: "serves the job's store" in server.output, "it serves, for the other waits only so long")
        other = job.start("--rdzv-conf", f"is_host=0,join_timeout={SILENCE_S}")
        job.wait_for_world(2)
        server.signal_all(signal.SIGKILL)
        assert other.wait() == ExitCode.TRY_AGAIN
        assert "no store for" in other.output
        reached = max(step.step for step in job.steps())
        at = time.monotonic()
        again = [job.start(), job.start(*OTHER_HOST)]
        steps = job.wait_for_world(2, after=at)
        assert steps[0].step > reached - 100, "it goes on from memory"
        job.end()
        assert [node.wait() for node in again] == [ExitCode.DONE] * 2


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_unnamed_job_is_its_command(tmp_path: Path) -> None:
    """Killed, and started again: the same command goes on from memory, one with other arguments does not."""
    url = f"edl://127.0.0.1:{free_ports(1)[0]}"
    command = [str(STATE_SCRIPT), str(tmp_path), "0.05", "1"]
    with Job(tmp_path, ("--nnodes", "1:2"), command, store=url) as job:
        for others, arguments in ((False, []), (False, []), (True, ["other"])):
            at, before = time.monotonic(), max((step.step for step in job.steps()), default=-1)
            node = job.start("--rdzv-id", "none", command=[*command, *arguments])
            first = job.wait_for_world(1, after=at)[0]
            assert first.step in ([0] if others else [before, before + 1]), node.output
            assert ("of other arguments: it is removed" in node.output) is others
            wait_until(lambda at=first.step: job.steps()[-1].step > at + 2, "some steps are saved")
            if not others:
                node.signal_all(signal.SIGKILL)
                node.wait()
        job.end()
        assert node.wait() == ExitCode.DONE


def test_run_names_what_has_the_port(tmp_path: Path) -> None:
    script = tmp_path / "hello.py"
    script.write_text("print('hello')")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        command = [sys.executable, "-m", "edl", "run", "--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{port}"]
        conf = ["--rdzv-backend", "c10d", "--rdzv-conf", "join_timeout=1"]
        done = subprocess.run([*command, *conf, str(script)], capture_output=True, text=True, timeout=100)
    assert done.returncode == ExitCode.TRY_AGAIN
    assert f"no store at 127.0.0.1:{port} within 1 s" in done.stderr
    assert f"if port {port} is another program's, choose another one on all nodes" in done.stderr
    assert "Traceback" not in done.stderr
