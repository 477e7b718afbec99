"""The vision example at small scale: its commands, and its comparison with teachers and a node killed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.jobs.test_examples import EXAMPLES, commands, right, wait_for

RUN_S = 600.0  # what takes a minute on an idle machine


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the example, with a teacher trained in it."""
    pytest.importorskip("torch", reason="the example needs PyTorch")
    pytest.importorskip("sklearn", reason="the example needs scikit-learn")
    folder = tmp_path_factory.mktemp("example") / "resnet"
    shutil.copytree(EXAMPLES / "resnet", folder, ignore=shutil.ignore_patterns("__pycache__", "*.pt", "runs"))
    output = run(folder, [*commands(folder / "README.md")[0], "--epochs", "8"])
    assert right(output) > 0.9, output
    return folder


def environ(folder: Path) -> dict[str, str]:
    discovery = f"sqlite:///{folder}/discovery.sqlite"
    return {**os.environ, "EDL_DISCOVERY": discovery, "OMP_NUM_THREADS": "1", "MPLCONFIGDIR": str(folder)}


def run(folder: Path, command: list[str]) -> str:
    program = [sys.executable, "-m", "edl"] if command[0] == "edl" else [sys.executable]
    command = [*program, *command[1:]]
    done = subprocess.run(command, cwd=folder, env=environ(folder), capture_output=True, text=True, timeout=RUN_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.timeout(1200)
def test_resnet(folder: Path) -> None:
    """The README's commands for digits train a student, and report draws what compare has run."""
    _, serve, student, *_ = commands(folder / "README.md")
    log = folder / "serve.log"
    with log.open("wb") as file:
        server = subprocess.Popen(
            [sys.executable, "-m", "edl", *serve[1:]], cwd=folder, env=environ(folder), stdout=file, stderr=file
        )
    try:
        wait_for("teacher", environ(folder)["EDL_DISCOVERY"], server, log)
        output = run(folder, [*student, "--epochs", "8"])
    finally:
        server.terminate()
        assert server.wait(60) == 0, log.read_text()
    assert right(output) > 0.8, output
    assert "1 teacher" in output


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_comparison(folder: Path) -> None:
    """A student reaches its last step while teachers and a node are killed, and table and picture are made of it."""
    compare = ["python", "compare.py", "--seeds", "0", "--epochs", "20", "--limit-s", "280"]
    output = run(folder, [*compare, "--arms", "hard", "killed"])
    assert right(output) > 0.85, output
    assert run(folder, [*compare, "--arms", "hard", "killed"]) == "", "what is done is not done again"
    killed = json.loads((folder / "runs" / "killed-0.json").read_text())
    assert killed["lines"][-1]["step"] == killed["lines"][-1]["of"] == 20 * (1497 // 64)
    assert "kill all teachers" in [event["action"] for event in killed["events"]]
    assert {line["nodes"] for line in killed["lines"]} >= {1}
    run(folder, ["python", "report.py", "--runs", "runs", "--folder", "."])
    table = (folder / "README.md").read_text().partition("<!-- table by report.py -->")[2]
    assert "| hard labels | 1 | " in table
    assert (folder / "accuracy.png").read_bytes().startswith(b"\x89PNG")


def test_table_is_of_runs(tmp_path: Path) -> None:
    """The README's table is what report makes of the runs that lie beside it."""
    pytest.importorskip("matplotlib", reason="report draws a picture as well")
    example = EXAMPLES / "resnet"
    for name in ("README.md", "runs.json"):
        shutil.copy(example / name, tmp_path)
    subprocess.run([sys.executable, example / "report.py", "--folder", tmp_path], check=True, timeout=240)
    assert (tmp_path / "README.md").read_text() == (example / "README.md").read_text()


MISSING = "raise ModuleNotFoundError('No module named {0}', name='{0}')"
BROKEN = {"torchvision": "raise RuntimeError('operator torchvision::nms does not exist')", "timm": "import torchvision"}
CALLS = """
import data, nets
for call in (
    lambda: nets.build("timm:resnet50d"),
    lambda: nets.build("torchvision:resnet50"),
    lambda: data.open_images("folder", "train", crop=224),
    lambda: nets.build("tim:resnet50d"),
):
    try:
        call()
    except (ImportError, ValueError) as exc:
        print(exc)
"""


@pytest.mark.parametrize(
    ("modules", "expected"),
    [
        (
            {name: MISSING.format(name) for name in BROKEN},
            [
                "arch=timm:resnet50d needs timm: pip install timm, with a torchvision for torch ",
                "arch=torchvision:resnet50 needs torchvision: pip install torchvision, with a torchvision for torch ",
                "--crop 224 needs torchvision: pip install torchvision, with a torchvision for torch ",
            ],
        ),
        (
            BROKEN,
            [
                "arch=timm:resnet50d: timm cannot be imported (operator torchvision::nms does not exist): take",
                "arch=torchvision:resnet50: torchvision cannot be imported (operator torchvision::nms does not exist)",
                "--crop 224: torchvision cannot be imported (operator torchvision::nms does not exist): take",
            ],
        ),
    ],
)
def test_missing_library_is_named(tmp_path: Path, modules: dict[str, str], expected: list[str]) -> None:
    """Without torchvision and timm, or with a torchvision for another torch, an error says what to install."""
    pytest.importorskip("torch", reason="the example needs PyTorch")
    for name, source in modules.items():
        (tmp_path / f"{name}.py").write_text(source)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), str(EXAMPLES / "resnet")))}
    shown = subprocess.check_output([sys.executable, "-c", CALLS], env=environment, text=True, timeout=120).splitlines()
    wanted = [*expected, "arch=tim:resnet50d: must be one of small, deep, torchvision:NAME or timm:NAME"]
    assert [line[: len(words)] for line, words in zip(shown, wanted, strict=True)] == wanted, shown


def test_replaced_image_is_seen(tmp_path: Path) -> None:
    """A file that is replaced in place is decoded anew, though its folder has the time of before."""
    pytest.importorskip("torch", reason="the example needs PyTorch")
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    path = tmp_path / "data" / "train" / "one" / "a.png"
    path.parent.mkdir(parents=True)
    program = "from data import Images; import sys; print(Images(sys.argv[1], 'train').images[0, 0, 0, 0])"
    shown = []
    for pixel in (7, 9):
        image.new("RGB", (8, 8), (pixel,) * 3).save(path)
        command = [sys.executable, "-c", program, str(tmp_path / "data")]
        environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
        shown.append(subprocess.check_output(command, cwd=EXAMPLES / "resnet", env=environment, text=True, timeout=120))
    assert shown == ["7\n", "9\n"]
