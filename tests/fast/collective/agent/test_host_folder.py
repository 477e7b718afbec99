"""The folder in memory that an agent keeps, never shared; and what a worker finds in its environment."""

from __future__ import annotations

import errno
import os
import signal
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std

from edl.collective.agent.host_folder import HostFolder
from edl.collective.agent.launch_spec import LaunchSpec
from edl.collective.agent.processes.zygote import ProgramSpec
from edl.collective.agent.rendezvous import RendezvousSettings
from edl.collective.agent.worker_group import worker_environment, worker_forks
from edl.collective.checkpoint.memory.slots import SlotHeader, SlotPair, find_slots
from edl.collective.job_records import JobState, Member, World


@pytest.fixture
def job() -> Iterator[str]:
    name = f"host-{uuid.uuid4().hex}"
    probe = HostFolder(name, "probe")
    folder = probe.path.parent
    probe.close(keep=False)
    assert not folder.exists()
    yield name
    assert not folder.exists(), "nothing is left behind"


def save(folder: HostFolder, generation: int = 0, step: int = 0) -> None:
    """Have a complete state in the folder's first slots."""
    slots = SlotPair(Path(folder.slots(0)))
    slots.begin_write(8, 0)
    slots.commit_write(SlotHeader(generation, step, 1, 0), 8, b"")


def fork(function: Callable[[], object]) -> None:
    """Call a function in a process that is killed then."""
    child = os.fork()
    if child == 0:
        try:
            function()
            os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def age(path: Path, by_s: float) -> None:
    then_s = path.stat().st_mtime - by_s
    os.utime(path, (then_s, then_s))


def leave(job: str, *dead: str) -> None:
    """Have folders of killed agents: "NAME RUN GENERATION STEP SECONDS-AGO" each, or "NAME" without a state."""

    def make() -> None:
        folders = []  # all live until all are there
        for part in dead:
            name, *state = part.split()
            folder = HostFolder(job, name)
            folders.append(folder)
            if state:
                run, generation, step, died_s_ago = state
                folder.run = run
                save(folder, int(generation), int(step))
                age(folder.path / "node", float(died_s_ago))

    fork(make)


def test_agents_have_folders_of_their_own(job: str) -> None:
    first, second = HostFolder(job, "a"), HostFolder(job, "b")
    assert first.path != second.path
    assert (first.previous_owner, second.previous_owner) == ("", "")
    assert first.path.stat().st_mode & 0o077 == 0
    first.close(keep=False)
    second.close(keep=False)


def test_left_state_is_taken_over(job: str) -> None:
    first = HostFolder(job, "a")
    assert first.run == ""
    first.run = "1f"
    save(first, step=7)
    first.close(keep=True)
    HostFolder(job, "b").close(keep=True, used=False)
    heir = HostFolder(job, "c")
    assert (heir.previous_owner, heir.path, heir.run) == ("a", first.path, "1f"), "b had no part in it"
    assert [found.header.step for found in find_slots(Path(heir.slots(0)))] == [7]
    heir.forget_slots()
    assert not heir.holds_state
    heir.close(keep=False)


@pytest.mark.parametrize(
    "dead",
    [
        ("a 1 0 500 1", "b 1 1 20 1", "c 1 1 19 1"),  # a's part ended with an earlier generation
        ("a 2 9 900 500", "b 1 0 0 1"),  # a was of another run, of the same name
        ("a", "b 1 3 1000 5"),  # a has no run yet, and died last
    ],
)
def test_newest_folder_is_taken_over(job: str, dead: tuple[str, ...]) -> None:
    alive = HostFolder(job, "alive")
    leave(job, *dead)
    heir, second = HostFolder(job, "heir"), HostFolder(job, "second")
    assert (heir.previous_owner, heir.run) == ("b", "1")
    assert second.previous_owner != "b"
    assert alive.path not in (heir.path, second.path), "its agent lives"
    for folder in (heir, second, alive):
        folder.close(keep=False, ended=True)


def test_concurrent_agents_have_folders(job: str) -> None:
    def churn(name: str) -> None:
        for _ in range(40):
            folder = HostFolder(job, name)
            folder.status_page(0).write_bytes(b"x")
            assert folder.status_page(0).exists()
            assert (folder.path / "lock").exists(), "a live agent's folder was removed"
            folder.close(keep=False, ended=True)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(churn, "abc"))


def test_long_abandoned_is_removed(job: str) -> None:
    old, used = HostFolder(job, "a"), HostFolder(job, "b")
    for folder in (old, used):
        save(folder)
        age(folder.path / "node", 7200.0)
    old.close(keep=True)
    assert old.path.exists()
    HostFolder(job + "-other", "c").close(keep=False)
    assert not old.path.exists()
    assert used.path.exists(), "its agent lives"
    used.close(keep=False)


