"""A script that reads a stream of each rank's own, and kills itself in one step, once, if it is told to.

Arguments: a folder for what each rank read; then in which step rank 1 is killed, or -1.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

from edl.collective import Checkpointer, State

ROWS, EPOCHS = 20, 2


class Stream(IterableDataset):
    def __init__(self, rank: int) -> None:
        self.rank, self.position = rank, 0

    def __iter__(self):
        worker = get_worker_info()
        while self.position < ROWS:
            self.position += 1
            yield 1000 * self.rank + 100 * worker.id + self.position
        self.position = 0

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


def main() -> None:
    folder, kill_at = Path(sys.argv[1]), int(sys.argv[2])
    dist.init_process_group("gloo")
    rank, mark = dist.get_rank(), folder / "killed"
    torch.manual_seed(rank)
    loader = StatefulDataLoader(Stream(rank), batch_size=4, num_workers=2)
    state = State(loader=loader, epoch=0, step=-1, read=[], per_rank=["read"])
    with Checkpointer(state, interval_steps=2) as checkpointer:
        begin = checkpointer.restore()
        with (folder / "begins").open("a") as file:
            file.write(f"{begin}\n")
        while state.epoch < EPOCHS:
            for batch in loader:
                dist.all_reduce(torch.ones(1))
                state.read.append([*batch.tolist(), torch.rand(1).item()])
                state.step += 1
                checkpointer.save(state.step)
                if state.step == kill_at and rank == 1 and not mark.exists():
                    mark.touch()
                    os.kill(os.getpid(), signal.SIGKILL)
            state.epoch += 1
    (folder / f"read-{rank}.json").write_text(json.dumps(state.read))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
