"""The example of the digits as resources: a job of a student and a pool of teachers."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.machine import ROOT
from tests.cluster.operator_process import OperatorFactory
from tests.kube.scenarios.scene import MEMORY, Scene

DIGITS = ROOT / "examples/digits"
EPOCHS = 30
IMAGES = 1197


def test_digits_are_distilled(
    scene: Scene,
    store: str,
    operator: OperatorFactory,
    pod_template: Callable[..., dict[str, Any]],
    tmp_path: Path,
) -> None:
    """The student ends with its accuracy, and has had exactly one label for every image of each epoch."""
    pytest.importorskip("sklearn", reason="the example needs scikit-learn")
    weights, output = tmp_path / "weights", tmp_path / "output"
    weights.mkdir()
    subprocess.run(
        [sys.executable, "train_teacher.py", "--out", str(weights / "teacher.pt")], cwd=DIGITS, check=True, timeout=300
    )
    template = pod_template(memory=MEMORY, reads=[weights], writes=[output])
    operator("--store", store)
    serve = ["--torch-factory", f"{DIGITS}/nets.py:teacher", "--checkpoint", f"{weights}/teacher.pt"]
    serve += ["--input", "image:float32[1,8,8]", "--output", "logits", "--model", "handwriting"]
    scene.create_pool("handwriting", serve, template, minReplicas=2, maxReplicas=2)
    # Its workers' output, for the test as well: --tee writes it into files.
    run = ["--nproc-per-node", "1", "--tee", "3", "--log-dir", str(output)]
    scene.create_job("student", [*run, str(DIGITS / "train_student.py"), "--teachers", "handwriting"], template)
    scene.wait_success("student")

    text = "".join(path.read_text() for path in output.rglob("stdout.log"))
    accuracy = re.findall(r"student: ([\d.]+)% right", text)
    assert len(accuracy) == 1, text
    assert float(accuracy[0]) > 95, text
    assert f"{EPOCHS * IMAGES:,} rows" in text, text
    found = scene.cluster.get("teacherpools", "handwriting", scene.namespace)["status"]
    assert found["readyReplicas"] == 2, found
