"""The vision example at small scale: its commands, and its comparison with teachers and a node killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.jobs.examples.running import EXAMPLES, Example, right


@pytest.mark.timeout(900)
def test_resnet(tmp_path: Path) -> None:
    """The README's commands for digits train a student, and one reaches its last step while teachers and a node die."""
    example = Example("resnet", tmp_path, "torch", "sklearn")
    train_teacher, serve, student, *_ = example.commands
    assert right(example.run(train_teacher, "--epochs", "5")) > 0.8
    with example.served("serve", serve):
        output = example.run(student, "--epochs", "3")
    assert right(output) > 0.5, output
    assert "1 teacher" in output

    options = ["--seeds", "0", "--epochs", "10", "--limit-s", "280", "--lease-ttl", "10", "--arms", "killed"]
    compare = ["python", "compare.py", *options]
    assert right(example.run(compare)) > 0.8
    assert example.run(compare) == "", "what is done is not done again"
    killed = json.loads((example.folder / "runs" / "killed-0.json").read_text())
    assert killed["lines"][-1]["step"] == killed["lines"][-1]["of"] == 10 * (1497 // 64)
    assert "kill all teachers" in [event["action"] for event in killed["events"]]
    assert {line["nodes"] for line in killed["lines"]} >= {1}
    example.run(["python", "report.py", "--runs", "runs", "--folder", "."])
    table = (example.folder / "README.md").read_text().partition("<!-- table by report.py -->")[2]
    assert "| distilled, two nodes; teachers and a node killed | 1 | " in table
    assert (example.folder / "accuracy.png").read_bytes().startswith(b"\x89PNG")


BROKEN = {"torchvision": "raise RuntimeError('operator torchvision::nms does not exist')", "timm": "import torchvision"}
MISSING = "raise ModuleNotFoundError('No module named {0}', name='{0}')"
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
    ("modules", "words"),
    [
        ({name: MISSING.format(name) for name in BROKEN}, "{0} needs {1}: pip install {1}, with a torchvision for "),
        (BROKEN, "{0}: {1} cannot be imported (operator torchvision::nms does not exist)"),
    ],
)
def test_missing_library_is_named(tmp_path: Path, modules: dict[str, str], words: str) -> None:
    """Without torchvision and timm, or with a torchvision for another torch, an error says what to install."""
    pytest.importorskip("torch", reason="the example needs PyTorch")
    for name, source in modules.items():
        (tmp_path / f"{name}.py").write_text(source)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), str(EXAMPLES / "resnet")))}
    shown = subprocess.check_output([sys.executable, "-c", CALLS], env=environment, text=True, timeout=120).splitlines()
    options = [("arch=timm:resnet50d", "timm"), ("arch=torchvision:resnet50", "torchvision")]
    wanted = [words.format(*each) for each in [*options, ("--crop 224", "torchvision")]]
    wanted.append("arch=tim:resnet50d: must be one of small, deep, torchvision:NAME or timm:NAME")
    assert [line[: len(start)] for line, start in zip(shown, wanted, strict=True)] == wanted, shown
