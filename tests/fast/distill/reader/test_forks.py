"""Readers in forked processes, as real programs: what works, and what is refused at once, with words."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.fast.distill.conftest import Serve

_PROGRAM = """
import multiprocessing, os, sys, warnings

import numpy as np

from edl.distill import DistillReader, Options
from edl.distill.cache import SoftLabelCache

warnings.simplefilter("ignore")  # Python's own, of forks beside threads

def source():
    return ((np.full(4, number, np.float32), number) for number in range(20))

def reader(**arguments):
    arguments = {"teachers": sys.argv[1], "options": Options(teacher_timeout_s=600)} | arguments
    return DistillReader(["x", None], ["y"], **arguments).set_sample_generator(source)

def use(made=None, **arguments):
    with made or reader(**arguments) as labelled:
        for epoch in range(2):
            assert [number for _, number, _ in labelled()] == list(range(20))
    print("labelled", flush=True)

def in_a_fork(function):
    sys.stdout.flush()
    child = os.fork()
    if not child:
        try:
            function()
        except BaseException as exc:
            print(type(exc).__name__, exc, flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""
FORKS = """
made = reader()  # but not used: it connects with its first epoch
in_a_fork(lambda: use(made))
in_a_fork(use)
with SoftLabelCache(path="labels") as cache:
    use(cache=cache, id_field=1)
    print("from here on", flush=True)

def offline():
    with SoftLabelCache(path="labels") as cache:
        use(reader(teachers=None, cache=cache, id_field=1))

in_a_fork(offline)
in_a_fork(use)  # the parent's is closed
in_a_fork(lambda: use(made))
still = reader()
rows = still()
next(rows)
in_a_fork(use)  # the parent's is at work
in_a_fork(lambda: next(rows))
in_a_fork(still)
process = multiprocessing.get_context("fork").Process(target=in_a_fork, args=(use,))
process.start()
process.join()  # a grandchild
assert len(list(rows)) == 19
still.close()
use()
"""


def run(tmp_path: Path, serve: Serve, program: str) -> list[str]:
    """The lines that a program prints. None of them takes as long as a reader waits for its teachers."""
    file = tmp_path / "program.py"
    file.write_text(_PROGRAM + program)
    command = [sys.executable, str(file), serve("echo").endpoint]
    ended = subprocess.run(command, cwd=tmp_path, timeout=100, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()


def test_forked_children(tmp_path: Path, serve: Serve) -> None:
    """Children of a process without a reader have their own; later ones are refused, unless a cache has all labels."""
    lines = run(tmp_path, serve, FORKS)
    here = lines.index("from here on")
    assert lines[:here] == ["labelled"] * 3
    first, *refused, last = lines[here + 1 :]
    assert (first, last) == ("labelled", "labelled")
    assert len(refused) == 6
    assert all(line.startswith("ClosedError") and '"spawn"' in line for line in refused), refused
    assert sum("this reader belongs to process" in line for line in refused) == 2
    assert sum("a reader cannot connect" in line and '"forkserver"' in line for line in refused) == 4
