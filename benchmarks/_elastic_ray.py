"""A script for Ray Train: an elastic group of workers that restarts from the newest checkpoint. Runs in .tools/ray.

It follows Ray's documentation on fault tolerance and elastic training: any number of failures, one to three workers,
and checkpoints that rank 0 reports. Ray checks its workers ten times a second (default: every 2 s), and checks every
second whether there is room for more workers (default: every 60 s).
"""

from __future__ import annotations

import itertools
import os
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ray  # type: ignore[import-not-found]
import ray.train  # type: ignore[import-not-found]
import ray.train.torch  # type: ignore[import-not-found]
import torch
import torch.distributed as dist

from benchmarks._elastic_task import StateFile, StepLog, Task, Training


def train(settings: dict[str, Any]) -> None:
    """Train until killed. Each worker runs this function."""
    task = Task(**settings)
    training = Training(task)
    begin = 0
    if (checkpoint := ray.train.get_checkpoint()) is not None:
        with checkpoint.as_directory() as folder:
            saved = torch.load(Path(folder, "checkpoint.pt"))
        training.model.load_state_dict(saved["model"])
        training.optimizer.load_state_dict(saved["optimizer"])
        begin = saved["step"] + 1
    model = ray.train.torch.prepare_model(training.model)
    generation = torch.randint(1 << 30, (), generator=torch.Generator().manual_seed(os.getpid()))
    dist.broadcast(generation, 0)
    rank, world = dist.get_rank(), dist.get_world_size()
    step_log = StepLog(task, rank)
    for step in itertools.count(begin):
        training.step(model, training.optimizer, step)
        step_log.finished(step, int(generation), world)
        if step % StateFile.EVERY_STEPS:
            continue
        with tempfile.TemporaryDirectory() as folder:
            if rank == 0:
                states = {"model": training.model.state_dict(), "optimizer": training.optimizer.state_dict()}
                torch.save({"step": step, **states}, Path(folder, "checkpoint.pt"))
                ray.train.report({"step": step}, checkpoint=ray.train.Checkpoint.from_directory(folder))
                step_log.saved(step)
            else:
                ray.train.report({"step": step})


def main() -> None:
    """Run a cluster of one node with room for three workers."""
    task = Task.from_arguments()
    os.environ["RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"] = "0.1"
    most = int(os.environ["BENCHMARK_WORKERS"])
    ray.init(address="local", num_cpus=most, include_dashboard=False, object_store_memory=128 << 20)
    ray.train.torch.TorchTrainer(
        train,
        train_loop_config=asdict(task),
        torch_config=ray.train.torch.TorchConfig(backend="gloo"),
        scaling_config=ray.train.ScalingConfig(num_workers=(1, most), elastic_resize_monitor_interval_s=1.0),
        run_config=ray.train.RunConfig(
            storage_path=str(task.folder / "ray"),
            failure_config=ray.train.FailureConfig(max_failures=-1),
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=1),
        ),
    ).fit()


if __name__ == "__main__":
    main()
