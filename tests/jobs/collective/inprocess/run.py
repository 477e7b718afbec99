"""Starts `train.py` under `edl run`, follows what its ranks write, and kills them."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

JOB = Path(__file__).with_name("train.py")
Row = dict[str, Any]


DEADLINE_S = 240.0
"""For what takes seconds on an idle machine: processes that import torch share its cores with other tests' there."""

CLINGING_S = "10"
"""So long a worker is waited for that does not let go: beside it, another is not to be late on a busy machine."""


def until(
    condition: Callable[[], Any], what: str, timeout_s: float = DEADLINE_S, output: Callable[[], str] = str
) -> Any:
    """Poll until `condition()` is true, and return it. `output` is called for the message of a failure."""
    deadline = time.monotonic() + timeout_s
    while not (result := condition()):
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s for {what}\n{output()}"
        time.sleep(0.01)
    return result


@dataclass
class Job:
    """One job in a folder.

    Attributes:
        folder: for the ranks' diaries, the agents' output, and the store.
        arguments: of the script, after the folder.
    """

    folder: Path
    arguments: list[str]
    agents: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        for agent in self.agents:
            agent.kill()
            agent.wait()
        # What killed agents leave in memory for the next one of their job, which never comes.
        digest = hashlib.sha256(f"sqlite:///{self.folder}/store.sqlite {self.name}".encode()).hexdigest()[:16]
        shutil.rmtree(f"/dev/shm/edl-{os.getuid()}/{digest}", ignore_errors=True)

    @property
    def name(self) -> str:
        return str(self.folder).strip("/").replace("/", "-")

    def start(self, workers: int, nodes: str = "1:4") -> subprocess.Popen[bytes]:
        """Start an agent, and return at once. All of them meet in a store in the folder."""
        store = ["--store", f"sqlite:///{self.folder}/store.sqlite", "--rdzv-id", self.name]
        script = [str(JOB), str(self.folder), *self.arguments]
        # What is lost here is seen to be lost at once, by the end of a process; a lease may be as long as it likes.
        options = ["--nnodes", nodes, "--nproc-per-node", str(workers), "--lease-ttl", "15", *store]
        # A survivor that waits for a busy disk or core is not to be replaced.
        options += ["--regroup-timeout", CLINGING_S if "clings" in self.arguments else "60"]
        with (self.folder / "output").open("ab") as output:
            environ = {**os.environ, "OMP_NUM_THREADS": "1"}
            command = [sys.executable, "-m", "edl", "run", *options, *script]
            agent = subprocess.Popen(command, stdout=output, stderr=output, env=environ)
        self.agents.append(agent)
        return agent

    @property
    def output(self) -> str:
        return (self.folder / "output").read_text(errors="replace")

    def rows(self) -> dict[int, list[Row]]:
        """What each process wrote, by its id. A line that is being written is left out."""
        found: dict[int, list[Row]] = {}
        for path in self.folder.glob("*.jsonl"):
            lines = path.read_text().split("\n")[:-1]
            found[int(path.stem)] = [json.loads(line) for line in lines]
        return found

    def world(self, size: int, after: int = -1, steps: int = 2) -> dict[int, Row]:
        """Wait until `size` ranks train in a generation later than `after`. Returns their last rows, by pid."""

        def found() -> dict[int, Row] | None:
            by_generation: dict[int, dict[int, Row]] = defaultdict(dict)
            for pid, rows in self.rows().items():
                if rows and sum(row["generation"] == rows[-1]["generation"] for row in rows) >= steps:
                    by_generation[rows[-1]["generation"]][pid] = rows[-1]
            newest = max(by_generation, default=-1)
            together = by_generation[newest]
            if newest > after and len(together) == size == next(iter(together.values()))["size"]:
                return together
            return None

        what = f"a world of {size} after generation {after}"
        return until(lambda: found() or self._alive(), what, output=lambda: self.output)

    def _alive(self) -> None:
        assert any(agent.poll() is None for agent in self.agents), self.output

    def end(self, timeout_s: float = DEADLINE_S) -> list[int]:
        """Wait for all agents. Returns their exit codes."""
        deadline = time.monotonic() + timeout_s
        return [agent.wait(max(0.1, deadline - time.monotonic())) for agent in self.agents]

    def resumed_s(self, survivors: list[int], generation: int, since: float) -> float:
        """Seconds from `since` to the slowest survivor's first finished step after `generation`."""

        def first(pid: int) -> float | None:
            return next((row["at"] for row in self.rows()[pid] if row["generation"] > generation), None)

        what = f"steps of {survivors} after generation {generation}"
        until(lambda: all(first(pid) for pid in survivors), what, output=lambda: self.output)
        return max(first(pid) or 0.0 for pid in survivors) - since


def kill(pid: int, number: int = signal.SIGKILL) -> float:
    """Send a signal; returns when, of the clock that rows have."""
    at = time.monotonic()
    os.kill(pid, number)
    return at


def check_steps(job: Job, steps: int | None = None) -> None:
    """No process lost or repeated a step of the `steps` that there are, and all agree on the parameters after each.

    A step that one survivor had finished when a peer died, and another had not, is handed to that one with the state:
    it is missing from its diary, at the seam of two generations, and in the other's.
    """
    finished = {row["step"] for rows in job.rows().values() for row in rows}
    for pid, rows in job.rows().items():
        for before, after in pairwise(rows):
            seam = after["generation"] > before["generation"]
            between = list(range(before["step"] + 1, after["step"]))
            where = f"{pid}: {before}, {after}\n{job.output}"
            assert after["step"] > before["step"], where
            assert not between or (seam and len(between) == 1 and between[0] in finished), where
        assert all(row["losses"] == row["step"] + 1 for row in rows)
    check_parameters(job, steps)


def check_parameters(job: Job, steps: int | None = None) -> None:
    """No step is missing, and after each all ranks of all generations that made it have the same parameters."""
    hashes: dict[int, set[str]] = defaultdict(set)
    for rows in job.rows().values():
        for row in rows:
            hashes[row["step"]].add(row["hash"])
    assert set(hashes) == set(range(len(hashes) if steps is None else steps))
    assert not {step: found for step, found in hashes.items() if len(found) > 1}
