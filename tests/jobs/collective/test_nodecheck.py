"""The node check with real probes, of nodes that are fit, stopped, slow and broken."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.jobs.collective.job import Job

pytestmark = pytest.mark.timeout(600)  # a probe imports torch, in each round, on each node

# Found by each Python process: a probe's clock is made fast, so that the same work takes longer, or it fails.
SITE = """\
import os, sys, time

if any("node_check" in word for word in sys.orig_argv):
    if os.environ.get("PROBE") == "slow":
        as_it_is = time.perf_counter
        time.perf_counter = lambda: 50 * as_it_is()
    elif os.environ.get("PROBE") == "broken":
        raise SystemExit("this node's probe is broken")
"""
NODE = """\
import json, sys
from dataclasses import asdict
import torch
from edl.collective.agent.health.node_check.runner import NodeCheckSettings, check_nodes
from edl.discovery import open_store

url, node, nodes = sys.argv[1:]
print("here", flush=True)
with open_store(url) as store:
    settings = NodeCheckSettings(timeout_s=float(sys.stdin.readline()), factor=10.0)
    found = check_nodes(store, "jobs/j/check/0", node, "127.0.0.1", nodes.split(","), settings)
print(json.dumps(asdict(found)), flush=True)
"""


def test_stopped_and_slow_nodes_are_named(tmp_path: Path) -> None:
    """By all others alike: the first of its group is stopped, so that nobody says where to meet."""
    (tmp_path / "sitecustomize.py").write_text(SITE)
    processes: dict[str, subprocess.Popen[str]] = {}
    with contextlib.ExitStack() as stack:
        begun = time.monotonic()
        for name in "abc":
            environ = {**os.environ, "PYTHONPATH": str(tmp_path), "PROBE": "slow" if name == "c" else ""}
            line = [sys.executable, "-c", NODE, f"sqlite:///{tmp_path}/discovery.sqlite", name, "a,b,c"]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            processes[name] = subprocess.Popen(line, env=environ, **pipes)
            stack.callback(_kill, processes[name])
        for process in processes.values():
            assert process.stdout.readline() == "here\n"
        # They have imported torch at the same time, as their probes will, which do little else.
        timeout_s = max(20.0, 5 * (time.monotonic() - begun))
        processes["a"].send_signal(signal.SIGSTOP)
        for process in processes.values():
            process.stdin.write(f"{timeout_s}\n")
            process.stdin.flush()
        found = [json.loads(processes[name].communicate(timeout=500)[0]) for name in "bc"]
    assert found[0] == found[1]
    assert found[0]["faulty"] == {"a": "no answer"}
    assert "compute on cpu took" in found[0]["slow"]["c"]
    assert "compute" not in found[0]["slow"].get("b", "")


def _kill(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process.pid).children(recursive=True):
            child.kill()
    process.kill()
    process.communicate()


def test_faulty_node_does_not_join(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(SITE)
    options = ("--nnodes", "1:2", "--node-check", "--rdzv-conf", "last_call_timeout=0")
    with Job(tmp_path, options, environ={"PYTHONPATH": str(tmp_path)}) as job:
        fit = job.start()
        job.wait_for_world(1)
        assert "checking itself" in fit.output
        job.environ["PROBE"] = "broken"
        code, said = job.run()
        assert code == 69, said
        assert "this node is faulty: could not compute: SystemExit: this node's probe is broken; it does not" in said
        job.end()
        assert fit.wait() == 0
        assert {one.generation for one in job.steps()} == {0}
