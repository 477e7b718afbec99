"""A script's imports behave as under torchrun: their order, arguments, environment and random numbers."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.jobs.collective.run.test_words import edl_run

pytestmark = pytest.mark.timeout(240)  # jobs of `edl run` and of torchrun, each of which may take 100 s

TRAIN = """
import config
import os, sys
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib"))
import chosen
os.environ["KERAS_BACKEND"] = "torch"
import backend
import torch
line = f"lr={config.ARGUMENTS.lr} chosen={chosen.WHERE} backend={backend.NAME}"
own = f"{config.RANDOM} {config.GENERATOR} {config.GLOBAL}"
rank = os.environ["RANK"]
os.write(1, f"SAME {rank} {line}\\nOWN {rank} {own}\\n".encode())  # one write: the ranks share the pipe
"""
FILES = {
    "train.py": TRAIN,
    "config.py": """
import argparse, random
import numpy as np
parser = argparse.ArgumentParser()
parser.add_argument("--lr", default="not given")
ARGUMENTS, _ = parser.parse_known_args()
RANDOM, GENERATOR, GLOBAL = random.random(), np.random.default_rng().integers(1 << 60), np.random.rand()
""",
    "chosen.py": "WHERE = 'beside the script'",
    "lib/chosen.py": "WHERE = 'inserted'",
    "backend.py": "import os\nNAME = os.environ.get('KERAS_BACKEND', 'not set')",
}


def lines(text: str, kind: str) -> list[str]:
    return sorted(line for line in text.splitlines() if line.startswith(kind))


@pytest.mark.slow
def test_imports_are_as_under_torchrun(tmp_path: Path) -> None:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    arguments = ["--standalone", "--nproc-per-node", "2", "train.py", "--lr", "0.5"]
    ours = edl_run(*arguments, cwd=tmp_path)
    command = [sys.executable, "-m", "torch.distributed.run", *arguments]
    theirs = subprocess.run(command, cwd=tmp_path, env=dict(os.environ), capture_output=True, text=True, timeout=100)
    assert ours.returncode == theirs.returncode == 0, ours.stderr + theirs.stderr
    assert lines(ours.stdout, "SAME") == lines(theirs.stdout, "SAME") != []
    first, second = (line.split()[2:] for line in lines(ours.stdout, "OWN"))
    assert all(a != b for a, b in zip(first, second, strict=True)), "each rank has random numbers of its own"
    assert "config.py, line 4 runs before torch is imported (--preload torch" in ours.stderr, ours.stderr


def test_each_rank_draws_its_own_numbers(tmp_path: Path) -> None:
    """Also of generators that were there before the fork: torch seeds its own by chance in each process."""
    draw = "float(torch.rand(1)), numpy.random.rand(), random.random()"
    (tmp_path / "train.py").write_text(
        f"import os, random, numpy, torch\nos.write(1, ('DRAW %r %r %r\\n' % ({draw})).encode())"
    )
    done = edl_run("--standalone", "--nproc-per-node", "2", "train.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    first, second = (line.split()[1:] for line in lines(done.stdout, "DRAW"))
    assert all(a != b for a, b in zip(first, second, strict=True)), (first, second)


def test_named_modules_are_imported_once(tmp_path: Path) -> None:
    (tmp_path / "heavy.py").write_text("import os, sys\nPID, ARGV = os.getpid(), sys.argv")
    (tmp_path / "train.py").write_text(
        "import os, torch, heavy\nos.write(1, f'HEAVY {heavy.PID} {os.getpid()} {heavy.ARGV}\\n'.encode())"
    )
    arguments = ["--standalone", "--nproc-per-node", "2", "--preload", "heavy", "train.py", "x"]
    done = edl_run(*arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = [line.split(maxsplit=3)[1:] for line in lines(done.stdout, "HEAVY")]
    assert len({pid for pid, _, _ in found}) == 1, "one process imported it"
    assert all(pid != worker for pid, worker, _ in found)
    assert {argv for _, _, argv in found} == {"['train.py', 'x']"}


def test_fork_that_never_begins_is_replaced(tmp_path: Path) -> None:
    """A lock that only the agent's process for forking ever holds is not found out by trying a fork before."""
    module = """
        import os, signal, time

        def wait():
            if callable(signal.getsignal(signal.SIGCHLD)):  # the process has begun to fork workers
                time.sleep(1000)

        os.register_at_fork(after_in_child=wait)
    """
    (tmp_path / "stuck.py").write_text(textwrap.dedent(module))
    (tmp_path / "train.py").write_text("import torch\nprint('BEGUN')")
    done = edl_run("--standalone", "--hang-after", "3", "--preload", "stuck", "train.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "BEGUN" in lines(done.stdout, "BEGUN"), "one that is slow is replaced, too, after it has begun perhaps"
    assert "did not come to the script's first line within 3 s" in done.stderr, done.stderr


def test_a_wrong_name_to_preload(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    done = edl_run("--standalone", "--preload", "a b", "train.py", cwd=tmp_path)
    assert done.returncode == 2
    assert "--preload a b: wanted are names of modules" in done.stderr
