"""A script for torchft in which each process is its own replica group, as in torchft's README. Runs in .tools/torchft.

torchft 0.2.0's `DistributedDataParallel` raises an AssertionError when a peer is lost over gloo, so gradients are
reduced here by the manager itself, as that class does. As torchft's example `train_ddp.py` advises, the state is also
saved regularly: live replicas pass it to new ones, but it is lost with the last replica.
"""

from __future__ import annotations

import os
from datetime import timedelta

from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torchft import Manager, Optimizer, ProcessGroupGloo  # type: ignore[import-not-found]

from benchmarks._elastic_task import StateFile, StepLog, Task, Training


def main() -> None:
    """Train until killed."""
    task = Task.from_arguments()
    training = Training(task)

    def save() -> dict[str, object]:
        return {"model": training.model.state_dict(), "optimizer": training.optimizer.state_dict()}

    def load(state: dict[str, dict[str, object]]) -> None:
        training.model.load_state_dict(state["model"])
        training.optimizer.load_state_dict(state["optimizer"])

    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=10)),
        min_replica_size=1,
        load_state_dict=load,
        state_dict=save,
        replica_id=f"replica_{task.name}",
        store_addr="localhost",
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=os.environ["TORCHFT_LIGHTHOUSE"],
        init_sync=False,
    )

    def reduce(model: nn.Module) -> None:
        works = [manager.allreduce(parameter.grad) for parameter in model.parameters() if parameter.grad is not None]
        for work in works:
            work.wait()

    file = StateFile(task)
    if (saved := file.load()) is not None:
        load(saved["state"])
        manager.load_state_dict(saved["manager"])

    def save_all() -> dict[str, object]:
        return {"state": save(), "manager": manager.state_dict()}

    optimizer = Optimizer(manager, training.optimizer)
    step_log = StepLog(task)
    while True:
        step = manager.current_step()
        training.step(training.model, optimizer, step, reduce)
        if manager.current_step() > step:  # else the step was abandoned, and the remaining ranks retry it
            finished = manager.current_step() - 1
            step_log.finished(finished, manager._quorum_id, manager.num_participants())
            if manager.participating_rank() == 0 and file.save(finished, save_all):
                step_log.saved(finished)


if __name__ == "__main__":
    main()
