"""The example of the digits as resources: a job of a student, and a pool of teachers that grows with its load."""

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
from tests.kubernetes.scenarios.scene import MEMORY, PROGRAMS, Scene

DIGITS = ROOT / "examples/digits"
EPOCHS = 30
IMAGES = 1197
DELAY_S = 0.1
"""Of a call with up to 64 images: a teacher alone would take 57 s, and a second one is wanted after 15 s of load."""


def test_digits_are_distilled(
    scene: Scene,
    store: str,
    operator: OperatorFactory,
    pod_template: Callable[..., dict[str, Any]],
    tmp_path: Path,
) -> None:
    """The student ends with its accuracy, and has had exactly one label for every image of each epoch.

    Nobody says how many teachers there are to be, but for `maxReplicas`: there is none without a student, and the load
    brings the first and the second.
    """
    pytest.importorskip("sklearn", reason="the example needs scikit-learn")
    weights, output = tmp_path / "weights", tmp_path / "output"
    weights.mkdir()
    subprocess.run(
        [sys.executable, "train_teacher.py", "--out", str(weights / "teacher.pt")], cwd=DIGITS, check=True, timeout=300
    )
    template = pod_template(memory=MEMORY, reads=[weights], writes=[output])
    operator("--store", store)
    serve = ["--torch-factory", f"{PROGRAMS}/slow_digits.py:teacher", "--option", f"delay_s={DELAY_S}"]
    serve += ["--checkpoint", f"{weights}/teacher.pt"]
    serve += ["--input", "image:float32[1,8,8]", "--output", "logits", "--model", "handwriting"]
    scene.create_pool("handwriting", serve, template, minReplicas=0, maxReplicas=2)
    scene.wait("a pool at rest", lambda: pool_status(scene).get("wantedReplicas") == 0)
    assert scene.cluster.list_pods(scene.namespace) == [], "a teacher that no student waits for"
    # Its workers' output, for the test as well: --tee writes it into files.
    run = ["--nproc-per-node", "1", "--tee", "3", "--log-dir", str(output)]
    scene.create_job("student", [*run, str(DIGITS / "train_student.py"), "--teachers", "handwriting"], template)
    scene.wait_success("student")

    text = "".join(path.read_text() for path in output.rglob("stdout.log"))
    accuracy = re.findall(r"student: ([\d.]+)% right", text)
    assert len(accuracy) == 1, text
    assert float(accuracy[0]) > 95, text
    assert f"{EPOCHS * IMAGES:,} rows" in text, text
    scene.wait("two ready teachers", lambda: pool_status(scene)["readyReplicas"] == 2)
    events = scene.cluster.ask(f"/api/v1/namespaces/{scene.namespace}/events")["items"]
    grown = {event["message"] for event in events if event["reason"] == "Grew"}
    assert grown == {"1 teachers have a node, 0 before", "2 teachers have a node, 1 before"}
    spec = scene.cluster.get("teacherpools", "handwriting", scene.namespace)["spec"]
    assert (spec["scaling"], spec["minReplicas"], spec["replicas"]) == ("auto", 0, 0), "nobody has said a number"


def pool_status(scene: Scene) -> dict[str, Any]:
    """What the operator says of the pool; {} before it has said anything."""
    found: dict[str, Any] = scene.cluster.get("teacherpools", "handwriting", scene.namespace).get("status", {})
    return found
