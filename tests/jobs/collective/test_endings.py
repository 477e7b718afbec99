"""How jobs end before their script does: errors, exit codes, too little memory, nodes that are asked to leave."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from edl.cgroups import find_events_file
from edl.cli import main
from edl.collective.goodput import read_job
from edl.collective.job_records import JobState, World, prefix
from edl.collective.job_records import Node as NodeRecord
from edl.discovery import open_store
from edl.master.scaling.terminations import TerminationCause, find_termination_cause, parse_termination_message
from tests.jobs.collective.job import EDL, TRAIN_STATE, Job, Node
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
            assert "Connection closed by peer" not in node.output, "which is a consequence"
            message = read(log)
            assert (message["cause"], message["rank"]) == ("error", 1)
            (pid,) = [node.pid for node, _ in started if node.name == failing]
            assert f"-{pid}-" in message["node"]
            assert re.match(r"worker \d ended with exit code 1 \(rank 1\)\nTraceback", message["message"]), message
            assert message["message"].rstrip().endswith("LookupError: the user's own mistake"), message
            assert cause_of(log) is TerminationCause.USER_ERROR
        with open_store(job.url) as store:
            error = [event.text for event in read_job(store, job.name).events if event.kind == "error"][-1]
        assert error.endswith("exit code 1 (rank 1): LookupError: the user's own mistake")
        job.nothing_is_left()


def test_job_with_too_few_nodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Job(tmp_path, ("--nnodes", "2:3", "--rdzv-conf", "join_timeout=1", "--no-prewarm")) as job:
        node, log = start(job)
        assert node.wait() == 75
        assert "only 1 node of at least 2 joined within" in node.output
        message = read(log)
        assert (message["exit_code"], message["cause"]) == (75, "")
        assert "only 1 node of at least 2" in message["message"]
        assert main(["status", job.name, "--store", job.url]) == 0
        assert f"job {job.name}: gave up, 1 node so far" in capsys.readouterr().out


@pytest.mark.parametrize("stored", [True, False], ids=["stored", "memory"])
def test_job_without_a_teacher_may_start_again(tmp_path: Path, stored: bool) -> None:
    """Every node keeps and stores its newest state and asks for another start, from which the job goes on."""
    words = "no live teacher for 'digits' within 60 s (none is registered)"
    raises = f"if rank == 0 and state.step == 8 and not (folder / 'teacher').exists(): raise NoTeacherError({words!r})"
    source = TRAIN_STATE.read_text().replace("time.sleep(step_s)\n", f"{raises}\n            time.sleep(step_s)\n")
    (tmp_path / "script.py").write_text(source.replace("import torch\n", "import torch\nfrom edl.errors import *\n", 1))
    options = ("--nnodes", "2", *(("--checkpoint", str(tmp_path / "stored")) if stored else ()))
    with Job(tmp_path, options, command=[str(tmp_path / "script.py"), str(tmp_path)]) as job:
        for node, log in [start(job) for _ in range(2)]:
            assert node.wait() == 75, node.output
            assert words in node.output
            message = read(log)
            assert (message["cause"], message["exit_code"], message["rank"]) == ("no_teacher", 75, 0)
            assert message["message"].splitlines()[-1].startswith(words)
            assert cause_of(log) is TerminationCause.NO_TEACHER
        job.nothing_is_left(state=True)
        (tmp_path / "teacher").touch()
        (tmp_path / "end").touch()
        for node, _ in [start(job) for _ in range(2)]:
            assert node.wait() == 0, node.output
        assert [step.step for step in job.steps() if step.rank == 1] == [*range(9), 9]


HEADROOM = 256 << 20  # more than any other process of a node is larger than a worker, so that the kernel takes a worker


class MemoryLimit:
    """A memory cgroup, a folder in the hierarchy that this process is in."""

    def __init__(self, parent: Path, version: int) -> None:
        self.version = version
        self.path = parent / f"edl-test-{uuid.uuid4().hex[:8]}"
        self.path.mkdir()

    def limit(self) -> None:
        """Leave the cgroup's processes little more memory than they have."""
        usage, limit = {1: ("memory.usage_in_bytes", "memory.limit_in_bytes"), 2: ("memory.current", "memory.max")}[
            self.version
        ]
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
    found = find_events_file()
    if found is None or not os.access(found.parent, os.W_OK):
        pytest.skip("this user may not make memory cgroups here")
    limits = [MemoryLimit(found.parent, 2 if found.name == "memory.events" else 1) for _ in range(2)]
    try:
        if not (limits[0].path / "cgroup.procs").exists() or not (limits[0].path / found.name).exists():
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
        assert "this node is leaving, so that it can be restarted with more memory" in small.output
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


# As scripts for preemptible machines are written; torchrun gives them 30 s.
SAVES = """
import os, signal, sys, time

def save(number, frame):
    open(f"begun-{os.environ['RANK']}", "w").close()
    while not os.path.exists("go"):
        time.sleep(0.02)
    open(f"saved-{os.environ['RANK']}", "w").write(str(number))
    sys.exit(0)

signal.signal(int(sys.argv[1]), save)
open(f"ready-{os.environ['RANK']}", "w").close()
while True:
    time.sleep(0.1)
"""


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with Job(tmp_path, options=("--nnodes", "1:2")) as job:
        yield job
        job.nothing_is_left()


