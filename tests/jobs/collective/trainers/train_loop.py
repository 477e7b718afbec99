"""A plain loop with DDP, and a stream of each rank's own as its data."""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

from edl.collective import Checkpointer, State
from tests.jobs.collective.trainers.scripts import Run, run_twice

ROWS, EPOCHS = 20, 2


class Stream(IterableDataset):
    def __init__(self, rank: int) -> None:
        self.rank, self.position = rank, 0

    def __iter__(self):
        worker = get_worker_info()
        while self.position < ROWS:
            self.position += 1
            yield float(1000 * self.rank + 100 * worker.id + self.position)
        self.position = 0

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


def train(run: Run) -> None:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    torch.manual_seed(3)
    inner = nn.Sequential(nn.Linear(4, 7), nn.BatchNorm1d(7), nn.Dropout(0.5), nn.Linear(7, 3))
    model = DistributedDataParallel(inner)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(run.rank)
    loader = StatefulDataLoader(Stream(run.rank), batch_size=4, num_workers=2)
    state = State(model=model, optimizer=optimizer, loader=loader, epoch=0, step=-1, read=[], per_rank=["read"])
    with contextlib.ExitStack() as stack:
        checkpointer = stack.enter_context(Checkpointer(state, interval_steps=1)) if run.elastic else None
        run.begin(checkpointer.restore() if checkpointer else -1)
        while state.epoch < EPOCHS:
            for batch in loader:
                optimizer.zero_grad()
                model(torch.sin(batch.float()[:, None] + torch.arange(4))).square().mean().backward()
                optimizer.step()
                state.read.append([*batch.tolist(), torch.rand(1).item()])
                state.step += 1
                if checkpointer:
                    checkpointer.save(state.step)
                run.kill(state.step)
            state.epoch += 1
    run.write(inner, optimizer, state.read)


if __name__ == "__main__":
    run_twice(train)
