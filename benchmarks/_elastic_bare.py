"""The shortest possible restart from a prewarmed process for the job in `recovery`, without EDL or failure detection.

A process that has imported torch forks three ranks. They form a group, build the model, copy the state from a file in
memory, and finish a step. Runs as a `Child`.
"""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import torch
import torch._dynamo  # the first optimizer imports it
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from benchmarks._child import answer
from benchmarks._elastic_task import Task, Training

__all__ = ["measure"]


def measure(width: int, sleep_s: float, ranks: int) -> dict[str, float]:
    """Return the seconds from the fork until the slowest rank has finished its first step."""
    size = 2 * 2 * width * (width + 1)  # parameters and their momentum
    path = Path("/dev/shm", f"edl-bare-{os.getpid()}")
    torch.zeros(size).numpy().tofile(path)
    saved = torch.from_file(str(path), size=size)
    path.unlink()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": str(ranks)}
    receive, send = os.pipe()
    begin = time.monotonic()
    workers = []
    for rank in range(ranks):
        worker = os.fork()
        if not worker:
            try:
                _train(rank, saved, Task(Path(), "0", width, sleep_s))
                os.write(send, f"{time.monotonic()}\n".encode())
            finally:
                os._exit(0)
        workers.append(worker)
    os.close(send)
    for worker in workers:
        os.waitpid(worker, 0)
    with os.fdopen(receive) as ends:
        finished = [float(end) for end in ends]
    if len(finished) < ranks:
        raise RuntimeError("a rank failed")
    return {"seconds": max(finished) - begin}


def _train(rank: int, saved: Tensor, task: Task) -> None:
    os.environ["RANK"] = str(rank)
    dist.init_process_group("gloo")
    training = Training(task)
    with torch.no_grad():
        for parameter in training.model.parameters():
            value, momentum, saved = torch.split(saved, [parameter.numel()] * 2 + [len(saved) - 2 * parameter.numel()])
            parameter.copy_(value.view_as(parameter))
            training.optimizer.state[parameter]["momentum_buffer"] = momentum.view_as(parameter).clone()
    training.step(DistributedDataParallel(training.model, init_sync=False), training.optimizer, 0)


if __name__ == "__main__":
    answer(lambda request: measure(**request))
