"""The node check with real processes, one of which is stopped or slowed."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from edl.discovery import open_store

NODE = """\
import json, sys
from dataclasses import asdict
from edl.collective.agent.nodecheck_run import CheckSettings, check_nodes
from edl.discovery import open_store

url, node, nodes, settings = sys.argv[1:]
print("here", flush=True)
sys.stdin.readline()
with open_store(url) as store:
    chosen = CheckSettings(**json.loads(settings))
    found = check_nodes(store, "jobs/j/check/0", node, "127.0.0.1", nodes.split(","), chosen)
print(json.dumps(asdict(found)), flush=True)
"""


class Nodes:
    """Processes that take part in one check."""

    def __init__(self, url: str, names: str, **settings: float) -> None:
        arguments = [",".join(names), json.dumps(settings)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.processes = {
            name: subprocess.Popen([sys.executable, "-c", NODE, url, name, *arguments], **pipes)  # type: ignore[call-overload]
            for name in names
        }
        for process in self.processes.values():
            assert process.stdout.readline() == "here\n"

    def begin(self) -> None:
        for process in self.processes.values():
            process.stdin.write("go\n")
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

        def start_nodes(names: str, **settings: float) -> Nodes:
            nodes = Nodes(f"sqlite:///{tmp_path}/discovery.sqlite", names, **settings)
            stack.callback(nodes.close)
            return nodes

        yield start_nodes


@pytest.mark.slow
@pytest.mark.timeout(300)  # a probe imports torch, in each round, on each node
def test_good_nodes_are_all_fit(start: Callable[..., Nodes]) -> None:
    nodes = start("abc", timeout_s=60.0, factor=50.0)
    nodes.begin()
    assert [nodes.verdict(name) for name in "abc"] == [{"faulty": {}, "slow": {}}] * 3


@pytest.mark.slow
@pytest.mark.timeout(300)  # a probe imports torch, in each round, on each node
def test_a_stopped_node_is_named_and_the_others_are_fit(start: Callable[..., Nodes]) -> None:
    nodes = start("abc", timeout_s=25.0, factor=50.0)
    nodes.processes["a"].send_signal(signal.SIGSTOP)  # the first of its group: nobody says where to meet
    nodes.begin()
    expected = {"faulty": {"a": "no answer"}, "slow": {}}
    assert [nodes.verdict(name) for name in "bc"] == [expected] * 2


@pytest.mark.slow
@pytest.mark.timeout(300)  # a probe imports torch, in each round, on each node
def test_a_slowed_node_is_named_slow(start: Callable[..., Nodes], tmp_path: Path) -> None:
    nodes = start("ab", timeout_s=60.0, factor=2.0)
    nodes.begin()
    done = threading.Event()
    url = f"sqlite:///{tmp_path}/discovery.sqlite"
    brake = threading.Thread(target=_brake, args=(nodes.processes["a"].pid, url, done))
    brake.start()
    try:
        found = nodes.verdict("b")
    finally:
        done.set()
        brake.join()
    assert found["faulty"] == {}
    assert "compute on cpu took" in found["slow"]["a"]
    assert "compute" not in found["slow"].get("b", "")


def _brake(pid: int, url: str, done: threading.Event) -> None:
    """Let the children of `pid`, the node "a", run a fifth of the time, from when they have imported torch."""
    with open_store(url) as store:
        for number in (1, 2):
            while not done.wait(0.01) and store.get(f"jobs/j/check/0/{number}/meet/a") is None:
                pass
            while not done.wait(0.02) and store.get(f"jobs/j/check/0/{number}/result/a") is None:
                children = psutil.Process(pid).children()
                _each(children, "suspend")
                done.wait(0.08)
                _each(children, "resume")


def _each(processes: list[psutil.Process], what: str) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            getattr(process, what)()
