"""Trains elastically, counts every row that it trains on within its state, and keeps a diary that only grows.

    edl run counting.py DIARY FILE

It ends with the epoch in which FILE appears. The counts travel with the state, so that at the end they say of the model
that came out how often it has seen each row, whatever was lost, repeated or run twice on the way.
"""

import json
import os
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from edl.collective import Checkpointer, ElasticSampler, ElasticTrainer, State

ROWS = 40
BATCH = 8
STEP_S = 0.2


class Diary:
    """Lines that all workers append to one file."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        self._own = {"pod": os.environ.get("HOSTNAME", ""), "pid": os.getpid(), "rank": dist.get_rank()}

    def write(self, kind: str, **fields: object) -> None:
        line = {"kind": kind, "at": time.time(), **self._own, **fields}
        os.write(self._file, (json.dumps(line) + "\n").encode())

    def show_alive(self) -> None:
        while True:
            self.write("alive")
            time.sleep(0.25)


dist.init_process_group("gloo")
diary = Diary(sys.argv[1])
diary.write("start", world=dist.get_world_size())
threading.Thread(target=diary.show_alive, daemon=True).start()
torch.manual_seed(0)
network = nn.Linear(4, 1)
optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
data = TensorDataset(torch.arange(ROWS), torch.randn(ROWS, 4))
sampler = ElasticSampler(len(data), global_batch=BATCH)
seen = torch.zeros(ROWS, dtype=torch.int64)
state = State(model=network, optimizer=optimizer, sampler=sampler, step=-1, seen=seen)
with Checkpointer(state) as checkpointer:
    checkpointer.restore()
    diary.write("restored", step=state.step)
    trainer = ElasticTrainer(DistributedDataParallel(network), optimizer, sampler=sampler)
    loader = DataLoader(data, batch_sampler=sampler, generator=torch.Generator())
    for epoch in sampler.epochs(10**9):
        for batch in loader:
            counts = torch.zeros_like(state.seen)
            for ids, features in trainer.micro_batches(batch):
                trainer.backward(trainer.model(features).square().mean())
                counts += torch.bincount(ids, minlength=ROWS)
            share = sampler.share_rows
            dist.all_reduce(counts)
            trainer.step()
            state.seen = state.seen + counts
            state.step += 1
            checkpointer.save(state.step, samples=share)
            if dist.get_rank() == 0:
                diary.write("step", step=state.step, world=dist.get_world_size())
            time.sleep(STEP_S)
        trained = epoch + 1
        ended = torch.tensor([Path(sys.argv[2]).exists()], dtype=torch.int64)
        dist.broadcast(ended, 0)
        if ended:
            break
if dist.get_rank() == 0:
    diary.write("end", step=state.step, epochs=trained, least=int(state.seen.min()), most=int(state.seen.max()))
dist.barrier()
dist.destroy_process_group()
