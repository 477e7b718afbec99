"""Readers in forked and spawned processes, as real programs: what works, and what is refused at once, with words."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.fast.distill.conftest import Start

_PROGRAM = """
import multiprocessing, os, sys, traceback, warnings

import numpy as np

from edl.distill import DistillReader, Options
from edl.distill.cache import SoftLabelCache

warnings.simplefilter("ignore")  # Python's own, of forks beside threads

def source():
    return ((np.full(4, number, np.float32), number) for number in range(20))

def reader(**arguments):
    arguments = {"teachers": sys.argv[1], "options": Options(teacher_timeout_s=100)} | arguments
    return DistillReader(["x", None], ["y"], **arguments).set_sample_generator(source)

def use(made=None, **arguments):
    with made or reader(**arguments) as labelled:
        for epoch in range(2):
            assert [number for _, number, _ in labelled()] == list(range(20))
    print("labelled", flush=True)

def used_in_a_fork(*arguments, **named):
    sys.stdout.flush()
    child = os.fork()
    if not child:
        try:
            use(*arguments, **named)
        except BaseException as exc:
            print(type(exc).__name__, exc, flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""


def run(tmp_path: Path, start: Start, program: str) -> list[str]:
    """The lines that a program prints. None of them takes as long as a reader waits for its teachers."""
    file = tmp_path / "program.py"
    file.write_text(_PROGRAM + program)
    command = [sys.executable, str(file), start("echo").endpoint]
    ended = subprocess.run(command, cwd=tmp_path, timeout=90, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()


def refused(line: str) -> bool:
    return line.startswith("ClosedError a reader cannot connect") and '"spawn"' in line and '"forkserver"' in line


def test_early_forks_have_own_readers(tmp_path: Path, start: Start) -> None:
    """Children forked before any reader is used have readers of their own."""
    program = """
made = reader()  # but not used: it connects with its first epoch
used_in_a_fork(made)
used_in_a_fork()
use()
"""
    assert run(tmp_path, start, program) == ["labelled"] * 3


def test_late_forked_child_is_refused(tmp_path: Path, start: Start) -> None:
    """A child of a process that has used a reader is refused at once."""
    program = """
made = reader()
use()
used_in_a_fork()  # the parent's is closed
used_in_a_fork(made)
still = reader()
rows = still()
next(rows)
used_in_a_fork()  # the parent's is at work
process = multiprocessing.get_context("fork").Process(target=used_in_a_fork)
process.start()
process.join()  # a grandchild
assert len(list(rows)) == 19
still.close()
use()
"""
    first, *between, last = run(tmp_path, start, program)
    assert (first, last) == ("labelled", "labelled")
    assert len(between) == 4
    assert all(map(refused, between)), between


def test_spawned_children_work(tmp_path: Path, start: Start) -> None:
    """Spawned children of such a process are as good as any."""
    program = """
if __name__ == "__main__":
    use()
    for method in ("spawn", "forkserver"):
        process = multiprocessing.get_context(method).Process(target=use)
        process.start()
        process.join()
        assert process.exitcode == 0
"""
    assert run(tmp_path, start, program) == ["labelled"] * 3


def test_full_cache_works_in_any_child(tmp_path: Path, start: Start) -> None:
    """A cache that has all labels needs no connection and works in any child."""
    program = """
with SoftLabelCache(path="labels") as cache:
    use(cache=cache, id_field=1)

def offline(cache):
    with DistillReader(["x", None], ["y"], cache=cache, id_field=1).set_sample_generator(source) as labelled:
        assert [number for _, number, _ in labelled()] == list(range(20))
    print("from the cache", flush=True)

child = os.fork()
if not child:
    with SoftLabelCache(path="labels") as cache:
        offline(cache)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""
    assert run(tmp_path, start, program) == ["labelled", "from the cache"]
