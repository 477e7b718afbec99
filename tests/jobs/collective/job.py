"""A job of real `edl run` processes: nodes that are started, killed, stopped; and what their workers wrote."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.waiting import wait_until

EDL = str(Path(sys.executable).with_name("edl"))
ROOT = Path(__file__).parents[3]
TRAIN = Path(__file__).with_name("train.py")
TRAIN_STATE = Path(__file__).with_name("train_state.py")
MARK = "EDL_TEST_MARK"
START_S = 100.0


@dataclass(frozen=True)
class Step:
    """A step that one rank finished, at `time` of `time.monotonic()`."""

    generation: int
    rank: int
    world: int
    step: int
    pid: int
    time: float
    node: str = ""


@dataclass
class Node:
    """One `edl run` process, in a session of its own."""

    name: str
    process: subprocess.Popen[bytes]
    output_path: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def output(self) -> str:
        return self.output_path.read_text(errors="replace")

    @property
    def zygote(self) -> int:
        module = "edl.collective.agent.processes.zygote"
        return next(each.pid for each in psutil.Process(self.pid).children() if module in " ".join(each.cmdline()))

    @property
    def workers(self) -> list[int]:
        return sorted(each.pid for each in psutil.Process(self.zygote).children() if each.status() != "zombie")

    def everything(self) -> list[int]:
        """The agent and all that descends from it, the agent first."""
        return [self.pid, *(each.pid for each in psutil.Process(self.pid).children(recursive=True))]

    def signal_all(self, number: int) -> None:
        """As when the machine goes: the agent first, so that it cannot react."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for pid in self.everything():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Signal the agent alone."""
        self.process.send_signal(number)

    def wait(self, deadline_s: float = START_S) -> int:
        """The exit code."""
        try:
            return self.process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} does not end:\n{self.output}") from None


@dataclass
class Job:
    """All nodes of one job.

    Args:
        folder: for the store, the workers' log and what they print.
        options: of `edl run`, before the script.
        command: the script and its arguments; without one, `train.py` here, which goes on until `end`.
        store: URL; a SQLite file in `folder` if empty. With `edl://HOST:PORT` a node on HOST serves it.
        program: what runs an agent.
    """

    folder: Path
    options: Sequence[str] = ("--nnodes", "1:4")
    command: Sequence[str] = ()
    store: str = ""
    environ: dict[str, str] = field(default_factory=dict)
    program: Sequence[str] = (EDL, "run")
    name: str = field(default_factory=lambda: f"job-{uuid.uuid4().hex[:8]}")
    nodes: list[Node] = field(default_factory=list)
    _steps: list[Step] = field(default_factory=list)
    _read_bytes: int = 0

    def __enter__(self) -> Job:
        self.folder.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        for node in self.nodes:
            node.signal_all(signal.SIGKILL)
            node.process.wait()
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self.shared_memory, ignore_errors=True)
        if kind is not None:
            for node in self.nodes:
                print(f"--- {node.name} (exit code {node.process.returncode})\n{node.output}")

    def start(self, *options: str, command: Sequence[str] = (), stdin: Any = subprocess.DEVNULL) -> Node:
        """One more node."""
        name = f"node-{len(self.nodes)}"
        path = self.folder / f"{name}.out"
        line = [
            *self.program, *self.options, "--rdzv-id", self.name,
            *self._meeting,
            *options, *(command or self.command or [str(TRAIN), str(self.folder)]),
        ]  # fmt: skip
        environ = {**os.environ, MARK: self.name, "NODE": name, **self.environ}
        with path.open("wb") as output:
            process = subprocess.Popen(
                line, stdin=stdin, stdout=output, stderr=output, env=environ, start_new_session=True, cwd=self.folder
            )
        self.nodes.append(Node(name, process, path))
        return self.nodes[-1]

    def run(self, *options: str, command: Sequence[str] = ()) -> tuple[int, str]:
        """One node until it ends: its exit code, and what it and its workers printed."""
        node = self.start(*options, command=command)
        return node.wait(), node.output

    # --- What the workers wrote. ---

    def steps(self) -> list[Step]:
        """All steps until now; a line that is being written is left out."""
        path = self.folder / "steps.jsonl"
        if path.exists():
            with path.open("rb") as file:
                file.seek(self._read_bytes)
                whole = file.read().rpartition(b"\n")[0]
            if whole:
                self._read_bytes += len(whole) + 1
                self._steps += [Step(**json.loads(line)) for line in whole.split(b"\n")]
        return self._steps

    def wait_for_world(self, size: int, after: float = 0.0) -> list[Step]:
        """Wait for a step of every rank of one generation of this size; the first of each rank after `after`."""

        def complete() -> list[Step]:
            first: dict[tuple[int, int], Step] = {}
            for one in self.steps():
                if one.world == size and one.time > after:
                    first.setdefault((one.generation, one.rank), one)
            newest = max((generation for generation, _ in first), default=-1)
            those = [one for (generation, _), one in first.items() if generation == newest]
            return those if len(those) == size else []

        return wait_until(complete, f"{size} ranks making steps", START_S)

    def tell(self, rank: int, action: str) -> float:
        """Have the worker of this rank do something at its next step. Returns when it was told."""
        path = self.folder / f"do-{rank}"
        path.with_suffix(".new").write_text(action)
        at = time.monotonic()
        path.with_suffix(".new").rename(path)
        return at

    @property
    def _meeting(self) -> Sequence[str]:
        """The option that says where nodes meet: torchrun's, if a node serves the store; the job's own, if given."""
        if any(option.startswith("--rdzv-endpoint") for option in self.options):
            return ()
        served = self.url.startswith("edl://")
        return ["--rdzv-endpoint", self.url.removeprefix("edl://")] if served else ["--store", self.url]

    def end(self) -> None:
        """Let the script come to its end."""
        (self.folder / "end").touch()

    def member(self, node: Node) -> str:
        """What an agent that lives, or was killed, calls itself in the job."""
        return (self.host_of(node) / "node").read_text()

    def host_of(self, node: Node) -> Path:
        """The folder in memory of one node's agent."""
        return next(path.parent for path in self.shared_memory.glob("*/node") if f"-{node.pid}-" in path.read_text())

    # --- What is left behind. ---

    def processes(self) -> list[int]:
        """All processes of this job, found by their environment, whoever their parent is."""
        mark = f"{MARK}={self.name}".encode()
        return [int(path.name) for path in Path("/proc").glob("[0-9]*") if mark in _environ(path)]

    @property
    def shared_memory(self) -> Path:
        """Where the job's agents keep what is in memory."""
        digest = hashlib.sha256(f"{self.url} {self.name}".encode()).hexdigest()[:16]
        return Path(f"/dev/shm/edl-{os.getuid()}") / digest

    @property
    def url(self) -> str:
        """Of the store."""
        return self.store or f"sqlite:///{self.folder}/store.sqlite"

    def nothing_is_left(self, *, state: bool = False) -> None:
        """No process, no file in shared memory; with `state`, that stays for whoever continues the job."""
        wait_until(lambda: not self.processes(), "the job's processes have ended")
        assert self.shared_memory.exists() is state


def _environ(process: Path) -> list[bytes]:
    try:
        return (process / "environ").read_bytes().split(b"\0")
    except OSError:
        return []
