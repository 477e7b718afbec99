"""The script of the tests' jobs with a sharded model (FSDP2): it writes down what the state was after every step."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.fsdp

from edl.collective import Checkpointer
from tests.jobs.collective.checkpoint.world import digest, job, train

STEP_S = 0.03


def main() -> None:
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    generation = int(os.environ["EDL_GENERATION"])
    log = os.open(folder / "steps.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    states = os.open(folder / "states.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def write_state(step: int, restored: bool) -> None:
        moments = [state.optimizer.state[one].get("exp_avg") for one in state.model.parameters()]
        bits = digest([*state.model.parameters(), *(one for one in moments if one is not None)])
        if rank == 0:
            line = {"generation": generation, "step": step, "restored": restored, "bits": bits}
            os.write(states, json.dumps(line).encode() + b"\n")

    state = job(sys.argv[2] if len(sys.argv) > 2 else "fsdp", 1)
    with Checkpointer(state, interval_steps=3) as checkpointer:
        step = checkpointer.restore()
        if step >= 0:
            write_state(step, restored=True)
        torch.manual_seed(1000 * generation + rank)
        flag = torch.zeros(1)
        while not flag.item():
            time.sleep(STEP_S)
            step += 1
            train(state, 1)
            write_state(step, restored=False)
            line = {"generation": generation, "rank": rank, "world": world, "step": step, "pid": os.getpid()}
            line |= {"time": time.monotonic(), "node": os.environ["NODE"]}
            os.write(log, json.dumps(line).encode() + b"\n")
            checkpointer.save(step)
            flag = torch.tensor([float(rank == 0 and (folder / "end").exists())])
            dist.all_reduce(flag)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
