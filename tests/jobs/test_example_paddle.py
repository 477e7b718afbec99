"""examples/paddle, run as its README says, with a trainer that joins and one that is killed."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.jobs.collective.job import Node, wait_until
from tests.jobs.test_examples import EXAMPLES, commands, right, wait_for

WAIT_S = 250.0  # each process imports Paddle and PyTorch, which takes minutes on a busy machine
HURRY = "hurry"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, why in (("paddle", "PaddlePaddle"), ("torch", "PyTorch"), ("sklearn", "scikit-learn")):
        if not any((Path(entry) / name).is_dir() for entry in sys.path):
            pytest.skip(f"the example needs {why}")
    folder = tmp_path / "paddle"
    shutil.copytree(EXAMPLES / "paddle", folder, ignore=shutil.ignore_patterns("__pycache__", "teacher.*"))
    # It waits in each step, for a person to have time to watch: here until there is nothing left to watch.
    student, waits = folder / "train_student.py", "time.sleep(options.pause)"
    assert waits in student.read_text()
    hurries = f"time.sleep(0 if __import__('os').path.exists({str(folder / HURRY)!r}) else options.pause)"
    student.write_text(student.read_text().replace(waits, hurries))
    return folder


@contextlib.contextmanager
def started(name: str, command: list[str], folder: Path, environ: dict[str, str]) -> Iterator[Node]:
    """A process that is killed in the end, with all that it started, if it has not ended by itself."""
    path = folder / f"{name}.out"
    with path.open("wb") as output:
        process = subprocess.Popen(command, cwd=folder, env=environ, stdout=output, stderr=output)
    node = Node(name, process, path)
    try:
        yield node
    finally:
        with contextlib.suppress(ProcessLookupError):
            node.signal_all(signal.SIGKILL)
        process.wait()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_paddle(folder: Path, tmp_path: Path) -> None:
    environ = {**os.environ, "EDL_DISCOVERY": f"sqlite:///{tmp_path}/discovery.sqlite", "OMP_NUM_THREADS": "1"}
    train_teacher, serve, train_student = commands(folder / "README.md")
    train_student = ["0.2" if word == "0.05" else word for word in train_student]
    done = subprocess.run(
        [sys.executable, *train_teacher[1:]], cwd=folder, env=environ, capture_output=True, text=True, timeout=WAIT_S
    )
    assert done.returncode == 0, done.stderr
    assert right(done.stdout) > 0.9

    def edl(command: list[str]) -> list[str]:
        return [sys.executable, "-m", "edl", *command[1:]]

    with contextlib.ExitStack() as stack:
        server = stack.enter_context(started("server", edl(serve), folder, environ))
        wait_for("digits", environ["EDL_DISCOVERY"], server.process, server.output_path, WAIT_S)
        one = stack.enter_context(started("one", edl(train_student), folder, environ))
        wait_until(told(one, r"1 trainers go on after step -1"), "the first trainer", WAIT_S)
        two = stack.enter_context(started("two", edl(train_student), folder, environ))
        began = wait_until(told(one, r"2 trainers go on after step (\d+)"), "the second trainer", WAIT_S)
        os.kill(two.workers[0], signal.SIGKILL)
        wait_until(told(one, r"(?s)2 trainers .*2 trainers go on after step (\d+)"), "both again", WAIT_S)
        assert int(began[1]) >= 0
        (folder / HURRY).touch()
        for node in (one, two):
            assert node.wait(WAIT_S) == 0, node.output
        server.process.terminate()
        assert server.wait() == 0, server.output
    assert right(one.output.rpartition("student: ")[2]) > 0.9
    steps = [int(step) for step in re.findall(r"trainers go on after step (-?\d+)", one.output)]
    assert steps == sorted(steps)


def told(node: Node, pattern: str) -> Callable[[], re.Match[str] | None]:
    """Whether a node has printed what matches `pattern`; fails if it has ended."""

    def look() -> re.Match[str] | None:
        found = re.search(pattern, node.output)
        assert found or node.process.poll() is None, node.output
        return found

    return look
