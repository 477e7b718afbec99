"""Nodes that the kernel kills workers of for want of memory, and what a node leaves as its termination message.

The kernel's own limit: each node has a memory cgroup of its own, as a container has.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edl.cgroups import find_memory_cgroup
from edl.master.scaling.termination_messages import parse_termination_message
from edl.master.scaling.terminations import TerminationCause, find_termination_cause
from tests.jobs.collective.job import EDL, Job, Node, stop, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

HEADROOM = 256 << 20  # more than any other process of a node is larger than a worker, so that the kernel takes a worker


class MemoryLimits:
    """Memory cgroups, a folder each, in the hierarchy that this process is in."""

    def __init__(self, folder: Path, version: int) -> None:
        self.folder = folder
        self.version = version
        self.made: list[Path] = []

    def make(self) -> Path:
        path = self.folder / f"edl-test-{uuid.uuid4().hex[:8]}"
        path.mkdir()
        self.made.append(path)
        return path

    def limit(self, path: Path) -> None:
        """Leave a cgroup's processes little more memory than they have."""
        usage, limit = {
            1: ("memory.usage_in_bytes", "memory.limit_in_bytes"),
            2: ("memory.current", "memory.max"),
        }[self.version]
        nbytes = int((path / usage).read_text()) + HEADROOM
        (path / limit).write_text(str(nbytes))
        swap = path / ("memory.memsw.limit_in_bytes" if self.version == 1 else "memory.swap.max")
        with contextlib.suppress(OSError):  # a kernel that does not count swap
            swap.write_text(str(nbytes if self.version == 1 else 0))

    def has_killed(self, path: Path) -> bool:
        """Return whether the kernel has killed a process of a cgroup."""
        events = (path / ("memory.oom_control" if self.version == 1 else "memory.events")).read_text()
        return int(dict(line.split() for line in events.splitlines())["oom_kill"]) > 0

    def remove(self) -> None:
        for path in self.made:
            wait_until(lambda path=path: not (path / "cgroup.procs").read_text(), f"{path} is empty", 20.0)  # type: ignore[misc]
            deadline = time.monotonic() + 10.0
            while True:
                try:
                    path.rmdir()
                    break
                except OSError:  # the kernel takes its time to count the last process out
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(0.05)


@pytest.fixture
def limits() -> Iterator[MemoryLimits]:
    found = find_memory_cgroup()
    if found is None or not os.access(found.folder, os.W_OK):
        pytest.skip("this user may not make memory cgroups here")
    limits = MemoryLimits(found.folder, found.version)
    try:
        probe = limits.make()
        if not (probe / "cgroup.procs").exists() or not (probe / found.events_file.name).exists():
            pytest.skip("a cgroup that is made here does not limit memory")
        yield limits
    finally:
        limits.remove()


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


def test_node_without_memory_leaves(tmp_path: Path, limits: MemoryLimits) -> None:
    """The kernel kills a worker: its node leaves and says why, and the other goes on; one that may not leave stays."""
    with Job(tmp_path, options=("--nnodes", "1:2", "--leave-on-oom", "--lease-ttl", "10")) as job:
        cgroups = [limits.make(), limits.make()]
        started = [start(job, cgroup) for cgroup in cgroups]
        first = job.wait_for_world(2)
        name = next(step.node for step in first if step.rank == 1)
        place = next(place for place, (node, _) in enumerate(started) if node.name == name)
        (small, log), (other, other_log) = started[place], started[1 - place]
        member = job.member(small)
        limits.limit(cgroups[place])
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


def test_all_nodes_without_memory_leave(tmp_path: Path, limits: MemoryLimits) -> None:
    """Alike workers grow alike: where two are killed at once, no node starts again with what was too little."""
    with Job(tmp_path, options=("--nnodes", "2", "--leave-on-oom", "--lease-ttl", "60")) as job:
        cgroups = [limits.make(), limits.make()]
        started = [start(job, cgroup) for cgroup in cgroups]
        job.wait_for_world(2)
        for cgroup in cgroups:
            limits.limit(cgroup)
        for node, _ in started:  # else the first that is killed may be known before the second one is
            stop(job, node)
        for rank in range(2):
            job.tell(rank, "eat")
        wait_until(lambda: all(map(limits.has_killed, cgroups)), "both workers are killed", 60.0)
        for node, _ in started:
            node.kill(signal.SIGCONT)
        assert [node.wait() for node, _ in started] == [137, 137]
        assert {cause_of(log) for _, log in started} == {TerminationCause.OUT_OF_MEMORY}
        assert {read(log)["rank"] for _, log in started} == {0, 1}


def test_how_a_job_ended_is_written(tmp_path: Path) -> None:
    """A signal and a script's own error; every node of a job that failed says the same."""
    with Job(tmp_path, options=("--nnodes", "1:3", "--lease-ttl", "10")) as job:
        started = [start(job) for _ in range(3)]
        job.wait_for_world(3)
        leaving, log = started.pop()
        leaving.kill(signal.SIGTERM)
        assert leaving.wait() == 143
        asked = {"cause": "", "exit_code": 143, "rank": -1, "oom_kills": 0, "message": "asked to leave (SIGTERM)"}
        assert {name: value for name, value in read(log).items() if name != "node"} == asked
        assert cause_of(log) is TerminationCause.PREEMPTED
        failing = next(step for step in job.wait_for_world(2, after=time.monotonic()) if step.rank == 1)
        node = next(node for node, _ in started if node.name == failing.node)
        member = job.member(node)
        job.tell(1, "raise")
        assert [node.wait() for node, _ in started] == [1, 1]
        messages = [read(log) for _, log in started]
        assert {(message["cause"], message["rank"], message["node"]) for message in messages} == {("error", 1, member)}
        for message in messages:
            assert message["message"].startswith("rank 1: "), message
            assert message["message"].rstrip().endswith("LookupError: the user's own mistake"), message
        assert {cause_of(log) for _, log in started} == {TerminationCause.USER_ERROR}
        job.nothing_is_left()


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (("--nnodes", "0"), 2, "--nnodes 0"),
        (("--no-such-option",), 2, "unrecognized arguments: --no-such-option"),
        (("--rdzv-conf", "join_timeout=0.1", "--nnodes", "2"), 75, "only 1 node of at least 2 came"),
    ],
)
def test_what_never_began_is_written(tmp_path: Path, options: tuple[str, ...], code: int, words: str) -> None:
    with Job(tmp_path, options=options) as job:
        node, log = start(job)
        assert node.wait() == code
        message = read(log)
        assert (message["exit_code"], message["cause"]) == (code, "")
        assert words in message["message"]
        assert words in node.output
