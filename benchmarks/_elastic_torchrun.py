"""A script for torchrun as its tutorials have it: rank 0 saves to a folder now and then, all ranks load from there."""

from __future__ import annotations

import itertools
import math
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks._elastic_task import StepLog, Task, Training

SAVE_EVERY = 20
"""Steps between two checkpoints."""


def main() -> None:
    """Train until killed."""
    task = Task.from_arguments()
    dist.init_process_group("gloo")
    training = Training(task)
    path = task.folder / "checkpoint.pt"
    begin = 0
    if path.exists():
        saved = torch.load(path)
        training.model.load_state_dict(saved["model"])
        training.optimizer.load_state_dict(saved["optimizer"])
        begin = saved["step"] + 1
    model = DistributedDataParallel(training.model)
    step_log = StepLog(task, int(os.environ["LOCAL_RANK"]))
    restarts, world = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), dist.get_world_size()
    for step in itertools.count(begin):
        training.step(model, training.optimizer, step)
        step_log.finished(step, restarts, world)
        if step % SAVE_EVERY == 0 and dist.get_rank() == 0 and task.save_s < math.inf:
            state = {"step": step, "model": training.model.state_dict(), "optimizer": training.optimizer.state_dict()}
            torch.save(state, path.with_suffix(".part"))
            path.with_suffix(".part").replace(path)
            step_log.saved(step)


if __name__ == "__main__":
    main()
