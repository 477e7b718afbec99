"""examples/nlp, run as its README says but on few texts, with a teacher that is killed."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from edl.discovery import open_registry
from tests.jobs.collective.job import wait_until
from tests.jobs.test_example_paddle import started
from tests.jobs.test_examples import EXAMPLES, commands, right

WAIT_S = 200.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("torch", "transformers", "tokenizers"):
        pytest.importorskip(name, reason=f"the example needs {name}")
    folder = tmp_path / "nlp"
    ignored = shutil.ignore_patterns("__pycache__", "results.jsonl", "runs", "teacher")
    shutil.copytree(EXAMPLES / "nlp", folder, ignore=ignored)
    return folder


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_nlp(folder: Path, tmp_path: Path) -> None:
    environ = {**os.environ, "EDL_DISCOVERY": f"sqlite:///{tmp_path}/discovery.sqlite", "OMP_NUM_THREADS": "1"}
    train_teacher, serve, student, paddle_student = commands(folder / "README.md")[:4]

    def run(command: list[str], *more: str) -> str:
        command = [sys.executable, *command[1:], *more, "--results", "results.jsonl"]
        done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=WAIT_S)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert right(run(train_teacher, "--epochs", "2")) > 0.9
    with contextlib.ExitStack() as stack:
        teachers, logs = [], [tmp_path / "one.requests", tmp_path / "two.requests"]
        for log in logs:
            command = [sys.executable, "-m", "edl", *serve[1:], "--access-log", str(log)]
            teachers.append(stack.enter_context(started(log.stem, command, folder, environ)))
        with open_registry(environ["EDL_DISCOVERY"]) as registry:
            wait_until(lambda: len(registry.snapshot("sentiment").instances) == 2, "both teachers", WAIT_S)

        def answered(log: Path) -> int:
            return log.read_text().count('"OK"') if log.exists() else 0

        command = [sys.executable, *student[1:], "--results", "results.jsonl"]
        trained = stack.enter_context(started("student", command, folder, environ))
        for log in logs:
            wait_until(lambda log=log: answered(log) >= 3, f"answers in {log}", WAIT_S)
        assert trained.process.poll() is None
        teachers[0].signal_all(signal.SIGKILL)
        before = answered(logs[1])
        assert trained.wait(WAIT_S) == 0, trained.output
        assert answered(logs[1]) > before
        assert right(trained.output) > 0.7

        if any((Path(entry) / "paddle").is_dir() for entry in sys.path):
            assert right(run(paddle_student, "--cache")) > 0.6
        teachers[1].process.terminate()
        assert teachers[1].wait() == 0, teachers[1].output
    kept = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    assert [line["model"] for line in kept[:2]] == ["teacher", "cnn"]


def test_nlp_table(tmp_path: Path) -> None:
    """Means and gains come from the seeds of which every run is there."""
    pytest.importorskip("matplotlib", reason="the table's program draws as well")
    lines: list[dict[str, object]] = []
    for seed in (0, 1, 2):
        lines.append({"seed": seed, "model": "teacher", "test": 0.8})
        for net in ("bow", "cnn", "lstm"):
            for taught in (False, True):
                for more in (False, True):
                    test = 0.6 + 0.02 * seed + 0.05 * taught + 0.03 * more
                    lines.append({"seed": seed, "model": net, "taught": taught, "more_text": more, "test": test})
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines[:-1]))
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "nlp" / "table.py")], cwd=tmp_path, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert "2 seeds. Teacher: 80.0 ± 0.0." in done.stdout
    assert "| hard labels | 61.0 ± 1.4 | 61.0 ± 1.4 | 61.0 ± 1.4 |" in done.stdout
    assert "| of both | +8.0 (+8.0 to +8.0) |" in done.stdout
    assert (tmp_path / "accuracy.png").stat().st_size > 5_000


def test_nlp_readme_has_the_table(tmp_path: Path) -> None:
    """The README's tables are what the program makes of the results that lie beside it."""
    pytest.importorskip("matplotlib", reason="the table's program draws as well")
    example = EXAMPLES / "nlp"
    command = [sys.executable, str(example / "table.py"), "--results", str(example / "results.jsonl")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith("|")]
    assert len(rows) == 13
    readme = (example / "README.md").read_text().splitlines()
    assert [row for row in rows if row not in readme] == []
