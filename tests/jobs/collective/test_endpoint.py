"""Nodes that meet at one of them, without any server; what they say to who waits, is late, or is not theirs."""

from __future__ import annotations

import json
import signal
import socket
import time
from pathlib import Path

import pytest

from edl.cli import main
from edl.collective.agent.ending import ExitCode
from edl.collective.job_records import Node as NodeRecord
from edl.collective.job_records import prefix
from edl.discovery import open_store
from tests.certificates import Authority
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
    """The first node waits for the store; who serves it dies, and another agent of its host goes on with the job.

    All over TLS.
    """
    url, ca = f"edl://{own_name()}:{free_ports(1)[0]}", Authority()
    saved = ca.issue("agents.example").save(tmp_path)
    options = ("--nnodes", "1:3", "--lease-ttl", "30", "--tls-ca", ca.save(tmp_path))
    tls = ("--tls-server-name", "agents.example", "--tls-cert", saved["cert"], "--tls-key", saved["key"])
    with Job(tmp_path, options + tls, store=url) as job:
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
        assert "the others continued without this node" not in elsewhere.output
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
            assert ("from a different script or arguments: removing it" in node.output) is others
            wait_until(lambda at=first.step: job.steps()[-1].step > at + 2, "some steps are saved")
            if not others:
                node.signal_all(signal.SIGKILL)
                node.wait()
        job.end()
        assert node.wait() == ExitCode.DONE


def test_waiting_and_missing_nodes(tmp_path: Path) -> None:
    """Too few nodes, enough, one too many, one with another script, and one lost."""
    command, environ = [str(TRAIN_STATE), str(tmp_path)], {"PYTHONPATH": str(ROOT)}
    options = ("--nnodes", "2:2", "--rdzv-conf", "join_timeout=377", "--lease-ttl", "60")
    with Job(tmp_path, options, command, environ=environ) as job:
        first = job.start()
        words = "1 of at least 2 nodes are here: waiting up to 377 s for more (--rdzv-conf join_timeout=SECONDS)"
        wait_until(lambda: words in first.output, "it says so when it comes")
        second = job.start()
        job.wait_for_world(2)
        with open_store(job.url) as store:
            records = f"{prefix(job.name)}nodes/"
            wait_until(
                lambda: all(NodeRecord.decode(one.value).slot_nbytes for one in store.list(records)),
                "each says how much memory those who come will need",
            )

        (tmp_path / "hello.py").write_text("print('hello')")
        code, said = job.run(command=["hello.py"])
        assert code == 2, said
        assert f"job {job.name} runs train_state.py, not hello.py: use another --rdzv-id for another job" in said
        reserve = job.start()
        wait_until(lambda: "the job has its maximum of 2 nodes: waiting for a place" in reserve.output, "it says so")
        steps = len(job.steps())
        wait_until(lambda: len(job.steps()) > steps, "the training goes on")
        assert {one.generation for one in job.steps()} == {0}, "nobody has disturbed it"

        reserve.kill(signal.SIGTERM)
        assert reserve.wait() == 143
        lost, count = job.member(second), first.output.count(words)
        second.signal_all(signal.SIGKILL)
        wait_until(lambda: first.output.count(words) > count, "it says so when the other is lost")
        assert f"stopping the workers: lost {lost}" in first.output
        first.kill(signal.SIGTERM)
        assert first.wait() == 143


def test_unused_job_takes_another_script(tmp_path: Path) -> None:
    with Job(tmp_path, options=("--nnodes", "1", "--no-prewarm")) as job:
        for name in ("first.py", "second.py"):
            (tmp_path / name).write_text("raise SystemExit(7)")
            code, said = job.run(command=[name])
            assert code == 1, said
            assert "exit code 7" in said
            job.nothing_is_left()


def test_older_jobs_state_is_not_used(tmp_path: Path) -> None:
    """The store was removed and made anew: a state in memory of then would count as newer than any of now.

    Neither is it stored, though the agent takes the old folder over before it knows.
    """
    stored = tmp_path / "checkpoints"
    options = ("--nnodes", "1", "--checkpoint", str(stored))
    with Job(tmp_path, options, [str(TRAIN_STATE), str(tmp_path)]) as job:
        first = job.start()
        wait_until(lambda: any(one.step > 20 for one in job.steps()), "steps that are in memory")
        first.kill()
        first.process.wait()
        wait_until(lambda: not job.processes(), "its workers die with it")
        for file in tmp_path.glob("store.sqlite*"):
            file.unlink()
        begun = job.steps()[-1].time
        with open_store(job.url):  # made anew
            again = job.start()
            assert job.wait_for_world(1, after=begun)[0].step < 5
            assert "left the state of an earlier job in memory: removing it" in again.output
        job.end()
        assert again.wait() == 0
        steps = {int(path.name.partition("-")[2].partition(".")[0]) for path in stored.iterdir()}
        assert steps == {max(one.step for one in job.steps() if one.time > begun)}


def test_spare_replaces_a_broken_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """There is no GPU: the workers raise CUDA's own words."""
    with Job(tmp_path, options=("--nnodes", "1:2", "--lease-ttl", "60")) as job:
        for gpu in range(2):
            job.environ["CUDA_VISIBLE_DEVICES"] = str(gpu)
            job.start()
        first = job.wait_for_world(2)
        job.environ["CUDA_VISIBLE_DEVICES"] = "2"
        spare = job.start()
        wait_until(lambda: "waiting for a place" in spare.output, "a third node waits")
        name = next(each.node for each in first if each.rank == 0)
        faulty = next(node for node in job.nodes if node.name == name)
        at = job.tell(0, "ecc")
        assert faulty.wait() == 69
        assert "this node's GPU has failed (rank 0: RuntimeError: CUDA error: uncorrectable ECC error" in faulty.output
        assert "`edl run --readmit` lets it join again" in faulty.output
        assert {each.node for each in job.wait_for_world(2, after=at)} == {"node-0", "node-1", "node-2"} - {name}

        job.environ["CUDA_VISIBLE_DEVICES"] = name.removeprefix("node-")
        code, output = job.run()
        assert code == 69, "it does not come back by itself"
        assert "excludes this host (rank 0: RuntimeError: CUDA error: uncorrectable ECC" in output
        assert main(["status", job.name, "--store", job.url]) == 0
        out = " ".join(capsys.readouterr().out.split())
        assert "is left out (rank 0: RuntimeError: CUDA error: uncorrectable ECC error encountered)" in out
        assert main(["status", job.name, "--json", "--store", job.url]) == 0
        (left_out,) = json.loads(capsys.readouterr().out)["left_out"]
        assert left_out["clear"] is True
