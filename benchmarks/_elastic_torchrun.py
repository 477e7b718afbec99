"""A script for torchrun that follows its tutorials: rank 0 saves to a folder regularly, and all ranks load from it."""

from __future__ import annotations

import itertools
import os
from functools import partial

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks._elastic_task import StateFile, StepLog, Task, Training


def main() -> None:
    """Train until killed."""
    task = Task.from_arguments()
    dist.init_process_group("gloo")
    training = Training(task)
    file = StateFile(task)
    begin = 0
    if (saved := file.load()) is not None:
        training.model.load_state_dict(saved["model"])
        training.optimizer.load_state_dict(saved["optimizer"])
        begin = saved["step"] + 1

    def save(step: int) -> dict[str, object]:
        model, optimizer = training.model.state_dict(), training.optimizer.state_dict()
        return {"step": step, "model": model, "optimizer": optimizer}

    model = DistributedDataParallel(training.model)
    step_log = StepLog(task, int(os.environ["LOCAL_RANK"]))
    restarts, world = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), dist.get_world_size()
    for step in itertools.count(begin):
        training.step(model, training.optimizer, step)
        step_log.finished(step, restarts, world)
        if dist.get_rank() == 0 and file.save(step, partial(save, step)):
            step_log.saved(step)


if __name__ == "__main__":
    main()
