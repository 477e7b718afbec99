"""`make soak` itself, for some seconds and with a few of its students."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_soak_runs_and_counts(tmp_path: Path) -> None:
    out = tmp_path / "soak.json"
    command = [sys.executable, "-m", "tests.soak", "--minutes", "0.2", "--students", "batch,cached", "--json", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert out.exists(), done.stdout + done.stderr
    outcome = json.loads(out.read_text())
    counts = outcome["counts"]
    wrong = {name: counts[name] for name in ("lost", "repeated", "mislabelled", "changed")}
    assert counts["rows"] > 0, "students delivered rows"
    assert not any(wrong.values()), wrong
    assert not outcome["hangs"], outcome["hangs"]
    assert sum(outcome["faults"].values()) > 0, "faults were injected"
