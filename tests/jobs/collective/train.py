"""The script of the tests' jobs: as for torchrun, one all-reduce a step, until the test says that it is enough.

Which step comes next is kept in a file by rank 0, so that a restart goes on. A file `do-RANK` makes that rank do what
is in it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

STEP_S = 0.03


def obey(folder: Path, rank: int) -> None:
    """Do what the test told this rank to do."""
    order = folder / f"do-{rank}"
    if not order.exists():
        return
    action = order.read_text()
    order.unlink()
    if action == "exit 0":
        os._exit(0)
    elif action == "exit 3":
        sys.exit(3)
    elif action == "raise":
        raise LookupError("the user's own mistake")
    elif action == "ecc":  # CUDA's words, as torch raises them: there is no GPU here
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered\nFor debugging consider passing ...\n")
    elif action == "eat":  # until the kernel ends it
        eaten = []
        while True:
            eaten.append(bytearray(os.urandom(1 << 20)) * 16)
    elif action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)


def main() -> None:
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    progress = folder / "progress"
    where = torch.tensor([int(progress.read_text()) if rank == 0 and progress.exists() else 0])
    dist.broadcast(where, 0)
    step = int(where)
    log = os.open(folder / "steps.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    generation = int(os.environ["EDL_GENERATION"])
    while True:
        obey(folder, rank)
        time.sleep(STEP_S)
        flag = torch.tensor([float(rank == 0 and (folder / "end").exists())])
        dist.all_reduce(flag)
        line = {"generation": generation, "rank": rank, "world": world, "step": step, "pid": os.getpid()}
        line |= {"time": time.monotonic(), "node": os.environ["NODE"]}
        os.write(log, json.dumps(line).encode() + b"\n")
        step += 1
        if rank == 0:
            (folder / "progress.new").write_text(str(step))
            (folder / "progress.new").rename(progress)
        if flag.item():
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
