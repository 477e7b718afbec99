"""The folder in memory that an agent keeps: taken over from a dead one, swept, and never shared."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from edl.collective.agent import host_folder as host
from edl.collective.agent.host_folder import HostFolder
from edl.collective.checkpoint.memory.slots import SlotHeader, SlotPair, find_slots, preallocate_slots
from edl.errors import EDLError


@pytest.fixture
def job() -> Iterator[str]:
    name = f"host-{uuid.uuid4().hex}"
    probe = HostFolder(name, "probe")
    folder = probe.path.parent
    probe.close(keep=False)
    assert not folder.exists()
    yield name
    assert not folder.exists(), "nothing is left behind"


def test_agents_have_folders_of_their_own(job: str) -> None:
    """Agents of a host have folders of their own."""
    first, second = HostFolder(job, "a"), HostFolder(job, "b")
    assert first.path != second.path
    assert (first.previous_owner, second.previous_owner) == ("", "")
    assert first.path.stat().st_mode & 0o077 == 0
    first.close(keep=False)
    second.close(keep=False)


def test_left_state_is_taken_over(job: str) -> None:
    """The state of one that left is taken over."""
    first = HostFolder(job, "a")
    save(first, step=7)
    first.close(keep=True)
    second = HostFolder(job, "b")
    assert (second.previous_owner, second.path) == ("a", first.path)
    assert [found.header.step for found in find_slots(Path(second.slots(0)))] == [7]
    second.close(keep=False)


def save(folder: HostFolder, generation: int = 0, step: int = 0) -> None:
    """Have a complete state in the folder's first slots."""
    slots = SlotPair(Path(folder.slots(0)))
    slots.begin_write(8, 0)
    slots.commit_write(SlotHeader(generation, step, 1, 0), 8, b"")


LEAVE = """
import os, sys, time
from pathlib import Path
from edl.collective.agent.host_folder import HostFolder
from edl.collective.checkpoint.memory.slots import SlotHeader, SlotPair
folders = []
for part in sys.argv[2:]:
    name, *state = part.split()
    folder = HostFolder(sys.argv[1], name)
    folders.append(folder)
    if not state:
        continue
    run, generation, step, died_s_ago = state
    folder.run = run
    slots = SlotPair(Path(folder.slots(0)))
    slots.begin_write(8, 0)
    slots.commit_write(SlotHeader(int(generation), int(step), 1, 0), 8, b"")
    os.utime(folder.path / "node", (time.time() - float(died_s_ago),) * 2)
"""


def leave(job: str, *dead: str) -> None:
    """Have folders of agents that died: "NAME RUN GENERATION STEP SECONDS-AGO" each, or "NAME" without a state."""
    subprocess.run([sys.executable, "-c", LEAVE, job, *dead], check=True)


@pytest.mark.parametrize(
    "dead",
    [
        ("a 1 0 500 1", "b 1 1 20 1", "c 1 1 19 1"),  # a's part ended with an earlier generation
        ("a 1 0 5 1", "b 1 0 20 1"),
        ("a 2 9 900 500", "b 1 0 0 1"),  # a was of another run, of the same name
    ],
)
def test_newest_folder_is_taken_over(job: str, dead: tuple[str, ...]) -> None:
    """Of several folders that with the newest state is taken over."""
    leave(job, *dead)
    heir = HostFolder(job, "heir")
    assert heir.previous_owner == "b"
    assert heir.dead == {one.split()[0] for one in dead}
    second = HostFolder(job, "second")
    assert second.previous_owner in heir.dead - {"b"}, "the next one is for the next agent"
    heir.close(keep=False, ended=True)
    second.close(keep=False, ended=True)


def test_stateless_folder_is_not_taken_over(job: str) -> None:
    """It has no run yet, and died last."""
    leave(job, "state 1 3 1000 5", "fresh")
    heir = HostFolder(job, "heir")
    assert (heir.previous_owner, heir.run) == ("state", "1")
    heir.close(keep=False, ended=True)


CHURN = """
import sys, time
from edl.collective.agent.host_folder import HostFolder
for _ in range(int(sys.argv[2])):
    folder = HostFolder(sys.argv[1], sys.argv[3])
    folder.status_page(0).write_bytes(b"x")
    time.sleep(0.0005)
    assert folder.status_page(0).exists() and (folder.path / "lock").exists(), "a live agent's folder was removed"
    folder.close(keep=False, ended=True)
"""


def test_concurrent_agents_have_folders(job: str) -> None:
    """Agents that come and go at once have their folders."""
    command = [sys.executable, "-c", CHURN, job, "200"]
    churns = [subprocess.Popen([*command, name]) for name in "abc"]
    assert [churn.wait(timeout=100) for churn in churns] == [0, 0, 0]


