"""The script of the recovery checks, under `edl run`: it trains deterministically and logs each step.

    edl run ... train.py FOLDER --steps N [--memory SHARE] [--device cuda] [--pause-every STEPS]

With `--pause-every` 30, step 30 waits for the file FOLDER/go1, step 60 for FOLDER/go2, and so on: however fast the
steps are, a test can kill a worker before each. With more than one worker, all share the first GPU and average
gradients over gloo.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from edl.collective import Checkpointer, ElasticTrainer, State
from tests.gpu.models import be_deterministic
from tests.waiting import wait_until

BATCH = 64


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--memory", type=float, default=0.0, help="share of the GPU's memory to hold")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--pause-every", type=int, default=0, metavar="STEPS")
    options = parser.parse_args()
    be_deterministic()
    dist.init_process_group("gloo")
    device = torch.device(options.device)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(32, 256), nn.Tanh(), nn.Linear(256, 8)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    trainer = ElasticTrainer(model, optimizer, global_batch=BATCH)
    state = State(model=model, optimizer=optimizer, trainer=trainer, step=-1)
    held = None
    if options.memory and device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        held = torch.empty(int(options.memory * total), dtype=torch.uint8, device=device)
    log = os.open(options.folder / "steps.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(log, b"\n")  # ends the line of a worker that was killed while it wrote
    with Checkpointer(state, interval_steps=1) as checkpointer:
        for step in range(checkpointer.restore() + 1, options.steps):
            if options.pause_every and step and step % options.pause_every == 0:
                wait_until((options.folder / f"go{step // options.pause_every}").exists, "the file of this step")
            inputs = torch.randn(BATCH, 32, generator=torch.Generator().manual_seed(step))
            for part in trainer.micro_batches(share(inputs)):
                trainer.backward(nn.functional.mse_loss(model(part.to(device)), part[:, :8].to(device)))
            trainer.step()
            state.step = step
            checkpointer.save(step)
            line = {"step": step, "pid": os.getpid(), "rank": dist.get_rank(), "time": time.monotonic()}
            os.write(log, json.dumps(line).encode() + b"\n")
    if dist.get_rank() == 0:
        torch.save([tensor.cpu() for tensor in model.state_dict().values()], options.folder / "weights.pt")
    del held
    dist.destroy_process_group()


def share(inputs: torch.Tensor) -> torch.Tensor:
    """Return this rank's rows of the global batch."""
    return inputs.tensor_split(dist.get_world_size())[dist.get_rank()]


if __name__ == "__main__":
    main()
