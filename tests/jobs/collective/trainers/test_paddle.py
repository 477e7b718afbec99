"""Real Paddle trainers under `edl run --framework paddle`: killed, and bit for bit as if they were not."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.collective.job import Job

pytestmark = [
    pytest.mark.timeout(500),
    pytest.mark.skipif(find_spec("paddle") is None, reason="PaddlePaddle is not installed"),
    pytest.mark.skipif(find_spec("torch") is None, reason="edl run needs PyTorch"),
]
RUN_S = 300.0
SCRIPT = str(Path(__file__).with_name("train_paddle.py"))
KILLS = [(0, 1, 4, "before the update"), (1, 0, 9, "before the save"), (2, 0, 11, "after the save")]


def said(job: Job, what: str) -> list[dict[str, Any]]:
    """What trainers said, of one kind."""
    path = job.folder / "said.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [line for line in map(json.loads, lines) if what in line]


def test_killed_trainers_end_the_same(tmp_path: Path) -> None:
    """With the parameters of a run without EDL. Then an error of the script ends the job.

    Though the other trainer, whose peer is gone, ends by a signal: Paddle's gloo aborts it.
    """
    options, environ = ("--framework", "paddle", "--nproc-per-node", "2"), {"OMP_NUM_THREADS": "1"}
    with Job(tmp_path, options, [SCRIPT], environ={**environ, "KILLS": json.dumps(KILLS)}) as killed:
        node = killed.start()
        assert node.wait(RUN_S) == 1, node.output
        assert "LookupError: the user's own mistake" in node.output
        killed.nothing_is_left()
    # The step in which one was killed counts if another had finished it.
    restored = {(line["generation"], line["rank"]): line["restored"] for line in said(killed, "restored")}
    assert sorted(restored) == [(generation, rank) for generation in range(4) for rank in range(2)]
    assert [restored[(generation, 0)] == restored[(generation, 1)] for generation in range(4)] == [True] * 4
    assert restored[(0, 0)] == -1
    assert restored[(1, 0)] in (3, 4)
    assert restored[(2, 0)] in (8, 9)
    assert restored[(3, 0)] == 11
    calm, ended = (
        {line["rank"]: (line[what], line["loss"]) for line in said(killed, what)} for what in ("calm", "ended")
    )
    assert ended == calm
    assert calm[0][0] == calm[1][0]
    assert calm[0][1] != calm[1][1], "each has data of its own"
