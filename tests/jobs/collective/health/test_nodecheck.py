"""The node check with real processes, one of which is stopped or slow."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

NODE = """\
import json, sys
from dataclasses import asdict
import torch
from edl.collective.agent.health.node_check.runner import NodeCheckSettings, check_nodes
from edl.discovery import open_store

url, node, nodes = sys.argv[1:]
print("here", flush=True)
chosen = NodeCheckSettings(**json.loads(sys.stdin.readline()))
with open_store(url) as store:
    found = check_nodes(store, "jobs/j/check/0", node, "127.0.0.1", nodes.split(","), chosen)
print(json.dumps(asdict(found)), flush=True)
"""


FAST_CLOCK = """\
import time

as_it_is = time.perf_counter
time.perf_counter = lambda: 20 * as_it_is()
"""


class Nodes:
    """Processes that take part in one check, with a time limit for a machine as busy as it is when they are started."""

    def __init__(self, url: str, names: str, environ: Mapping[str, Mapping[str, str]], settings: Any) -> None:
        began = time.monotonic()
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.processes = {
            name: subprocess.Popen(  # type: ignore[call-overload]
                [sys.executable, "-c", NODE, url, name, ",".join(names)],
                env={**os.environ, **environ.get(name, {})},
                **pipes,
            )
            for name in names
        }
        for process in self.processes.values():
            assert process.stdout.readline() == "here\n"
        # They have imported torch at the same time, as their probes will, which do little else.
        timeout_s = max(settings.pop("timeout_s"), 5.0 * (time.monotonic() - began))
        self.settings = json.dumps({"timeout_s": timeout_s, **settings})

    def begin(self) -> None:
        for process in self.processes.values():
            process.stdin.write(self.settings + "\n")
            process.stdin.flush()

    def verdict(self, name: str) -> dict[str, dict[str, str]]:
        found: dict[str, dict[str, str]] = json.loads(self.processes[name].stdout.readline())
        return found

    def close(self) -> None:
        for process in self.processes.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                for child in psutil.Process(process.pid).children(recursive=True):
                    child.kill()
            process.kill()
            process.wait()
            process.stdin.close()
            process.stdout.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Nodes]]:
    with contextlib.ExitStack() as stack:

        def start_nodes(names: str, environ: Mapping[str, Mapping[str, str]] = {}, **settings: float) -> Nodes:
            nodes = Nodes(f"sqlite:///{tmp_path}/discovery.sqlite", names, environ, settings)
            stack.callback(nodes.close)
            return nodes

        yield start_nodes


@pytest.mark.slow
@pytest.mark.timeout(900)  # a probe imports torch, in each round, on each node; a silent one is waited for twice
def test_good_nodes_are_all_fit(start: Callable[..., Nodes]) -> None:
    nodes = start("abc", timeout_s=60.0, factor=50.0)
    nodes.begin()
    assert [nodes.verdict(name) for name in "abc"] == [{"faulty": {}, "slow": {}}] * 3


@pytest.mark.slow
@pytest.mark.timeout(900)  # a probe imports torch, in each round, on each node; a silent one is waited for twice
def test_stopped_node_is_named(start: Callable[..., Nodes]) -> None:
    """A stopped node is named and the others are fit."""
    nodes = start("abc", timeout_s=25.0, factor=50.0)
    nodes.processes["a"].send_signal(signal.SIGSTOP)  # the first of its group: nobody says where to meet
    nodes.begin()
    expected = {"faulty": {"a": "no answer"}, "slow": {}}
    assert [nodes.verdict(name) for name in "bc"] == [expected] * 2


@pytest.mark.slow
@pytest.mark.timeout(900)  # a probe imports torch, in each round, on each node; a silent one is waited for twice
def test_a_slow_node_is_named_slow(start: Callable[..., Nodes], tmp_path: Path) -> None:
    """To take more time for the same work, the probe of one node is given a clock that runs faster."""
    (tmp_path / "sitecustomize.py").write_text(FAST_CLOCK)
    nodes = start("ab", environ={"a": {"PYTHONPATH": str(tmp_path)}}, timeout_s=60.0, factor=2.0)
    nodes.begin()
    found = nodes.verdict("b")
    assert found["faulty"] == {}
    assert "compute on cpu took" in found["slow"]["a"]
    assert "compute" not in found["slow"].get("b", "")
