"""What the scripts of this folder share: their options, two runs to compare, and a worker that kills itself in one.

Each script trains the same twice: without EDL, in the first generation alone, and with it. In the second run rank 1 is
killed in one step; the job's next generation goes on from memory. Both outcomes are written down, bit for bit.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.utils import counters
from torch.distributed.tensor import DTensor


class Run:
    """One of the two runs of a script; `elastic` says which."""

    def __init__(self, options: argparse.Namespace, elastic: bool) -> None:
        self.options, self.elastic = options, elastic
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    def begin(self, position: int) -> None:
        """Note where the elastic run begins, in each generation."""
        if self.elastic and self.rank == 0:
            with (self.options.folder / "begins").open("a") as file:
                file.write(f"{position}\n")

    def kill(self, step: int) -> None:
        """Kill rank 1 of the elastic run at the end of a step, once."""
        mark = self.options.folder / "killed"
        if self.elastic and step == self.options.kill_at and self.rank == 1 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def write(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, logs: Any) -> None:
        """Write parameters, the optimizer's state and logs; all ranks call it, since shards are gathered."""
        outcome = {
            "weights": {name: _values(tensor) for name, tensor in model.state_dict().items()},
            "optimizer": [
                {name: _values(value) for name, value in optimizer.state[parameter].items()}
                for group in optimizer.param_groups
                for parameter in group["params"]
            ],
            "logs": logs,
            "sharded": all(isinstance(tensor, DTensor) for tensor in model.parameters()),
            "compiled": counters["stats"]["unique_graphs"] > 0,
        }
        (self.options.folder / f"{'elastic' if self.elastic else 'plain'}-{self.rank}.json").write_text(
            json.dumps(outcome)
        )


def run_twice(train: Callable[[Run], None]) -> None:
    """Run `train` without EDL, unless a run before a kill has, and with it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, help="for what the script finds out")
    parser.add_argument("kill_at", type=int, help="the step or batch in which rank 1 is killed")
    options = parser.parse_args()
    if os.environ["EDL_GENERATION"] == "0":
        train(Run(options, elastic=False))
    train(Run(options, elastic=True))


def allow_fsdp_on_cpu() -> None:
    """Have an `Accelerator` with an FSDP plugin shard over CPU ranks, which it offers for accelerators only."""
    from accelerate import DistributedType
    from accelerate.state import AcceleratorState, PartialState

    choose = AcceleratorState.__init__

    def choose_fsdp(self: AcceleratorState, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        choose(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    AcceleratorState.__init__ = choose_fsdp


def _values(value: Any) -> Any:
    whole = value.full_tensor() if isinstance(value, DTensor) else value
    return whole.tolist() if isinstance(whole, torch.Tensor) else whole
