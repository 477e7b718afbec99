"""The folder in memory that an agent keeps: taken over from a dead one, swept, and never shared."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from edl.collective.agent.host import HostFolder


@pytest.fixture
def job() -> Iterator[str]:
    name = f"host-{uuid.uuid4().hex}"
    probe = HostFolder(name, "probe")
    folder = probe.path.parent
    probe.close(keep=False)
    assert not folder.exists()
    yield name
    assert not folder.exists(), "nothing is left behind"


def test_agents_of_a_host_have_folders_of_their_own(job: str) -> None:
    first, second = HostFolder(job, "a"), HostFolder(job, "b")
    assert first.path != second.path
    assert (first.heir_of, second.heir_of) == ("", "")
    assert first.path.stat().st_mode & 0o077 == 0
    first.close(keep=False)
    second.close(keep=False)


def test_the_state_of_one_that_left_is_taken_over(job: str) -> None:
    first = HostFolder(job, "a")
    Path(first.slots(0) + "-0").write_bytes(b"state")
    first.close(keep=True)
    second = HostFolder(job, "b")
    assert (second.heir_of, second.path) == ("a", first.path)
    assert Path(second.slots(0) + "-0").read_bytes() == b"state"
    second.close(keep=False)


LEAVE = """
import os, sys, time
from pathlib import Path
from edl.collective.agent.host import HostFolder
from edl.collective.checkpoint.slots import Label, SlotPair
folders = []
for part in sys.argv[2:]:
    name, run, generation, step, died_s_ago = part.split()
    folder = HostFolder(sys.argv[1], name)
    folder.run = run
    slots = SlotPair(Path(folder.slots(0)))
    slots.begin(8, 0)
    slots.commit(Label(int(generation), int(step), 1, 0), 8, b"")
    os.utime(folder.path / "node", (time.time() - float(died_s_ago),) * 2)
    folders.append(folder)
"""


def leave(job: str, *dead: str) -> None:
    """Have folders of agents that died: "NAME RUN GENERATION STEP SECONDS-AGO" each."""
    subprocess.run([sys.executable, "-c", LEAVE, job, *dead], check=True)


@pytest.mark.parametrize(
    "dead",
    [
        ("a 1 0 500 1", "b 1 1 20 1", "c 1 1 19 1"),  # a's part ended with an earlier generation
        ("a 1 0 5 1", "b 1 0 20 1"),
        ("a 2 9 900 500", "b 1 0 0 1"),  # a was of another run, of the same name
    ],
)
def test_of_several_folders_that_with_the_newest_state_is_taken_over(job: str, dead: tuple[str, ...]) -> None:
    leave(job, *dead)
    heir = HostFolder(job, "heir")
    assert heir.heir_of == "b"
    assert heir.dead == {one.split()[0] for one in dead}
    second = HostFolder(job, "second")
    assert second.heir_of in heir.dead - {"b"}, "the next one is for the next agent"
    heir.close(keep=False, ended=True)
    second.close(keep=False, ended=True)


def test_a_folder_is_found_whatever_its_number(job: str) -> None:
    """The agent before it has left, and taken its folder with it."""
    first = HostFolder(job, "first")
    leave(job, "dead 1 0 7 1")
    first.close(keep=False)
    heir = HostFolder(job, "heir")
    assert heir.heir_of == "dead"
    heir.close(keep=False)


def test_agents_that_start_together_take_over_one_folder_each(job: str) -> None:
    leave(job, *(f"dead{number} 1 0 {number} 1" for number in range(4)))
    with ThreadPoolExecutor(4) as pool:
        heirs = list(pool.map(lambda number: HostFolder(job, f"heir{number}"), range(4)))
    assert {heir.heir_of for heir in heirs} == {f"dead{number}" for number in range(4)}
    for heir in heirs:
        heir.close(keep=False)


def test_an_agent_that_had_no_part_leaves_the_state_as_it_found_it(job: str) -> None:
    first = HostFolder(job, "a")
    Path(first.slots(0) + "-0").write_bytes(b"state")
    first.close(keep=True)
    HostFolder(job, "b").close(keep=True, used=False)
    third = HostFolder(job, "c")
    assert third.heir_of == "a", "of whom the others know that it was a member, and now that it is dead"
    third.close(keep=False)


def test_a_folder_without_state_is_not_kept(job: str) -> None:
    first = HostFolder(job, "a")
    first.board(0).write_bytes(b"x")
    first.close(keep=True)
    assert not first.path.exists()


def test_the_folder_of_a_killed_agent_is_taken_over(job: str) -> None:
    script = "import sys, time; from edl.collective.agent.host import HostFolder; f = HostFolder(*sys.argv[1:]);"
    script += "print(f.path, flush=True); time.sleep(1000)"
    with subprocess.Popen([sys.executable, "-c", script, job, "dead"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        path = Path(process.stdout.readline().strip())
        other = HostFolder(job, "b")
        assert other.path != path, "it lives"
        process.kill()
    heir = HostFolder(job, "c")
    assert (heir.heir_of, heir.path) == ("dead", path)
    heir.close(keep=False)
    other.close(keep=False)


def test_what_was_abandoned_long_ago_is_removed(job: str) -> None:
    old, used = HostFolder(job, "a"), HostFolder(job, "b")
    Path(old.slots(0)).write_bytes(b"state")
    for folder in (old, used):
        os.utime(folder.path / "node", (time.time() - 7200,) * 2)
    old.close(keep=True)
    assert old.path.exists()
    HostFolder(job + "-other", "c").close(keep=False)
    assert not old.path.exists()
    assert used.path.exists(), "its agent lives"
    used.close(keep=False)


def test_the_control_pipe_is_made_once(job: str) -> None:
    folder = HostFolder(job, "a")
    assert folder.control(0) == folder.control(0)
    assert folder.control(0).is_fifo()
    folder.close(keep=False)


def test_the_end_of_a_job_removes_what_dead_agents_left_and_not_what_live_ones_have(job: str) -> None:
    leave = "import sys; from edl.collective.agent.host import HostFolder; print(HostFolder(sys.argv[1], 'dead').path)"
    live = HostFolder(job, "live")
    last = HostFolder(job, "last")
    done = subprocess.run([sys.executable, "-c", leave, job], capture_output=True, text=True, check=True)
    dead = Path(done.stdout.strip())
    (dead / "slots-0.0").write_bytes(b"state")
    last.close(keep=False, ended=True)
    assert not dead.exists()
    assert live.path.exists()
    live.close(keep=False)


def test_a_folder_says_which_run_its_state_is_of(job: str) -> None:
    first = HostFolder(job, "a")
    assert first.run == ""
    first.run = "1f"
    Path(first.slots(0) + "-0").write_bytes(b"state")
    first.close(keep=True)
    second = HostFolder(job, "b")
    assert (second.heir_of, second.run) == ("a", "1f")
    second.close(keep=False)
