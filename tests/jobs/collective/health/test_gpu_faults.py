"""A node whose GPU fails, in a job of real `edl run` processes. There is no GPU: the workers raise CUDA's own words."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edl.cli import main
from tests.jobs.collective.job import Job, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


def test_spare_replaces_a_broken_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Spare takes the place of a broken gpu."""
    with Job(tmp_path, options=("--nnodes", "2:2", "--lease-ttl", "10")) as job:
        for gpu in range(2):
            job.environ["CUDA_VISIBLE_DEVICES"] = str(gpu)
            job.start()
        first = job.wait_for_world(2)
        job.environ["CUDA_VISIBLE_DEVICES"] = "2"
        spare = job.start()
        wait_until(lambda: "no place for more" in spare.output, "a third node waits")
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
        assert "leaves this host out (rank 0: RuntimeError: CUDA error: uncorrectable ECC" in output
        assert main(["status", job.name, "--store", job.url]) == 0
        out = " ".join(capsys.readouterr().out.split())
        assert "is left out (rank 0: RuntimeError: CUDA error: uncorrectable ECC error encountered)" in out
        assert main(["status", job.name, "--json", "--store", job.url]) == 0
        (left_out,) = json.loads(capsys.readouterr().out)["left_out"]
        assert left_out["clear"] is True

        job.end()
        assert [node.wait() for node in job.nodes[:3] if node is not faulty] == [0, 0]
        job.nothing_is_left()


def test_fault_that_moves_on_is_the_scripts(tmp_path: Path) -> None:
    with Job(tmp_path, options=("--nnodes", "1:2", "--lease-ttl", "10")) as job:
        for gpu in range(2):
            job.environ["CUDA_VISIBLE_DEVICES"] = str(gpu)
            job.start()
        first = job.wait_for_world(2)
        name = next(each.node for each in first if each.rank == 1)
        faulty = next(node for node in job.nodes if node.name == name)
        other = next(node for node in job.nodes if node.name != name)
        at = job.tell(1, "launch")
        generation = _next_generation(job, 2, at, first[0].generation)
        at = job.tell(1, "launch")
        assert faulty.wait() == 69, "it was tried again on the same nodes, once"
        assert "has probably failed, for the second time" in faulty.output
        generation = _next_generation(job, 1, at, generation)
        _next_generation(job, 1, job.tell(0, "launch"), generation)
        job.tell(0, "launch")
        assert other.wait() == 1
        assert "no step further: the script's own error" in other.output


def _next_generation(job: Job, size: int, after: float, generation: int) -> int:
    """Wait until ranks of a newer generation make steps. Returns it."""
    wait_until(lambda: job.wait_for_world(size, after=after)[0].generation > generation, "the next generation trains")
    return job.wait_for_world(size, after=after)[0].generation
