"""The node check with real probes, of a node that is fit and one that is broken."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.jobs.collective.job import Job

pytestmark = pytest.mark.timeout(600)  # a probe imports torch, in each round, on each node

# Found by each Python process: a probe of a broken node fails.
SITE = """\
import os, sys

if any("node_check" in word for word in sys.orig_argv):
    if os.environ.get("PROBE") == "broken":
        raise SystemExit("this node's probe is broken")
"""


def test_faulty_node_does_not_join(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(SITE)
    options = ("--nnodes", "1:2", "--node-check", "--rdzv-conf", "last_call_timeout=0")
    with Job(tmp_path, options, environ={"PYTHONPATH": str(tmp_path)}) as job:
        fit = job.start()
        job.wait_for_world(1)
        assert "checking itself" in fit.output
        job.environ["PROBE"] = "broken"
        code, said = job.run()
        assert code == 69, said
        assert "this node is faulty: could not compute: SystemExit: this node's probe is broken; it does not" in said
        job.end()
        assert fit.wait() == 0
        assert {one.generation for one in job.steps()} == {0}