def test_slow_removal_harms_no_other(job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent is stopped in the middle of its removal, until another does not wait for it any more."""
    monkeypatch.setattr(host, "_LOCK_TIMEOUT_S", 0.1)
    slow = HostFolder(job, "slow")
    slow.run = "1e"
    made: list[HostFolder] = []
    remove = shutil.rmtree

    def rmtree(path: Path, ignore_errors: bool) -> None:
        names = [entry.name for entry in path.iterdir()]  # listed before, as `shutil.rmtree` does
        (path / "lock").unlink()
        with monkeypatch.context() as meanwhile:
            meanwhile.setattr(shutil, "rmtree", remove)
            made.append(HostFolder(job, "other"))
            made[0].run = "1f"
        for name in names:
            (path / name).unlink(missing_ok=True)
        remove(path, ignore_errors=True)

    monkeypatch.setattr(shutil, "rmtree", rmtree)
    slow.close(keep=False)
    monkeypatch.undo()
    (other,) = made
    assert ((other.path / "node").read_text(), (other.path / "lock").exists(), other.run) == ("other", True, "1f")
    other.close(keep=False)


def test_folder_is_found_by_any_number(job: str) -> None:
    """The agent before it has left, and taken its folder with it."""
    first = HostFolder(job, "first")
    leave(job, "dead 1 0 7 1")
    first.close(keep=False)
    heir = HostFolder(job, "heir")
    assert heir.previous_owner == "dead"
    heir.close(keep=False)


def test_simultaneous_agents_take_one_each(job: str) -> None:
    """Agents that start together take over one folder each."""
    leave(job, *(f"dead{number} 1 0 {number} 1" for number in range(4)))
    with ThreadPoolExecutor(4) as pool:
        heirs = list(pool.map(lambda number: HostFolder(job, f"heir{number}"), range(4)))
    assert {heir.previous_owner for heir in heirs} == {f"dead{number}" for number in range(4)}
    for heir in heirs:
        heir.close(keep=False)


def test_agent_without_part_leaves_the_state(job: str) -> None:
    """An agent that had no part leaves the state as it found it."""
    first = HostFolder(job, "a")
    save(first, step=7)
    first.close(keep=True)
    HostFolder(job, "b").close(keep=True, used=False)
    third = HostFolder(job, "c")
    assert third.previous_owner == "a", "of whom the others know that it was a member, and now that it is dead"
    third.close(keep=False)


def test_incomplete_folder_is_not_kept(job: str) -> None:
    """A folder without a complete state is not kept."""
    first = HostFolder(job, "a")
    first.status_page(0).write_bytes(b"x")
    preallocate_slots(Path(first.slots(0)), 1 << 20)
    first.close(keep=True)
    assert not first.path.exists()


def test_killed_agents_folder_is_taken_over(job: str) -> None:
    """The folder of a killed agent is taken over."""
    script = "import sys, time; from edl.collective.agent.host_folder import HostFolder; f = HostFolder(*sys.argv[1:]);"
    script += "print(f.path, flush=True); time.sleep(1000)"
    with subprocess.Popen([sys.executable, "-c", script, job, "dead"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        path = Path(process.stdout.readline().strip())
        other = HostFolder(job, "b")
        assert other.path != path, "it lives"
        process.kill()
    heir = HostFolder(job, "c")
    assert (heir.previous_owner, heir.path) == ("dead", path)
    heir.close(keep=False)
    other.close(keep=False)


def test_long_abandoned_is_removed(job: str) -> None:
    """What was abandoned long ago is removed."""
    old, used = HostFolder(job, "a"), HostFolder(job, "b")
    save(old)
    save(used)
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


def test_job_end_removes_dead_agents_files(job: str) -> None:
    """The end of a job removes what dead agents left and not what live ones have."""
    leave = (
        "import sys; from edl.collective.agent import host_folder as h; print(h.HostFolder(sys.argv[1], 'dead').path)"
    )
    live = HostFolder(job, "live")
    last = HostFolder(job, "last")
    done = subprocess.run([sys.executable, "-c", leave, job], capture_output=True, text=True, check=True)
    dead = Path(done.stdout.strip())
    (dead / "slots-0.0").write_bytes(b"state")
    last.close(keep=False, ended=True)
    assert not dead.exists()
    assert live.path.exists()
    live.close(keep=False)


def test_job_end_leaves_unstored_state(job: str) -> None:
    """The end of a job leaves what another agent could not store."""
    failed, last = HostFolder(job, "failed"), HostFolder(job, "last")
    save(failed, step=7)
    failed.unstored = True
    failed.close(keep=True)
    last.close(keep=False, ended=True)
    again = HostFolder(job, "again")
    assert (again.previous_owner, again.unstored, again.holds_state) == ("failed", True, True)
    again.close(keep=False)


def test_foreign_job_folder_is_an_error(job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A jobs folder that is none is an error and no endless wait."""
    monkeypatch.setattr(host, "_LOCK_TIMEOUT_S", 0.2)
    probe = HostFolder(job, "probe")
    folder = probe.path.parent
    probe.close(keep=False)
    folder.write_text("a file")
    try:
        with pytest.raises(EDLError, match="cannot be used"):
            HostFolder(job, "a")
    finally:
        folder.unlink()


def test_folder_names_its_run(job: str) -> None:
    """A folder says which run its state is of."""
    first = HostFolder(job, "a")
    assert first.run == ""
    first.run = "1f"
    save(first, step=7)
    first.close(keep=True)
    second = HostFolder(job, "b")
    assert (second.previous_owner, second.run) == ("a", "1f")
    second.close(keep=False)


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


def test_forgetting_is_not_alone(job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that store and replicate take names away at any moment."""
    folder = HostFolder(job, "a")
    save(folder)
    find = Path.glob

    def glob(path: Path, pattern: str) -> list[Path]:
        found = list(find(path, pattern))
        for name in found[:1]:
            name.unlink()
        return found

    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(Path, "glob", glob)
        folder.forget_slots()
    assert not folder.holds_state
    folder.close(keep=False)
