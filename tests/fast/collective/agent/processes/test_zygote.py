"""Workers forked from a zygote that has imported nothing: starts are fast here."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from edl.collective.agent.processes.pool import WorkerExit, WorkerProcesses, ZygoteLost
from edl.collective.agent.processes.zygote import ForkRequest, ProgramSpec
from edl.errors import EDLError


class Heard:
    """What `WorkerProcesses` report."""

    def __init__(self) -> None:
        self.queue: queue.Queue[WorkerExit | ZygoteLost] = queue.Queue()

    def next(self) -> WorkerExit | ZygoteLost:
        return self.queue.get(timeout=20)


@contextlib.contextmanager
def workers_of(
    folder: Path, script: str, prewarm: bool = False, gpu_devices: tuple[str, ...] = ()
) -> Iterator[tuple[WorkerProcesses, Heard]]:
    (folder / "script.py").write_text(textwrap.dedent(script))
    heard = Heard()
    warm = ProgramSpec("script", str(folder / "script.py"), ("x",), prewarm=prewarm)
    workers = WorkerProcesses(warm, heard.queue.put, gpu_devices=gpu_devices)
    try:
        workers.warm_up()
        yield workers, heard
    finally:
        workers.close()


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


def wait_for(condition: object, timeout_s: float = 60.0) -> None:
    assert callable(condition)
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


SLEEPER = """
    import os, subprocess, sys
    child = subprocess.Popen(["sleep", "1000"])
    with open(os.environ["OUT"] + ".new", "w") as out:
        out.write(f"{os.getpid()} {child.pid}")
    os.rename(os.environ["OUT"] + ".new", os.environ["OUT"])
    child.wait()
"""


def pids_in(path: Path) -> list[int]:
    wait_for(path.exists)
    return [int(one) for one in path.read_text().split()]


def test_ends_are_told_with_their_status(tmp_path: Path) -> None:
    script = "import os, sys; exec(os.environ['DO'])"
    with workers_of(tmp_path, script) as (workers, heard):
        for do, status in [
            ("", 0),
            ("sys.exit(3)", 3),
            ("os.kill(os.getpid(), 9)", -9),
            ("1/0", 1),
            ("os._exit(0)", 0),
        ]:
            workers.fork_workers(7, {2: ForkRequest({"DO": do, "EDL_STDERR": str(tmp_path / "err")})})
            event = heard.next()
            assert isinstance(event, WorkerExit)
            assert (event.generation, event.local_rank, event.status) == (7, 2, status)
        assert workers.running == {}
    text = (tmp_path / "err").read_text()
    assert "ZeroDivisionError" in text
    assert "zygote.py" not in text, "only frames of the script are shown"


def test_replacing_kills_the_children(tmp_path: Path) -> None:
    """Replacing kills the children as well and keeps whom it should."""
    with workers_of(tmp_path, SLEEPER) as (workers, heard):
        workers.fork_workers(0, {rank: ForkRequest({"OUT": str(tmp_path / f"out-{rank}")}) for rank in range(2)})
        first, second = pids_in(tmp_path / "out-0"), pids_in(tmp_path / "out-1")
        assert workers.running == {0: first[0], 1: second[0]}
        os.kill(first[0], signal.SIGSTOP)
        workers.replace_workers(1, {0: ForkRequest({"OUT": str(tmp_path / "out-new")})})
        wait_for(lambda: all(gone(pid) for pid in first))
        third = pids_in(tmp_path / "out-new")
        assert workers.running == {0: third[0], 1: second[0]}
        event = heard.next()
        assert isinstance(event, WorkerExit)
        assert (event.generation, str(event)) == (0, "worker 0 was killed by SIGKILL")
        workers.kill_workers()
        assert workers.running == {}
        assert {heard.next().generation for _ in range(2)} == {1}
        wait_for(lambda: all(gone(pid) for pid in third))
    wait_for(lambda: all(gone(pid) for pid in second))


HOLDER = """
    import mmap, os, subprocess, time
    from pathlib import Path

    def lives(pid):
        try:
            return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
        except OSError:
            return False

    out = Path(os.environ["OUT"])
    if "BEFORE" in os.environ:
        text = " ".join(str(lives(int(pid))) for pid in os.environ["BEFORE"].split())
    else:
        device = os.open(os.environ["DEVICE"], os.O_RDONLY)
        memory = mmap.mmap(-1, 200 << 20)  # which the kernel takes a while to take back
        memory.madvise(mmap.MADV_NOHUGEPAGE)
        for at in range(0, len(memory), 4096):
            memory[at] = 1
        child = subprocess.Popen(["sleep", "1000"], pass_fds=[device])
        text = f"{os.getpid()} {child.pid}"
    out.with_suffix(".new").write_text(text)
    out.with_suffix(".new").rename(out)
    time.sleep(1000)