def all_of(folder: Path, what: str) -> bool:
    return all((folder / f"{what}-{rank}").exists() for rank in range(2))


@pytest.mark.parametrize("ends", ["handlers end", "grace period ends"])
def test_handlers_have_time_to_save(job: Job, tmp_path: Path, ends: str) -> None:
    """Until each worker's handler has come to its end, or the grace period is over."""
    (tmp_path / "saves.py").write_text(SAVES)
    number = signal.SIGINT if ends == "handlers end" else signal.SIGTERM
    grace = ("--grace-period", "1" if ends == "grace period ends" else "600")
    node = job.start("--nproc-per-node", "2", *grace, command=["saves.py", str(int(number))])
    wait_until(lambda: all_of(tmp_path, "ready"), "the script runs")
    for other in (signal.SIGHUP, signal.SIGTERM):
        # Slurm and systemd ask all processes of a job, also the one that workers are forked from.
        os.kill(node.zygote, other)
    node.kill(number)
    if ends == "handlers end":
        wait_until(lambda: all_of(tmp_path, "begun"), "the handlers run")
        (tmp_path / "go").touch()
    assert node.wait() == 128 + number, node.output
    assert all_of(tmp_path, "saved") is (ends == "handlers end")
    if ends == "handlers end":
        assert (tmp_path / "saved-0").read_text() == str(int(number)), "it got the signal that the node got"


def test_handlers_run_after_the_pause(tmp_path: Path) -> None:
    """With a `Checkpointer` the state is saved first, so what a handler saves is that step as well."""
    script = tmp_path / "script.py"
    handler = "signal.signal(signal.SIGTERM, lambda *_: (open('handled', 'w').write(str(steps())), sys.exit(0)))"
    steps = "def steps(): return len(open('steps.jsonl').readlines()) - 1"
    source = TRAIN_STATE.read_text().replace("    main()\n", f"    import signal\n    {handler}\n    main()\n")
    script.write_text(source.replace("def main()", f"{steps}\n\n\ndef main()", 1))
    with Job(tmp_path, options=("--nnodes", "1"), command=[str(script), str(tmp_path)]) as job:
        node = job.start()
        wait_until(lambda: any(one.step > 5 for one in job.steps()), "steps")
        node.kill(signal.SIGTERM)
        assert node.wait() == 143, node.output
        last = max(one.step for one in job.steps())
        assert (tmp_path / "handled").read_text() == str(last), node.output


def test_ctrl_c_ends_and_job_resumes(tmp_path: Path) -> None:
    with Job(tmp_path, options=("--nnodes", "1", "--nproc-per-node", "2")) as job:
        node = job.start()
        job.wait_for_world(2)
        os.killpg(node.pid, signal.SIGINT)
        assert node.wait() == 130
        assert "Traceback" not in node.output
        job.nothing_is_left()

        # Once more, and asked twice in a moment, while the workers cannot even be asked.
        at, node = time.monotonic(), job.start()
        job.wait_for_world(2, after=at)
        for pid in node.workers:
            os.kill(pid, signal.SIGSTOP)
        node.kill(signal.SIGTERM)
        node.kill(signal.SIGTERM)
        assert node.wait() == 143
        job.nothing_is_left()
        steps = sorted({one.step for one in job.steps()})
        assert steps == list(range(len(steps)))


def test_signal_ends_what_an_agent_waits_for(job: Job, tmp_path: Path) -> None:
    """Imports of the script, others to check or be checked with, and nodes of a failed job: each would take minutes."""
    (tmp_path / "endless.py").write_text("import time, pathlib\npathlib.Path('begun').touch()\ntime.sleep(1000)\n")
    (tmp_path / "script.py").write_text("import endless\n")
    leaves(job, job.start("--preload", "endless", command=["script.py"]), (tmp_path / "begun").exists)

    with open_store(job.url) as store:
        job.name += "-checks"
        waiting = prefix(job.name) + "check/waiting/"
        node = job.start("--node-check", "--rdzv-conf", "last_call_timeout=1000")
        leaves(job, node, lambda: store.list(waiting))
        assert not store.list(waiting)

        node = job.start("--node-check", "--rdzv-conf", "last_call_timeout=0")
        leaves(job, node, lambda: "checking this node alone" in node.output)

        job.name += "-fails"
        with store.lease(60.0) as lease:
            store.put(prefix(job.name) + "world", World(3, JobState.FAILED, message="it raised").encode())
            store.put(prefix(job.name) + "nodes/last", NodeRecord("last", "127.0.0.1", 1, 1).encode(), lease)
            leaves(job, job.start("--lease-ttl", "600"), job.shared_memory.exists)


def leaves(job: Job, node: Node, waits: Callable[[], object]) -> None:
    """A node is asked to leave as soon as it waits."""
    wait_until(waits, "it waits")
    node.kill(signal.SIGTERM)
    assert node.wait() == 128 + signal.SIGTERM
    assert "Traceback" not in node.output
    job.nothing_is_left()
