"""Two ranks make the update of one, with all texts in a batch, however samples are shared out between them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("transformers", "5.23", reason="transformers is not installed, or too old")

from edl.testing import LocalTeacher  # noqa: E402
from tests.fast.distill.trainers.students import (  # noqa: E402
    VOCABULARY,
    collate_right,
    expected_loss,
    parameters,
    small_mixture,
    small_model,
    texts,
)
from tests.fast.distill.trainers.two_ranks import WAYS  # noqa: E402

ROOT = Path(__file__).parents[4]
RUN_S = 300.0  # every rank imports transformers, which takes a minute on a busy machine


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_two_ranks_make_the_update_of_one(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(Path(__file__).with_name("two_ranks.py")), str(tmp_path)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with LocalTeacher("prefix_scores", vocabulary=VOCABULARY) as teacher:
        environ["EDL_TEACHERS"] = teacher.endpoint
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=RUN_S)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert found.keys() == WAYS.keys()
    for name, way in WAYS.items():
        samples = texts(way["count"])
        if name.endswith("uneven"):  # filled up from the beginning
            samples += samples[:2]
        if name == "dropped":  # a batch of two, and one that is no rank's
            samples = samples[:18]
        shares = [samples]
        if "own" in name:  # a mean of the ranks' means; they take batches of three in turns
            shares = [[text for at, text in enumerate(samples) if at // 3 % 2 == rank] for rank in range(2)]
        student = small_mixture(2) if name == "experts" else small_model(2)
        loss = torch.stack([expected_loss(student, share, k=5, beta=0.5, hard=0.25) for share in shares]).mean()
        if name == "experts":  # a router's loss is of a batch, and the step's is the mean over all of them
            batches = [collate_right(samples[at : at + 3]) for at in range(0, 24, 3)]
            added = torch.stack([student(**{**batch, "labels": None}).aux_loss for batch in batches]).mean()
            loss = loss + 0.5 * added
        loss.backward()
        with torch.no_grad():
            for parameter in student.parameters():
                parameter -= 0.5 * parameter.grad
        trained = torch.tensor(found[name]["parameters"])
        difference = (trained - parameters(student)).abs().max()
        assert difference < 1e-5, f"{name}: off by {difference}"
        assert found[name]["loss"] == pytest.approx(loss.item(), abs=1e-4), name
