"""`edl train`: a worker is killed in the middle, and the trained model is the same, bit for bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from edl.testing import LocalTeacher

pytestmark = pytest.mark.timeout(300)

MODEL = """
import os, pathlib, signal
import torch

def model():
    torch.nn.Linear(4, 4)  # draws random numbers, as initial weights do
    return torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 10)).eval()

def transform(columns):
    if os.environ["RANK"] == "1" and len(columns["x"]) > 1 and (columns["number"] == 77).any():
        seen = len(list(pathlib.Path("seen").iterdir()))
        pathlib.Path("seen", str(seen)).touch()
        if seen == 1 and "KILL" in os.environ:  # in its second epoch, with batches read ahead
            os.kill(os.getpid(), signal.SIGKILL)
    return columns
"""
COMMAND = (
    *(sys.executable, "-m", "edl", "train", "definition.py", "--data", "rows.parquet", "--eval", "rows.parquet"),
    *("--inputs", "x", "--epochs", "5", "--batch", "16", "--workers", "2"),
)


def test_killed_worker_changes_nothing(tmp_path: Path) -> None:
    """With soft labels, dropout and an evaluation per epoch."""
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    import pyarrow

    random, found = np.random.default_rng(0), []
    x = random.random((320, 4), dtype=np.float32)
    table = pyarrow.table({"x": x.tolist(), "label": random.integers(0, 10, 320), "number": range(320)})
    with LocalTeacher("fingerprint") as teacher:
        command = [*COMMAND, "--teachers", teacher.endpoint, "--teacher-output", "y"]
        for name, environ in (("calm", {}), ("killed", {"KILL": "1"})):
            folder = tmp_path / name
            (folder / "seen").mkdir(parents=True)
            (folder / "definition.py").write_text(MODEL)
            parquet.write_table(table, folder / "rows.parquet")
            environ = {**os.environ, "OMP_NUM_THREADS": "1", "EDL_DISCOVERY": f"sqlite:///{folder}/store", **environ}
            done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=200)
            assert done.returncode == 0, done.stdout + done.stderr
            assert ("generation 1" in done.stderr) == (name == "killed"), done.stderr
            metrics = json.loads((folder / "trained" / "metrics.json").read_text())
            assert [result["step"] for result in metrics] == [19, 39, 59, 79, 99]
            assert (folder / "trained" / "model.pt2").exists(), done.stdout
            found.append((load_file(folder / "trained" / "model.safetensors"), metrics))
    (calm, calm_metrics), (killed, killed_metrics) = found
    assert all(torch.equal(calm[name], killed[name]) for name in calm)
    assert killed_metrics == calm_metrics
