"""A script for `edl run`: snapshots in shared memory, from which new workers go on; or survivors stay as they are."""

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
from edl.collective.inprocess.run_in_process import Place, run_in_process


def main() -> None:
    """Train until killed."""
    task = Task.from_arguments()
    if not task.stay:
        dist.init_process_group("gloo")
    training = Training(task)
    state = State(model=training.model, optimizer=training.optimizer)
    if task.save_s == math.inf:
        checkpointer = Checkpointer(state, interval_steps=sys.maxsize)  # none after the first step's
    else:
        checkpointer = Checkpointer(state, interval_s=task.save_s or None)
    step_log = StepLog(task, int(os.environ["LOCAL_RANK"]))

    def train(place: Place) -> None:
        model = DistributedDataParallel(training.model, init_sync=False)
        for step in itertools.count(place.step + 1):
            training.step(model, training.optimizer, step)
            step_log.finished(step, place.generation, place.size)
            if checkpointer.save(step):
                step_log.saved(step)

    if task.stay:
        run_in_process(train, state=state, checkpointer=checkpointer)
    else:
        local_rank, generation = int(os.environ["LOCAL_RANK"]), int(os.environ["EDL_GENERATION"])
        train(Place(dist.get_rank(), dist.get_world_size(), local_rank, generation, checkpointer.restore()))


if __name__ == "__main__":
    main()
