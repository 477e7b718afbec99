"""examples/llm at small scale: as its README says, and with both teachers killed. The real vLLM is not started here."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.test_example_paddle import started
from tests.jobs.test_examples import EXAMPLES, commands, wait_for

WAIT_S = 600.0
SMALL = ["--limit-files", "4", "--batch", "4", "--completion", "8", "--steps", "120"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example, with a teacher."""
    for name in ("torch", "transformers", "tokenizers"):
        pytest.importorskip(name, reason=f"the example needs {name}")
    folder = tmp_path_factory.mktemp("examples") / "llm"
    ignored = shutil.ignore_patterns("__pycache__", "runs", "runs.json", "students.png", "teacher")
    shutil.copytree(EXAMPLES / "llm", folder, ignore=ignored)
    train_teacher = commands(folder / "README.md")[0]
    more = ["--limit-files", "4", "--epochs", "3", "--batch", "4", "--vocabulary", "400"]
    output = run(folder, *train_teacher[1:], *more)
    assert "written to teacher" in output
    return folder


def run(folder: Path, *command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=environ(folder), capture_output=True, text=True, timeout=WAIT_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def environ(folder: Path) -> dict[str, str]:
    return {**os.environ, "EDL_DISCOVERY": f"sqlite:///{folder}/discovery.sqlite", "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def whole(folder: Path) -> dict[str, Any]:
    """What came of a student that was trained as the README says, by a teacher that stayed."""
    _, serve, student = commands(folder / "README.md")[:3]
    with contextlib.ExitStack() as stack:
        command = [sys.executable, "-m", "edl", *serve[1:]]
        server = stack.enter_context(started("server", command, folder, environ(folder)))
        wait_for("code", environ(folder)["EDL_DISCOVERY"], server.process, server.output_path, WAIT_S)
        output = run(folder, *student[1:], *SMALL, "--out", "student.json")
        server.process.terminate()
        assert server.wait() == 0, server.output
    assert "on-policy: perplexity" in output
    found: dict[str, Any] = json.loads((folder / "student.json").read_text())
    return found


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_llm(whole: dict[str, Any]) -> None:
    """A student learns: 400 is the perplexity of a model that has learned nothing."""
    assert 1 < whole["perplexity"] < 200
    assert 0 < whole["own_text"] < 2


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_llm_killed(folder: Path, whole: dict[str, Any]) -> None:
    """With both teachers killed a student becomes as good, and the log shows it."""
    pytest.importorskip("matplotlib", reason="report.py draws")
    compare = ["compare.py", "--arms", "killed", "--seeds", "0", "--student", " ".join(SMALL)]
    run(folder, *compare, "--limit-s", str(WAIT_S))
    killed = json.loads((folder / "runs/killed-0.json").read_text())
    assert killed["perplexity"] == pytest.approx(whole["perplexity"], rel=0.1)
    assert killed["own_text"] == pytest.approx(whole["own_text"], rel=0.3)
    assert [event["action"] for event in killed["events"]] == [
        "kill the second teacher",
        "start a teacher",
        "kill the first teacher",
    ]
    live = [line["teachers"] for line in killed["lines"]]
    assert max(live) == 2, live
    assert min(live) < 2, live
    assert killed["lines"][-1]["step"] == 120
    before = (folder / "runs/killed-0.json").stat().st_mtime_ns
    assert run(folder, *compare) == "", "runs that are done are not made again"
    assert (folder / "runs/killed-0.json").stat().st_mtime_ns == before
    run(folder, "report.py", "--runs", "runs")
    assert "| on-policy, both teachers killed | 1 |" in (folder / "README.md").read_text()


def test_llm_report(tmp_path: Path) -> None:
    """Means, spreads and differences are those of the runs."""
    pytest.importorskip("matplotlib", reason="report.py draws")
    shutil.copy(EXAMPLES / "llm/README.md", tmp_path)
    runs: list[dict[str, Any]] = []
    for arm, gain, again in (("hard", 0, 0), ("off-policy", 2, 0), ("on-policy", 3, 0), ("killed", 3, 70)):
        for seed in (0, 1, 2):
            taught = {"teachers": 2, "tokens": 100, "resent": again, "hedged": 0, "answered": {"one": 75, "two": 25}}
            then = {"tokens": 50, "resent": again // 7, "hedged": 1, "answered": {"one": 45, "two": 5}}
            lines = [{"step": 10, "of": 20, "loss": 1, "time": 5.0} | (taught if gain else {})]
            lines.append(lines[0] | {"step": 20, "time": 6.0} | (then if gain else {}))
            measures = {"perplexity": 20.0 + seed - gain, "own_text": 1.0 - 0.1 * gain}
            teachers = {"one": "edl serve --hf", "two": "vLLM"} if gain else {}
            runs.append({"arm": arm, "seed": seed, **measures, "parameters": 7, "teachers": teachers, "lines": lines})
            runs[-1]["events"] = [{"time": 5.5, "action": f"action {number}"} for number in range(3 if again else 0)]
    teacher = {"perplexity": 9.0, "parameters": 70, "tokens": 1000, "files": 9, "held_out_files": 1}
    teacher |= {"held_out_tokens": 100, "python": "3.11.7"}
    (tmp_path / "runs.json").write_text(json.dumps({"teacher": teacher, "runs": runs}))
    command = [sys.executable, str(EXAMPLES / "llm/report.py"), "--folder", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "README.md").read_text()
    assert "| hard labels | 3 | 21.00 ± 1.00 | 1.000 ± 0.000 |  |  |" in text
    assert "| on-policy, both teachers killed | 3 | 18.00 ± 1.00 | 0.700 ± 0.000 | 20% | 81 |" in text
    assert "| off-policy, against hard labels | -2.00 (-2.00 to -2.00) | -0.200 (-0.200 to -0.200) |" in text
    assert "Teachers: edl serve --hf and vLLM." in text
    assert "not made yet" not in text
    assert (tmp_path / "students.png").stat().st_size > 5_000


def test_llm_table_is_of_runs(tmp_path: Path) -> None:
    """The README's table is what report makes of the runs that lie beside it."""
    pytest.importorskip("matplotlib", reason="report.py draws")
    example = EXAMPLES / "llm"
    for name in ("README.md", "runs.json"):
        shutil.copy(example / name, tmp_path)
    command = [sys.executable, str(example / "report.py"), "--folder", str(tmp_path)]
    subprocess.run(command, check=True, timeout=WAIT_S)
    assert (tmp_path / "README.md").read_text() == (example / "README.md").read_text()
