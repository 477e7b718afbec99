"""`edl run` in place of torchrun: scripts that know nothing of EDL, one node, everything that a worker may rely on."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.jobs.collective.job import START_S, Job

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

TORCHRUN = str(Path(sys.executable).with_name("torchrun"))

REPORT = '''
"""Writes down what it was given, sums over all ranks, and prints in a hurry."""
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
        "environ": dict(os.environ), "argv": sys.argv, "path": sys.path[0], "sum": total.tolist(),
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


def given(folder: Path, rank: int) -> dict[str, object]:
    return json.loads((folder / f"given-{rank}.json").read_text())  # type: ignore[no-any-return]


def test_script_finds_what_torchrun_gives(job: Job, tmp_path: Path) -> None:
    """A script of torchruns finds all that torchrun gives."""
    (tmp_path / "report.py").write_text(REPORT)
    (tmp_path / "in").write_text("what comes in")
    command = ["report.py", *ARGUMENTS]
    with (tmp_path / "in").open() as stdin:
        node = job.start(
            "--nproc-per-node", "3", "--log-dir", "logs", "--redirects", "1:1", "--tee", "2:3", "--role", "student",
            command=command, stdin=stdin,
        )  # fmt: skip
        assert node.wait() == 0, node.output
    ours = [given(tmp_path, rank) for rank in range(3)]

    assert [one["sum"] for one in ours] == [[6.0] * 3] * 3
    assert ours[0]["argv"] == command
    assert (ours[0]["name"], ours[0]["file"], ours[0]["path"]) == (
        "__main__",
        str(tmp_path / "report.py"),
        str(tmp_path),
    )
    assert ours[0]["stdin"] == "what comes in"

    # Unbuffered, as under torchrun, so that ranks may write between a line and its end; but every line is there.
    assert [int(number) for number in re.findall(r"line 0 (\d+);", node.output)] == list(range(3000))
    assert "line 1 " not in node.output, "redirected to a file only"
    assert [int(number) for number in re.findall(r"\[student2\]:line 2 (\d+);", node.output)] == list(range(3000))
    logs = {path.parent.name + "/" + path.name: path.read_text() for path in (tmp_path / "logs").rglob("std*.log")}
    assert logs["1/stdout.log"].splitlines() == [f"line 1 {number};" for number in range(3000)]
    assert logs["2/stdout.log"].splitlines() == [f"line 2 {number};" for number in range(3000)]
    assert "no newline 2" in logs["2/stderr.log"]
    assert {"1/stdout.log", "2/stdout.log", "2/stderr.log"} == set(logs)

    subprocess.run(
        [TORCHRUN, "--nproc-per-node", "3", "--role", "student", "report.py", *ARGUMENTS],
        cwd=tmp_path, check=True, capture_output=True, timeout=START_S, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    theirs = [given(tmp_path, rank) for rank in range(3)]
    # Of this one start; and the signals that torchrun's agent passes on to its workers, as ours does not.
    different = {"MASTER_PORT", "MASTER_ADDR", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"}
    apart = {"LINES", "COLUMNS"}
    for mine, real in zip(ours, theirs, strict=True):
        environ: dict[str, str] = mine["environ"]  # type: ignore[assignment]
        wanted: dict[str, str] = real["environ"]  # type: ignore[assignment]
        assert mine["argv"] == real["argv"]
        # OpenMP's own, with a process id in its name, is there once somebody has used it.
        assert {name for name in set(wanted) - set(environ) if not name.startswith("__KMP_")} <= apart
        assert {name: environ[name] for name in wanted if name in environ and name not in different | apart} == {
            name: wanted[name] for name in wanted if name in environ and name not in different | apart
        }
        assert environ["EDL_GENERATION"] == "0"

    # The job has ended: whoever comes now has nothing to do, and finds that out before torch is imported.
    code, said = job.run(command=["report.py"])
    assert (code, "has ended already" in said) == (0, True), said


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


def test_other_interpreter(job: Job, tmp_path: Path) -> None:
    interpreter = tmp_path / "python"
    interpreter.write_text(f'#!/bin/sh\nprintf "given %s\\n" "$*"\nexec {sys.executable} "$@"\n')
    interpreter.chmod(0o755)
    (tmp_path / "show.py").write_text("import os, sys\nprint('rank', os.environ['RANK'], sys.argv)\n")
    job.environ["PYTHON_EXEC"] = str(interpreter)
    code, said = job.run(command=["show.py", "--x"])
    assert code == 0, said
    assert "given -u show.py --x" in said
    assert "rank 0 ['show.py', '--x']" in said
    job.name += "-module"
    code, said = job.run("-m", command=["show", "--y"])
    assert (code, "given -u -m show --y" in said) == (0, True), said
    job.name += "-absent"
    job.environ["PYTHON_EXEC"] = str(tmp_path / "absent")
    code, said = job.run(command=["show.py"])
    assert (code, "there is no such program" in said) == (2, True), said


CHILDREN = '''
"""Imports a module with a thread, one that knows its rank, and one that is not there; has children of its own."""
import os, subprocess, sys
from typing import TYPE_CHECKING
import torch, torch.multiprocessing as mp
import busy, ranked
from torch.utils.data import DataLoader, Dataset

if TYPE_CHECKING:
    import not_installed
try:
    import neither_installed
except ImportError:
    neither_installed = None


class Numbers(Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        return torch.tensor(index)


def square(index, queue):
    queue.put(index * index)


if __name__ == "__main__":
    assert busy.ask(20) == 21, "the module's thread answers"
    assert ranked.RANK == int(os.environ["RANK"]), "the module read the rank of this worker"
    seen = sorted(int(one) for batch in DataLoader(Numbers(), batch_size=4, num_workers=2) for one in batch)
    assert seen == list(range(12)), seen
    queue = mp.get_context("spawn").SimpleQueue()
    mp.spawn(square, args=(queue,), nprocs=1)
    assert queue.get() == 0
    subprocess.Popen(["sleep", "1000"])
    sys.stdout.write(f"all is well on {os.environ['RANK']}\\n")  # one write: ranks share the pipe
'''

BUSY = """
import queue, threading
asked, answers = queue.Queue(), queue.Queue()
def work():
    while True:
        answers.put(asked.get() + 1)
