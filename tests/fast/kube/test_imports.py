"""Who calls Kubernetes: one package, whose errors, timeouts and credentials all others have."""

from __future__ import annotations

import re
from pathlib import Path

EDL = Path(__file__).resolve().parents[3] / "edl"


def find_importers(package: str) -> set[str]:
    pattern = re.compile(rf"^\s*(from|import) {package}\b", re.MULTILINE)
    found = (path for path in EDL.rglob("*.py") if pattern.search(path.read_text()))
    return {path.relative_to(EDL).as_posix() for path in found}


def test_one_package_calls_kubernetes() -> None:
    found = find_importers("kubernetes")
    assert found
    assert {path.rpartition("/")[0] for path in found} == {"kube"}


def test_one_module_knows_kopf() -> None:
    assert find_importers("kopf") == {"master/kube/operator/resource_watches.py"}
