"""kubectl reads what EDL writes, and EDL reads what people write for kubectl: both have its numbers and booleans."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from edl.cli.kube.manifests import dump_manifests, make_submission, read_manifests
from edl.cli.kube.submit import parse_options
from tests.cluster.api import kubectl_program, run_program
from tests.fast.cli.kube.test_submission import ODD_TEXTS

SPELLED = (
    "12:30", "-1:30", "1:30.5", "1e-3", "5E4", "0o17", "017", "08", "0x1F", "0b11", "1_000", "2026-01-31", "10:00:00Z",
    "2026-01-31T12:00:00Z", "no", "Yes", "off", "true", ".5", "1.", "+1", "-0", "~", "null", "1.2.3", "1e", "e1", "+",
    "0644", "1e+2",
)  # fmt: skip


def read_by_kubectl(text: str) -> Any:
    """What kubectl makes of a manifest, without a cluster."""
    if not (program := kubectl_program()):
        pytest.skip("kubectl is neither in .tools/helm nor on PATH: tools/kubernetes.sh fetches it")
    command = [program, "--kubeconfig", "/dev/null", "label", "--local", "-f", "-", "-o", "json", "a=b"]
    return json.loads(run_program(command, text))


def test_files_are_read_as_by_kubectl(tmp_path: Path) -> None:
    lines = "".join(f"  v{number}: {text}\n" for number, text in enumerate(SPELLED))
    path = tmp_path / "pool.yaml"
    path.write_text(f"apiVersion: edl.io/v1alpha1\nkind: TeacherPool\nmetadata: {{name: a}}\nspec:\n{lines}")
    (manifest,) = read_manifests(str(path))
    assert manifest["spec"] == read_by_kubectl(path.read_text())["spec"]


def test_kubectl_reads_the_same() -> None:
    texts = dict(enumerate(ODD_TEXTS))
    variables = [f"--env=V{number}={text}" for number, text in texts.items()]
    job = make_submission(parse_options(["--name=a", "--image=i", *variables, "t.py", *ODD_TEXTS]), None)[-1]
    job["metadata"]["annotations"] = {f"k{number}": text for number, text in texts.items()}
    found = read_by_kubectl(dump_manifests([job]))
    assert found["spec"] == job["spec"]
    assert found["metadata"]["annotations"] == job["metadata"]["annotations"]
