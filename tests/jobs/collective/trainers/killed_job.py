"""One `edl run` job of two workers, one of which a script may kill."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tests.jobs.collective.job import ROOT, Job

RUN_S = 250.0  # each worker imports what it trains with, which takes a minute on a busy machine


def run(script: str, folder: Path, kill_at: int, *options: str, environ: Mapping[str, str] | None = None) -> Path:
    """Run a script until it ends well. Returns the folder where it says what it found out."""
    folder.mkdir()
    command = [str(Path(__file__).with_name(script)), str(folder), str(kill_at), *options]
    environ = {"PYTHONPATH": str(ROOT), **(environ or {})}
    with Job(folder / "job", ("--nproc-per-node", "2"), command, environ=environ) as job:
        node = job.start()
        code, output = node.wait(RUN_S), node.output
    assert code == 0, output
    assert (folder / "killed").exists() is (kill_at >= 0), output
    begins = [int(line) for line in (folder / "begins").read_text().split()]
    assert begins[-1] > 0 or kill_at < 0, f"it began anew, which is no recovery: {begins}"
    return folder
