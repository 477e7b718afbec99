"""A script for `edl run`: snapshots in shared memory, from which new workers go on."""

from __future__ import annotations

import itertools
import math
import os
import sys

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks._elastic_task import StepLog, Task, Training
from edl.collective.checkpoint.checkpointer import Checkpointer
from edl.collective.checkpoint.state.state import State


def main() -> None:
    """Train until killed."""
    task = Task.from_arguments()
    dist.init_process_group("gloo")
    training = Training(task)
    state = State(model=training.model, optimizer=training.optimizer)
    if task.save_s == math.inf:
        checkpointer = Checkpointer(state, interval_steps=sys.maxsize)  # no snapshots after the first step's
    else:
        checkpointer = Checkpointer(state, interval_s=task.save_s or None)
    step_log = StepLog(task, int(os.environ["LOCAL_RANK"]))
    generation, size = int(os.environ["EDL_GENERATION"]), dist.get_world_size()
    restored = checkpointer.restore()
    model = DistributedDataParallel(training.model, init_sync=False)
    for step in itertools.count(restored + 1):
        training.step(model, training.optimizer, step)
        step_log.finished(step, generation, size)
        if checkpointer.save(step):
            step_log.saved(step)


if __name__ == "__main__":
    main()
