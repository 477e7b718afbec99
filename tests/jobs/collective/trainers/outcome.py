"""What a job ended with, written down so that two jobs can be compared bit for bit; and the options of its script."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.utils import counters
from torch.distributed.tensor import DTensor


def parse_options() -> argparse.Namespace:
    """Read a script's options from its command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, help="for what the script finds out")
    parser.add_argument("kill_at", type=int, help="the step or batch in which rank 1 is killed, once; -1 for never")
    parser.add_argument("--fsdp2", action="store_true", help="shard the model")
    parser.add_argument("--compile", default="", metavar="BACKEND", help="compile the model")
    return parser.parse_args()


def write_outcome(path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, logs: Any) -> None:
    """Write parameters, buffers, the optimizer's state and logs; all ranks call it, since shards are gathered."""
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
    if torch.distributed.get_rank() == 0:
        path.write_text(json.dumps(outcome))


def _values(value: Any) -> Any:
    whole = value.full_tensor() if isinstance(value, DTensor) else value
    return whole.tolist() if isinstance(whole, torch.Tensor) else whole
