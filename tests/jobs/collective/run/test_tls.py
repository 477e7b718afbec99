"""`edl run` whose agents speak TLS among one another."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.certificates import Authority
from tests.jobs.collective.checkpoint.test_run_sharded import SCRIPT, wait_for_replicas
from tests.jobs.collective.checkpoint.world import ROOT
from tests.jobs.collective.job import Job
from tests.plugins_consul import free_ports

LEASE_S = 60  # so long does the agent that serves the store wait for the killed one in the end


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_run_with_tls(tmp_path: Path) -> None:
    """The store is served, replicas arrive, and the death of an agent is seen long before its lease ends."""
    ca = Authority()
    saved = ca.issue("agents.example").save(tmp_path)
    options = (
        *("--nnodes", "1:2", "--lease-ttl", str(LEASE_S)),
        *("--tls-ca", ca.save(tmp_path), "--tls-server-name", "agents.example"),
        *("--tls-cert", saved["cert"], "--tls-key", saved["key"]),
    )
    url = f"edl://127.0.0.1:{free_ports(1)[0]}"
    with Job(tmp_path, options, [str(SCRIPT), str(tmp_path)], url, environ={"PYTHONPATH": str(ROOT)}) as job:
        nodes = [job.start() for _ in range(2)]
        first = job.wait_for_world(2)[0].generation
        wait_for_replicas(job, first, nodes)
        assert not any("did not take a replica" in node.output for node in nodes)
        lost, at = nodes.pop(1), time.monotonic()
        lost.signal_all(signal.SIGKILL)
        job.wait_for_world(1, after=at)
        assert time.monotonic() - at < LEASE_S, "only the lease told of the death"
        job.end()
        assert [node.wait() for node in nodes] == [0]
        job.nothing_is_left()


def test_run_with_half_of_tls(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "edl", "run", "--standalone", "--tls-ca", Authority().save(tmp_path), __file__]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2
    assert "takes all of --tls-ca, --tls-cert and --tls-key" in done.stderr
