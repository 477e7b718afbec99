"""A student under `edl run` whose soft labels come from teachers: logs which samples it trained, with which labels.

Arguments: the folder for its log, the discovery URL, samples, epochs, seconds to sleep in a step. In step `HELD_STEP`
it waits for a file `on` in the folder, so that what shall happen before the end does, however slow the test is.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from edl.collective import Checkpointer, ElasticSampler, ElasticTrainer, State
from edl.distill.losses import soft_cross_entropy
from edl.distill.torch import distill

HELD_STEP = 30


def row(index: int) -> Tensor:
    """The inputs of sample `index`, float32 [4]."""
    return torch.tensor([index, index * index % 97, index % 7, 1.0])


def main() -> None:
    folder, discovery, length, epochs, sleep_s = Path(sys.argv[1]), sys.argv[2], *map(float, sys.argv[3:])
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    network = nn.Linear(4, 10)
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-6)
    sampler = ElasticSampler(int(length), global_batch=16, seed=1)
    state = State(model=network, optimizer=optimizer, sampler=sampler, step=-1)
    checkpointer = Checkpointer(state, interval_steps=1)
    checkpointer.restore()
    trainer = ElasticTrainer(DistributedDataParallel(network), optimizer, sampler=sampler)
    samples = [(row(index), torch.tensor(index)) for index in range(int(length))]
    loader = DataLoader(samples, batch_sampler=sampler)  # type: ignore[arg-type]
    with (
        distill(loader, "teachers", discovery=discovery, inputs=["x", None], outputs="y") as labelled,
        (folder / f"{os.environ['EDL_GENERATION']}-{os.environ['RANK']}.jsonl").open("a", buffering=1) as log,
    ):
        for epoch in sampler.epochs(int(epochs)):
            for (rows, ids), soft in labelled:
                share = sampler.share_rows
                step = {"step": state.step + 1, "epoch": epoch}
                print(json.dumps({**step, "ids": ids[:share].tolist(), "labels": soft[:share].tolist()}), file=log)
                for micro, targets in trainer.micro_batches((rows, soft)):
                    trainer.backward(soft_cross_entropy(network(micro), targets.softmax(-1)))
                time.sleep(sleep_s)
                while state.step + 1 == HELD_STEP and not (folder / "on").exists():
                    time.sleep(sleep_s)
                trainer.step()
                state.step += 1
                print(json.dumps({**step, "done": True}), file=log)
                checkpointer.save(state.step, samples=share)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
