"""`edl run --rdzv-endpoint HOST:PORT`: nodes that meet at one of them, as with torchrun's c10d, without any server."""

from __future__ import annotations

import signal
import socket
import time
from pathlib import Path

import pytest

from edl.collective.agent.exit_codes import ExitCode
from tests.certificates import Authority
from tests.jobs.collective.checkpoint.test_sharded_jobs import SCRIPT, wait_for_replicas
from tests.jobs.collective.job import ROOT, TRAIN_STATE, Job
from tests.plugins_consul import free_ports
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(400)

OTHER_HOST = ("--rdzv-conf", "is_host=0,join_timeout=300")  # it only connects, as a node on another host does


def own_name() -> str:
    """An address of this host that others may use; the loopback's if it has no other."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("203.0.113.1", 1))
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def test_run_meets_at_an_endpoint(tmp_path: Path) -> None:
    """The first node waits for the store; who serves it dies, and another agent of its host goes on with the job."""
    url = f"edl://{own_name()}:{free_ports(1)[0]}"
    with Job(tmp_path, ("--nnodes", "1:3", "--lease-ttl", "30"), store=url) as job:
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
        job.end()
        assert [elsewhere.wait(), heir.wait()] == [ExitCode.DONE] * 2
        assert "the others went on without this node" not in elsewhere.output
        server.wait()
        job.nodes.remove(server)
        job.nothing_is_left()


def test_run_loses_the_host_of_its_store(tmp_path: Path) -> None:
    """The others end with exit code 75 and keep their state; the same commands go on with the job from there."""
    url = f"edl://127.0.0.1:{free_ports(1)[0]}"
    with Job(tmp_path, ("--nnodes", "1:2"), store=url) as job:
        server = job.start()
        wait_until(lambda: "serves the job's store" in server.output, "it serves, for the other waits only so long")
        other = job.start("--rdzv-conf", "is_host=0,join_timeout=5")
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


def test_unnamed_job_is_its_command(tmp_path: Path) -> None:
    """Killed, and started again: the same command goes on from memory, one with other arguments does not."""
    url = f"edl://127.0.0.1:{free_ports(1)[0]}"
    command = [str(TRAIN_STATE), str(tmp_path), "0.05"]
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


def test_run_with_tls(tmp_path: Path) -> None:
    """The store is served, replicas arrive, and the death of an agent is seen though its lease lasts."""
    ca = Authority()
    saved = ca.issue("agents.example").save(tmp_path)
    options = (
        *("--nnodes", "1:2", "--lease-ttl", "600"),
        *("--tls-ca", ca.save(tmp_path), "--tls-server-name", "agents.example"),
        *("--tls-cert", saved["cert"], "--tls-key", saved["key"]),
    )
    url = f"edl://127.0.0.1:{free_ports(1)[0]}"
    with Job(tmp_path, options, [str(SCRIPT), str(tmp_path)], url, environ={"PYTHONPATH": str(ROOT)}) as job:
        nodes = [job.start() for _ in range(2)]
        first = job.wait_for_world(2)[0].generation
        wait_for_replicas(job, first, nodes)
        assert not any("did not take a replica" in node.output for node in nodes)
        at = time.monotonic()
        nodes[1].signal_all(signal.SIGKILL)
        job.wait_for_world(1, after=at)
