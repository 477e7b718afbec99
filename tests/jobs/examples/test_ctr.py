"""examples/ctr: a worker joins and one is killed, and the table and its predictions are those of a single worker."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.jobs.collective.job import ROOT
from tests.jobs.examples.running import WAIT_S, Example, waits_for

# In double precision: whatever differs by more than its rounding error differs by a sample or a gradient.
SCRIPT = """
import os, pathlib, signal
import torch
import torch.distributed as dist
import train
from edl.collective import Checkpointer
from tests.waiting import wait_until

class Disturbed(Checkpointer):
    def save(self, step, **more):
        if step == 1 and dist.get_world_size() == 1:
            wait_until(lambda: self._status_page.is_pause_requested(1 << 40), "a node joins", 500)
        if step == 20 and dist.get_rank() == 1 and not pathlib.Path("killed").exists():
            pathlib.Path("killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().save(step, **more)

torch.set_default_dtype(torch.float64)
if "DISTURBED" in os.environ:
    train.Checkpointer = Disturbed
train.main()
"""


@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_ctr(tmp_path: Path) -> None:
    example = Example("ctr", tmp_path, "torch", "pyarrow")
    (example.folder / "script.py").write_text(SCRIPT)
    environ = {**example.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'serving'}"}
    prepare, lead, train = example.commands
    example.run([*prepare, "12000"])
    found = {}
    with example.started("master", ["4096" if word == "32768" else word for word in lead]):
        for name, more in (("disturbed", {"DISTURBED": "1"}), ("calm", {})):
            example.environ = {**environ, **more}
            command = [name if word in ("clicks", "checkpoints") else word for word in train]
            command = [*command[:-1], "--lease-ttl", "60", "script.py", "--batch", "512"]
            with example.started(name, command) as first:
                waits_for(first, "generation 0")
                if more:
                    with example.started("second", command) as second:
                        assert second.wait(WAIT_S) == 0, second.output
                assert first.wait(WAIT_S) == 0, first.output
            assert ("2 (worker 0 was killed by SIGKILL (rank 1)): 2 ranks" in first.output) == bool(more), first.output
            auc = re.search(r"AUC (0\.\d+) on 2,000 rows, after 24 steps", first.output)
            assert auc, first.output
            found[name] = auc[1], _trained(example.folder / name)
    assert found["disturbed"][0] == found["calm"][0]
    for key, expected in found["calm"][1].items():
        assert expected.abs().max() > 0, key
        torch.testing.assert_close(found["disturbed"][1][key], expected, rtol=0, atol=1e-9)


def _trained(checkpoints: Path) -> dict[str, torch.Tensor]:
    """The last checkpoint's table, whole, read with PyTorch alone."""
    import torch.distributed.checkpoint as dcp

    (path,) = checkpoints.glob("step-23.*")
    sizes = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    keys = ("model.table.weight", "model.table.squares", "model.deep.0.weight")
    state = {key: torch.empty(sizes[key].size, dtype=torch.float64) for key in keys}
    dcp.load(state, checkpoint_id=path, no_dist=True)
    return state
