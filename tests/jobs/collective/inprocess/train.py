"""A training job that goes on in process: `python train.py FOLDER STEPS STEP_S`.

After each step a rank appends a line of JSON to FOLDER/PID.jsonl: in which generation, as which rank, which step, and
a hash of the parameters. The data of a step depends on its number alone, and is shared out over however many ranks
there are.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from edl.collective.checkpoint.checkpointer import Checkpointer
from edl.collective.checkpoint.state.state import State
from edl.collective.inprocess.run_in_process import Place, run_in_process

GLOBAL_BATCH = 24


def main(folder: str, steps: int, step_s: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    state = State(model=model, optimizer=optimizer, losses=0)
    checkpointer = Checkpointer(state)
    diary = Path(folder, f"{os.getpid()}.jsonl")

    def train(place: Place) -> None:
        # So that buckets are not laid out anew after the first step: sums of three have another rounding then.
        module = DistributedDataParallel(model, find_unused_parameters=True)
        for step in range(place.step + 1, steps):
            rows = torch.randn(GLOBAL_BATCH, 32, generator=torch.Generator().manual_seed(step))
            mine = rows.tensor_split(place.size)[place.rank]
            loss = (module(mine) - mine.flip(1)).square().mean() * len(mine) * place.size / GLOBAL_BATCH
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            state.losses += 1
            time.sleep(step_s)
            parameters = b"".join(one.detach().numpy().tobytes() for one in model.parameters())
            line = {
                "generation": place.generation,
                "size": place.size,
                "step": step,
                "hash": hashlib.sha256(parameters).hexdigest()[:16],
                "losses": state.losses,
            }
            with diary.open("a") as file:
                file.write(json.dumps(line) + "\n")
            checkpointer.save(step)

    # No wait ends by these limits: who is lost is noticed, and on a busy machine who is slow is not.
    run_in_process(train, state=state, checkpointer=checkpointer, timeout_s=120.0, patience_s=120.0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