def test_job_end_leaves_unstored_state(job: str) -> None:
    failed, last = HostFolder(job, "failed"), HostFolder(job, "last")
    save(failed, step=7)
    failed.unstored = True
    failed.close(keep=True)
    last.close(keep=False, ended=True)
    again = HostFolder(job, "again")
    assert (again.previous_owner, again.unstored, again.holds_state) == ("failed", True, True)
    again.close(keep=False)


def test_full_memory_keeps_the_runs_name(job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without that name the state in memory would count as another job's, and be removed."""
    folder = HostFolder(job, "a")
    folder.run = "1f"

    def write_text(path: Path, text: str) -> int:
        path.write_bytes(b"")
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(Path, "write_text", write_text)
        with pytest.raises(OSError, match="No space"):
            folder.run = "1f"
    assert folder.run == "1f"
    folder.close(keep=False)


MEMBERS = (
    Member("a", "10.0.0.1", 4000, 1, 0),
    Member("b", "10.0.0.2", 4001, 3, 1),
    Member("c", "10.0.0.3", 4002, 2, 4),
)
WORLD = World(5, JobState.RUNNING, MEMBERS)


def launch(workers: int, **changes: object) -> LaunchSpec:
    given = {
        "program": ProgramSpec("script", "train.py"),
        "rendezvous": RendezvousSettings(1, 4),
        "addr": "10.0.0.2",
        "max_restarts": 2,
        **changes,
    }
    return LaunchSpec(job="resnet", workers=workers, **given)


@pytest.fixture
def folder() -> Iterator[HostFolder]:
    folder = HostFolder(f"launch-{uuid.uuid4().hex}", "b")
    yield folder
    folder.close(keep=False)


def test_ranks_count_through_all_nodes() -> None:
    environs = [
        worker_environment(launch(member.local_world_size), WORLD, member, local)
        for member in MEMBERS
        for local in range(member.local_world_size)
    ]
    assert [one["RANK"] for one in environs] == list("012345")
    assert [one["LOCAL_RANK"] for one in environs] == list("001201")
    assert [one["GROUP_RANK"] for one in environs] == list("011122")
    assert [one["LOCAL_WORLD_SIZE"] for one in environs] == list("133322")
    assert {(one["WORLD_SIZE"], one["GROUP_WORLD_SIZE"]) for one in environs} == {("6", "3")}


def test_nodes_on_a_host_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two nodes of one worker each on two cores: with two threads each they would be slower than one alone."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    on_one_host = [replace(member, addr="127.0.0.1") for member in MEMBERS[:2]]
    world = replace(WORLD, nodes=(*on_one_host, MEMBERS[2]))
    threads = [worker_environment(launch(1), world, member, 0).get("OMP_NUM_THREADS") for member in world.nodes]
    assert threads == ["2", "2", None], "4 workers share 8 cores; the third node is alone on its host"
    alone = replace(WORLD, nodes=MEMBERS[:1])
    assert "OMP_NUM_THREADS" not in worker_environment(launch(1), alone, MEMBERS[0], 0), "as under torchrun"
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert "OMP_NUM_THREADS" not in worker_environment(launch(1), world, world.nodes[0], 0), (
        "the user's own is inherited"
    )


def test_the_users_own_variables_come_last() -> None:
    one = worker_environment(launch(2, environ={"MASTER_ADDR": "proxy", "NEW": "1"}), WORLD, MEMBERS[2], 0)
    assert (one["MASTER_ADDR"], one["NEW"]) == ("proxy", "1")


def test_workers_have_files_of_their_own(folder: HostFolder, tmp_path: Path) -> None:
    logs = DefaultLogsSpecs(str(tmp_path), Std.NONE, Std.from_str("1:1"))
    jobs, dest = worker_forks(launch(3), WORLD, MEMBERS[1], folder, logs)
    assert sorted(jobs) == [0, 1, 2]
    for name in ("EDL_BOARD", "EDL_SLOTS", "TORCHELASTIC_ERROR_FILE"):
        assert len({job.environ[name] for job in jobs.values()}) == 3
    assert len({job.stacks for job in jobs.values()}) == 3
    assert not any("EDL_CHECKPOINT" in job.environ for job in jobs.values())
    assert dest.error_files == {rank: job.environ["TORCHELASTIC_ERROR_FILE"] for rank, job in jobs.items()}

    spec = launch(1, checkpoint="memory://x", checkpoint_interval_s=7.5)
    stored, _ = worker_forks(spec, WORLD, MEMBERS[1], folder, logs)
    assert stored[0].environ["EDL_CHECKPOINT"] == "memory://x"
    assert stored[0].environ["EDL_CHECKPOINT_INTERVAL_S"] == "7.5"
