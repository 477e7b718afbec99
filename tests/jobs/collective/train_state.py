"""The script of the tests' jobs with a `State`: it counts, goes on where it was, and can take its time.

    python train_state.py FOLDER [SECONDS OF A STEP]

A file `end` in the folder ends it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from edl.collective import Checkpointer, State


def main() -> None:
    folder, step_s = Path(sys.argv[1]), float([*sys.argv[2:], 0.05][0])
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    log = os.open(folder / "steps.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    state = State(count=torch.zeros(1000), step=-1)
    with Checkpointer(state, interval_steps=1) as checkpointer:
        checkpointer.restore()
        assert bool((state.count == state.step + 1).all()), "what is restored is of one step"
        flag = torch.zeros(1)
        while not flag.item():
            time.sleep(step_s)
            flag = torch.tensor([float(rank == 0 and (folder / "end").exists())])
            dist.all_reduce(flag)
            state.step += 1
            state.count += 1
            line = {"generation": checkpointer.generation, "rank": rank, "world": world, "step": state.step}
            line |= {"pid": os.getpid(), "time": time.monotonic(), "node": os.environ["NODE"]}
            os.write(log, json.dumps(line).encode() + b"\n")
            checkpointer.save(state.step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
