"""How jobs end before their script does: errors, exit codes, termination messages, and workers without memory."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edl.cgroups import find_memory_cgroup
from edl.collective.goodput.records import read_job
from edl.discovery import open_store
from edl.master.scaling.termination_messages import parse_termination_message
from edl.master.scaling.terminations import TerminationCause, find_termination_cause
from tests.jobs.collective.job import EDL, Job, Node
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(300)


def start(job: Job, cgroup: Path | None = None) -> tuple[Node, Path]:
    """One more node, and its termination message."""
    log = job.folder / f"termination-{len(job.nodes)}"
    job.environ["EDL_TERMINATION_LOG"] = str(log)
    if cgroup is not None:
        job.program = ("sh", "-c", f'echo $$ > {cgroup}/cgroup.procs && exec "$0" "$@"', EDL, "run")
    return job.start(), log


def read(log: Path) -> dict[str, Any]:
    data = log.read_bytes()
    assert len(data) <= 4096
    values = json.loads(data)
    assert isinstance(values, dict)
    return values


def cause_of(log: Path) -> TerminationCause:
    return find_termination_cause(parse_termination_message(log.read_text())).cause


def test_errors_are_forgiven_once_in_a_job(tmp_path: Path) -> None:
    """A node was asked to leave before; all that are there at the end say the same, and so does the job's history."""
    with Job(tmp_path, options=("--nnodes", "1:3", "--max-restarts", "1", "--lease-ttl", "60")) as job:
        started = [start(job) for _ in range(3)]
        job.wait_for_world(3)
        leaving, log = started.pop()
        leaving.kill(signal.SIGTERM)
        assert leaving.wait() == 143
        asked = {"cause": "", "exit_code": 143, "rank": -1, "oom_kills": 0, "message": "asked to leave (SIGTERM)"}
        assert {name: value for name, value in read(log).items() if name != "node"} == asked
        assert cause_of(log) is TerminationCause.PREEMPTED

        at = max(step.time for step in job.steps())
        before = job.wait_for_world(2, after=at)[0].generation
        at = job.tell(0, "exit 3")
        wait_until(lambda: job.wait_for_world(2, after=at)[0].generation > before, "they go on after the error")
        last = job.wait_for_world(2, after=at)
        job.tell(1, "raise")  # on the other node, which has forgiven nothing itself
        assert [node.wait() for node, _ in started] == [1, 1]
        failing = next(step.node for step in last if step.rank == 1)
        for node, log in started:
            assert "exit code 3" in node.output
            assert 'train.py", line' in node.output, "the traceback"
            message = read(log)
            assert (message["cause"], message["rank"]) == ("error", 1)
            (pid,) = [node.pid for node, _ in started if node.name == failing]
            assert f"-{pid}-" in message["node"]
            assert message["message"].startswith("rank 1: "), message
            assert message["message"].rstrip().endswith("LookupError: the user's own mistake"), message
            assert cause_of(log) is TerminationCause.USER_ERROR
        with open_store(job.url) as store:
            error = [event.text for event in read_job(store, job.name).events if event.kind == "error"][-1]
        assert error.endswith("exit code 1 (rank 1): LookupError: the user's own mistake")
        job.nothing_is_left()


def test_job_with_too_few_nodes(tmp_path: Path) -> None:
    with Job(tmp_path, ("--nnodes", "2:3", "--rdzv-conf", "join_timeout=1", "--no-prewarm")) as job:
        node, log = start(job)
        assert node.wait() == 75
        assert "only 1 node of at least 2 came within" in node.output
        message = read(log)
        assert (message["exit_code"], message["cause"]) == (75, "")
        assert "only 1 node of at least 2" in message["message"]


HEADROOM = 256 << 20  # more than any other process of a node is larger than a worker, so that the kernel takes a worker


class MemoryLimit:
    """A memory cgroup, a folder in the hierarchy that this process is in."""

    def __init__(self, parent: Path, version: int) -> None:
        self.version = version
        self.path = parent / f"edl-test-{uuid.uuid4().hex[:8]}"
        self.path.mkdir()

    def limit(self) -> None:
        """Leave the cgroup's processes little more memory than they have."""
        usage, limit = {
            1: ("memory.usage_in_bytes", "memory.limit_in_bytes"),
            2: ("memory.current", "memory.max"),
        }[self.version]
        nbytes = int((self.path / usage).read_text()) + HEADROOM
        (self.path / limit).write_text(str(nbytes))
        swap = self.path / ("memory.memsw.limit_in_bytes" if self.version == 1 else "memory.swap.max")
        with contextlib.suppress(OSError):  # a kernel that does not count swap
            swap.write_text(str(nbytes if self.version == 1 else 0))

    def remove(self) -> None:
        def removed() -> bool:
            with contextlib.suppress(OSError):  # the kernel takes its time to count the last process out
                self.path.rmdir()
            return not self.path.exists()

        wait_until(removed, f"{self.path} is removed")


@pytest.fixture
def limits() -> Iterator[list[MemoryLimit]]:
    """The kernel's own limits: each of two nodes has a memory cgroup of its own, as a container has."""
    found = find_memory_cgroup()
    if found is None or not os.access(found.folder, os.W_OK):
        pytest.skip("this user may not make memory cgroups here")
    limits = [MemoryLimit(found.folder, found.version) for _ in range(2)]
    try:
        if not (limits[0].path / "cgroup.procs").exists() or not (limits[0].path / found.events_file.name).exists():
            pytest.skip("a cgroup that is made here does not limit memory")
        yield limits
    finally:
        for limit in limits:
            limit.remove()


def test_node_without_memory_leaves(tmp_path: Path, limits: list[MemoryLimit]) -> None:
    """The kernel kills a worker: its node leaves and says why, and the other goes on."""
    with Job(tmp_path, options=("--nnodes", "1:2", "--leave-on-oom", "--lease-ttl", "60")) as job:
        started = [start(job, limit.path) for limit in limits]
        first = job.wait_for_world(2)
        name = next(step.node for step in first if step.rank == 1)
        place = next(place for place, (node, _) in enumerate(started) if node.name == name)
        (small, log), (other, other_log) = started[place], started[1 - place]
        member = job.member(small)
        limits[place].limit()
        at = job.tell(1, "eat")
        assert small.wait() == 137
        assert "this node leaves, for a start with more memory" in small.output
        message = read(log)
        assert "too little memory" in message.pop("message")
        assert message.pop("oom_kills") >= 1
        assert message == {"cause": "killed", "exit_code": 137, "rank": 1, "node": member}
        assert cause_of(log) is TerminationCause.OUT_OF_MEMORY
        assert [step.node for step in job.wait_for_world(1, after=at)] == [other.name], "the other goes on"
        assert f"lost {member}" not in other.output, "it was told, and did not wait for a lease's end"
        job.end()
        assert other.wait() == 0
        assert cause_of(other_log) is TerminationCause.SUCCEEDED
        job.nothing_is_left()
