"""Copies of examples, and the commands of their READMEs as processes."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from edl.discovery import open_registry
from tests.jobs.collective.job import Node
from tests.waiting import wait_until

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
WAIT_S = 300.0  # what takes seconds on an idle machine: many of these processes import PyTorch and more
MADE = ("__pycache__", "*.pt", "*.csv", "counts", "runs", "runs.json", "results.jsonl", "students.png", "teacher*")


def commands(readme: Path) -> list[list[str]]:
    """The lines of a page's bash blocks, split into words."""
    blocks = re.findall(r"^```bash\n(.*?)^```$", readme.read_text(), re.MULTILINE | re.DOTALL)
    return [shlex.split(line) for block in blocks for line in block.splitlines() if line]


def right(told: str) -> float:
    """The last share of right answers that was printed."""
    found = re.findall(r"([\d.]+)% right", told)
    assert found, told
    return float(found[-1]) / 100


class Example:
    """A copy of an example without what it makes, and with a store of its own."""

    def __init__(self, name: str, folder: Path, *needs: str) -> None:
        for module in needs:
            if not any((Path(entry) / module).is_dir() for entry in sys.path):
                pytest.skip(f"the example needs {module}")
        shutil.copytree(EXAMPLES / name, folder / name, ignore=shutil.ignore_patterns(*MADE))
        self.folder = folder / name
        self.discovery = f"sqlite:///{folder}/discovery.sqlite"
        own = {"EDL_DISCOVERY": self.discovery, "OMP_NUM_THREADS": "1", "MPLCONFIGDIR": str(folder)}
        self.environ: Mapping[str, str] = {**os.environ, **own}
        self.commands = commands(self.folder / "README.md")

    def run(self, command: list[str], *more: str) -> str:
        """What a command prints that ends well."""
        line = [*_program(command), *more]
        pipes: dict[str, Any] = {"capture_output": True, "text": True, "timeout": WAIT_S}
        done = subprocess.run(line, cwd=self.folder, env=self.environ, **pipes)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    @contextlib.contextmanager
    def started(self, name: str, command: list[str], *more: str) -> Iterator[Node]:
        """A process that is killed in the end, with all that it started, if it has not ended by itself."""
        path = self.folder.parent / f"{name}.out"
        with path.open("wb") as output:
            process = subprocess.Popen(
                [*_program(command), *more], cwd=self.folder, env=self.environ, stdout=output, stderr=output
            )
        node = Node(name, process, path)
        try:
            yield node
        finally:
            with contextlib.suppress(ProcessLookupError):
                node.signal_all(signal.SIGKILL)
            process.wait()

    @contextlib.contextmanager
    def served(self, name: str, command: list[str], *more: str) -> Iterator[Node]:
        """A teacher that is found; it ends well in the end, if it lives."""
        with self.started(name, command, *more) as server, open_registry(self.discovery) as registry:
            service = command[command.index("--service") + 1]
            before = len(registry.snapshot(service).instances)

            def found() -> bool:
                assert server.process.poll() is None, server.output
                return len(registry.snapshot(service).instances) > before

            wait_until(found, f"{service} is served", WAIT_S)
            yield server
            if server.process.poll() is None:
                server.process.terminate()
                assert server.wait() == 0, server.output


def _program(command: list[str]) -> list[str]:
    return [sys.executable, *(["-m", "edl"] if command[0] == "edl" else []), *command[1:]]


def waits_for(node: Node, pattern: str) -> re.Match[str]:
    """Wait until a node has printed what matches `pattern`; fails if it has ended."""

    def look() -> re.Match[str] | None:
        found = re.search(pattern, node.output)
        assert found or node.process.poll() is None, node.output
        return found

    found = wait_until(look, pattern, WAIT_S)
    assert found is not None
    return found
