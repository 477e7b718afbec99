"""`edl run` in place of torchrun, one node: what scripts that know nothing of EDL rely on, and what it prints."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from edl.collective.agent.ending import ExitCode
from tests.jobs.collective.job import START_S, Job

pytestmark = pytest.mark.timeout(300)

REPORT = '''
"""Writes down what it was given, and prints in a hurry."""
import json, os, sys
import torch, torch.distributed as dist

if __name__ == "__main__":
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    total = torch.ones(3) * (rank + 1)
    dist.all_reduce(total)
    dist.barrier()
    dist.destroy_process_group()
    given = {
        "argv": sys.argv, "path": sys.path[0], "sum": total.tolist(), "role": os.environ["ROLE_NAME"],
        "name": __name__, "file": __file__, "stdin": sys.stdin.read() if rank == 0 else "",
    }
    with open(f"given-{rank}.json", "w") as file:
        json.dump(given, file)
    for number in range(3000):
        print(f"line {rank} {number};")
    print("no newline", rank, file=sys.stderr, end="")
'''
ARGUMENTS = ["--nnodes", "7", "--store=x", "-m", "--", "--rdzv-id", "a b", "", "*", "--help"]


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with Job(tmp_path, options=("--nnodes", "1")) as job:
        yield job
        job.nothing_is_left()


def edl_run(*arguments: str, cwd: Path, environ: Mapping[str, str] = {}) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "edl", "run", *arguments]
    environ = {**os.environ, **environ}
    return subprocess.run(command, cwd=cwd, env=environ, capture_output=True, text=True, timeout=START_S)


def test_arguments_input_and_output(job: Job, tmp_path: Path) -> None:
    """Arguments and standard input are passed on; output is unbuffered, as told in files, tagged, or both."""
    (tmp_path / "report.py").write_text(REPORT)
    (tmp_path / "in").write_text("what comes in")
    command = ["report.py", *ARGUMENTS]
    with (tmp_path / "in").open() as stdin:
        node = job.start(
            "--nproc-per-node", "3", "--log-dir", "logs", "--redirects", "1:1", "--tee", "2:3", "--role", "student",
            command=command, stdin=stdin,
        )  # fmt: skip
        assert node.wait() == 0, node.output
    given = [json.loads((tmp_path / f"given-{rank}.json").read_text()) for rank in range(3)]
    script = {"argv": command, "path": str(tmp_path), "name": "__main__", "file": str(tmp_path / "report.py")}
    for one in given:
        assert one | script | {"sum": [6.0] * 3, "role": "student"} == one
    assert given[0]["stdin"] == "what comes in"

    # Ranks may write between a line and its end; but every line is there.
    numbers = list(range(3000))
    assert [int(number) for number in re.findall(r"line 0 (\d+);", node.output)] == numbers
    assert "line 1 " not in node.output, "redirected to a file only"
    assert [int(number) for number in re.findall(r"\[student2\]:line 2 (\d+);", node.output)] == numbers
    logs = {path.parent.name + "/" + path.name: path.read_text() for path in (tmp_path / "logs").rglob("std*.log")}
    assert logs["1/stdout.log"].splitlines() == [f"line 1 {number};" for number in numbers]
    assert logs["2/stdout.log"].splitlines() == [f"line 2 {number};" for number in numbers]
    assert "no newline 2" in logs["2/stderr.log"]
    assert {"1/stdout.log", "2/stdout.log", "2/stderr.log"} == set(logs)

    # The job has ended: whoever comes now has nothing to do, and finds that out before torch is imported.
    code, said = job.run(command=["report.py"])
    assert (code, "has already ended" in said) == (0, True), said


def test_modules_and_programs(job: Job, tmp_path: Path) -> None:
    package = tmp_path / "pack"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "helper.py").write_text("ANSWER = 42")
    (package / "main.py").write_text(
        "import sys\nfrom .helper import ANSWER\nprint(f'module {__name__} {__package__} {ANSWER} {sys.argv[1:]}')\n"
    )
    code, said = job.run("--nproc-per-node", "2", "-m", command=["pack.main", "-m", "x"])
    assert code == 0, said
    assert said.count("module __main__ pack 42 ['-m', 'x']") == 2
    job.name += "-program"
    code, said = job.run("--no-python", command=["sh", "-c", 'echo "program $RANK of $WORLD_SIZE: $1"', "sh", "--x y"])
    assert code == 0, said
    assert "program 0 of 1: --x y" in said


def test_fork_that_never_begins_is_replaced(tmp_path: Path) -> None:
    """A lock that only the agent's process for forking ever holds is not found out by trying a fork before."""
    (tmp_path / "stuck.py").write_text("""
import os, signal, time

def wait():
    if callable(signal.getsignal(signal.SIGCHLD)):  # the process has begun to fork workers
        time.sleep(1000)

os.register_at_fork(after_in_child=wait)
""")
    (tmp_path / "train.py").write_text("import torch\nprint('BEGUN')")
    done = edl_run("--standalone", "--hang-after", "3", "--preload", "stuck", "train.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "BEGUN" in done.stdout.splitlines(), "one that is slow is replaced, too, after it has begun perhaps"
    assert "did not reach the script's first line within 3 s" in done.stderr, done.stderr


def test_log_lines_are_json(tmp_path: Path) -> None:
    """Each line of the agent's is an object with what the line names; the script's own lines stay as they are.

    torchrun's ways to meet are told to mean nothing, and printed files are kept where one is told they are.
    """
    (tmp_path / "hello.py").write_text("print('hello', 'file')")
    (tmp_path / "temporary").mkdir()
    options = ["--standalone", "--no-prewarm", "--rdzv-backend=c10d", "-t", "1", "--log-format", "json"]
    done = edl_run(*options, "hello.py", cwd=tmp_path, environ={"TMPDIR": str(tmp_path / "temporary")})
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("hello file\n")
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    (unused,) = (line for line in lines if "not used here" in line["message"])
    assert (unused["level"], unused["command"]) == ("warning", "edl run")
    assert unused["message"].startswith("--rdzv-backend: not used here; nodes meet in the store, sqlite:///")
    (began,) = (line for line in lines if "world_size" in line)
    assert (began["generation"], began["world_size"]) == (0, 1)
    assert began["logger"] == "edl.collective.agent.reconciler"
    assert lines[-1]["message"] == f"job {lines[-1]['job']} has ended: the script ended on every node"
    (folder,) = (tmp_path / "temporary").glob("edl-*")
    assert any(f"the workers' output is kept in {folder} (--log-dir" in line["message"] for line in lines)
    assert [path.read_text() for path in folder.rglob("stdout.log")] == ["hello file\n"]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--checkpoint", "/proc/checkpoints", "hello.py"], 2, "checkpoints cannot be stored at /proc/checkpoints"),
        (["--store", "consul://127.0.0.1:1", "--rdzv-id", "x", "hello.py"], ExitCode.TRY_AGAIN, "cannot be reached"),
    ],
)
def test_mistakes_are_told_before_all_else(tmp_path: Path, arguments: list[str], code: int, words: str) -> None:
    (tmp_path / "hello.py").write_text("print('hello')")
    environ = {"TMPDIR": str(tmp_path), "EDL_TERMINATION_LOG": str(tmp_path / "message")}
    done = edl_run("-r", "3", *arguments, cwd=tmp_path, environ=environ)
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.glob("edl-*")), "no folder for output that never came"
    message = json.loads((tmp_path / "message").read_text())
    assert (message["exit_code"], message["cause"]) == (code, "")
    assert words in message["message"]
