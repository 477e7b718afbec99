"""What a worker finds in its environment, on nodes with different numbers of workers."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std

from edl.collective.agent.host_folder import HostFolder
from edl.collective.agent.launch_spec import LaunchSpec, error_files, worker_environment, worker_forks
from edl.collective.agent.membership.rendezvous import RendezvousSettings
from edl.collective.agent.processes.zygote import ProgramSpec
from edl.collective.job_records import JobState, Member, World

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
def host() -> Iterator[HostFolder]:
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


def test_workers_have_files_of_their_own(host: HostFolder, tmp_path: Path) -> None:
    logs = DefaultLogsSpecs(str(tmp_path), Std.NONE, Std.from_str("1:1"))
    jobs, dest = worker_forks(launch(3, logs=logs), WORLD, MEMBERS[1], host)
    assert sorted(jobs) == [0, 1, 2]
    for name in ("EDL_BOARD", "EDL_CONTROL", "EDL_SLOTS", "TORCHELASTIC_ERROR_FILE"):
        assert len({job.environ[name] for job in jobs.values()}) == 3
    assert len({job.stacks for job in jobs.values()}) == 3
    assert not any("EDL_CHECKPOINT" in job.environ for job in jobs.values())
    assert error_files(dest) == {rank: Path(job.environ["TORCHELASTIC_ERROR_FILE"]) for rank, job in jobs.items()}

    stored, _ = worker_forks(
        launch(1, logs=logs, checkpoint="memory://x", checkpoint_interval_s=7.5), WORLD, MEMBERS[1], host
    )
    assert stored[0].environ["EDL_CHECKPOINT"] == "memory://x"
    assert stored[0].environ["EDL_CHECKPOINT_INTERVAL_S"] == "7.5"