"""


def test_worker_waits_for_gpu_memory(tmp_path: Path) -> None:
    """A file in the place of a GPU's device: whoever has it open has ended before a new worker's first line."""
    device = tmp_path / "nvidia0"
    device.touch()
    with workers_of(tmp_path, HOLDER, gpu_devices=(str(tmp_path / "nvidia[0-9]*"),)) as (workers, _):
        workers.fork_workers(0, {0: ForkRequest({"OUT": str(tmp_path / "out-0"), "DEVICE": str(device)})})
        before = pids_in(tmp_path / "out-0")
        environ = {"OUT": str(tmp_path / "out-1"), "BEFORE": " ".join(map(str, before))}
        workers.replace_workers(1, {0: ForkRequest(environ)})
        wait_for((tmp_path / "out-1").exists)
        assert (tmp_path / "out-1").read_text() == "False False"


def test_killed_zygote_takes_all_along(tmp_path: Path) -> None:
    """A killed zygote takes everybody along and is told."""
    with workers_of(tmp_path, SLEEPER) as (workers, heard):
        workers.fork_workers(0, {0: ForkRequest({"OUT": str(tmp_path / "out")})})
        pids = pids_in(tmp_path / "out")
        zygote = int(Path(f"/proc/{pids[0]}/stat").read_text().rsplit(")", 1)[1].split()[1])
        os.kill(zygote, signal.SIGKILL)
        assert isinstance(heard.next(), ZygoteLost)
        wait_for(lambda: all(gone(pid) for pid in pids))
        with pytest.raises(EDLError, match="died"):
            workers.fork_workers(1, {0: ForkRequest({"OUT": str(tmp_path / "out-2")})})


def test_silent_zygote_is_given_up(tmp_path: Path) -> None:
    """A zygote that does not answer is given up."""
    with workers_of(tmp_path, SLEEPER) as (workers, _):
        workers.fork_workers(0, {0: ForkRequest({"OUT": str(tmp_path / "out")})})
        pids = pids_in(tmp_path / "out")
        zygote = int(Path(f"/proc/{pids[0]}/stat").read_text().rsplit(")", 1)[1].split()[1])
        os.kill(zygote, signal.SIGSTOP)
        workers.kill_workers(timeout_s=6.0)  # the zygote is given up in half of that
        wait_for(lambda: all(gone(pid) for pid in [zygote, *pids]))


AGENT = """
    import os, sys, time
    from edl.collective.agent.processes.pool import WorkerProcesses
    from edl.collective.agent.processes.zygote import ForkRequest, ProgramSpec
    workers = WorkerProcesses(ProgramSpec("script", sys.argv[1], prewarm=False), print)
    workers.warm_up()
    workers.fork_workers(0, {0: ForkRequest({"OUT": sys.argv[2]})})
    time.sleep(1000)
"""


@pytest.mark.parametrize("stopped", [False, True])
def test_killed_agent_takes_all_along(tmp_path: Path, stopped: bool) -> None:
    """An agent that is killed takes everybody along."""
    (tmp_path / "script.py").write_text(textwrap.dedent(SLEEPER))
    (tmp_path / "agent.py").write_text(textwrap.dedent(AGENT))
    agent = subprocess.Popen(
        [sys.executable, str(tmp_path / "agent.py"), str(tmp_path / "script.py"), "out"], cwd=tmp_path
    )
    try:
        pids = pids_in(tmp_path / "out")
        zygote = int(Path(f"/proc/{pids[0]}/stat").read_text().rsplit(")", 1)[1].split()[1])
        if stopped:
            os.kill(zygote, signal.SIGSTOP)
    finally:
        agent.kill()
        agent.wait()
    wait_for(lambda: all(gone(pid) for pid in [zygote, *pids]))


def test_unreadable_script_fails_in_worker(tmp_path: Path) -> None:
    """A script that cannot be read fails in the worker."""
    with workers_of(tmp_path, "def") as (workers, heard):
        workers.fork_workers(0, {0: ForkRequest({"EDL_STDERR": str(tmp_path / "err")})})
        event = heard.next()
        assert isinstance(event, WorkerExit)
        assert event.status == 1
    assert "SyntaxError" in (tmp_path / "err").read_text()


def test_forks_have_own_random_numbers(tmp_path: Path) -> None:
    """Forks have random numbers of their own."""
    script = "import random, os; open(os.environ['OUT'], 'w').write(str(random.random()))"
    with workers_of(tmp_path, script) as (workers, heard):
        workers.fork_workers(0, {rank: ForkRequest({"OUT": str(tmp_path / f"out-{rank}")}) for rank in range(2)})
        heard.next(), heard.next()
    assert (tmp_path / "out-0").read_text() != (tmp_path / "out-1").read_text()


def test_worker_has_no_files_of_the_agent(tmp_path: Path) -> None:
    """Nothing of the agents is open in a worker."""
    script = """
        import os
        files = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd") if int(number) > 2]
        names = [os.readlink(file) for file in files if os.path.exists(file)]
        open(os.environ["OUT"], "w").write(repr([name for name in names if "socket" in name or "pipe" in name]))
    """
    with socket.socket() as ours, workers_of(tmp_path, script) as (workers, heard):
        ours.bind(("127.0.0.1", 0))
        workers.fork_workers(0, {0: ForkRequest({"OUT": str(tmp_path / "out")})})
        heard.next()
    assert (tmp_path / "out").read_text() == "[]"