threading.Thread(target=work, daemon=True).start()
def ask(number):
    asked.put(number)
    return answers.get(timeout=10)
"""


def test_imports_with_threads_and_children(job: Job, tmp_path: Path) -> None:
    """Imports with threads and children of the script."""
    (tmp_path / "children.py").write_text(CHILDREN)
    (tmp_path / "busy.py").write_text(BUSY)
    (tmp_path / "ranked.py").write_text("import os\nRANK = int(os.environ.get('RANK', 0))\n")
    code, said = job.run("--nproc-per-node", "2", command=["children.py"])
    assert code == 0, said
    assert "all is well on 0" in said
    assert "all is well on 1" in said
    assert "installed" not in said, "imports that may fail are nobody's business"


LEAVES_A_CHILD = """
import subprocess
CHILD = subprocess.Popen(["sleep", {seconds!r}])
if {seconds!r} == "0":
    import os
    os.waitid(os.P_PID, CHILD.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and nobody has taken leave of it
subprocess.Popen(["sleep", "1000"])  # nobody waits for this one, and it goes when the job does
"""

WAITS_FOR_IT = """
import time
from pathlib import Path
import leaves_a_child

if __name__ == "__main__":
    while Path(f"/proc/{leaves_a_child.CHILD.pid}").exists():
        time.sleep(0.02)
    print("its parent has taken leave of it")
"""


@pytest.mark.parametrize("seconds", ["0", "1"], ids=["during the import", "while workers run"])
def test_import_leaves_a_child_that_ends(job: Job, tmp_path: Path, seconds: str) -> None:
    """An import that leaves a child which ends."""
    (tmp_path / "leaves_a_child.py").write_text(LEAVES_A_CHILD.format(seconds=seconds))
    (tmp_path / "waits.py").write_text(WAITS_FOR_IT)
    code, said = job.run("--preload", "leaves_a_child", command=["waits.py"])
    assert code == 0, said
    assert "its parent has taken leave of it" in said


FAILING = '''
"""The last rank fails: by its exit code or by an exception, in the first generations or always."""
import os, sys
import torch.distributed as dist

if __name__ == "__main__":
    how, until = sys.argv[1], int(sys.argv[2])
    dist.init_process_group("gloo")
    sys.stdout.write("generation %s\\n" % os.environ["EDL_GENERATION"])  # one write: ranks share the pipe
    dist.barrier()  # else one may lose contact before it has said that
    if dist.get_rank() == dist.get_world_size() - 1 and int(os.environ["EDL_GENERATION"]) < until:
        if how == "exit":
            sys.exit(3)
        raise LookupError("the user's own mistake")
    dist.barrier()
    dist.destroy_process_group()
'''


def test_script_errors_are_forgiven(job: Job, tmp_path: Path) -> None:
    """An error of the script is told and forgiven as often as wanted."""
    (tmp_path / "failing.py").write_text(textwrap.dedent(FAILING))
    code, said = job.run("--nproc-per-node", "2", command=["failing.py", "exit", "99"])
    assert code == 1, said
    assert "exit code 3" in said
    assert said.count("generation 0\n") == 2
    assert "generation 1\n" not in said, "not restarted"
    job.nothing_is_left()

    # Under the same name once more, and with two errors forgiven.
    code, said = job.run("--nproc-per-node", "2", "--max-restarts", "2", command=["failing.py", "raise", "3"])
    assert code == 0, said
    assert said.count("LookupError: the user's own mistake") >= 2
    assert said.count("generation 3\n") == 2


def test_too_few_nodes(job: Job) -> None:
    code, said = job.run("--nnodes", "2:3", "--rdzv-conf", "join_timeout=1", "--no-prewarm")
    assert code == 75, said
    assert "only 1 node of at least 2 came within" in said
    assert "join_timeout" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nnodes", "3:2", "train.py"], "--nnodes 3:2"),
        (["--nnodes", "1:2", "train.py"], "--rdzv-id NAME is needed"),
        (["no-such-script.py"], "no-such-script.py"),
        (["--nproc-per-node", "none", "train.py"], "--nproc-per-node none"),
    ],
)
def test_wrong_usage(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from edl.cli import main

    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    assert main(["run", *arguments]) == 2
    assert message in capsys.readouterr().err
