"""A script for `edl run`: a small ResNet on CIFAR-10, trained by whichever workers are present."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from benchmarks._elastic_task import StepLog, Task
from edl.collective import Checkpointer, ElasticSampler, ElasticTrainer, State
from edl.collective.training.learning_rate import SampleSchedule

__all__ = ["accuracy", "resnet"]


class _Block(nn.Module):
    def __init__(self, ins: int, outs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(ins, outs, 3, stride, 1, bias=False)
        self.norm = nn.BatchNorm2d(outs)
        self.second = nn.Conv2d(outs, outs, 3, 1, 1, bias=False)
        self.last_norm = nn.BatchNorm2d(outs)
        self.short = nn.Conv2d(ins, outs, 1, stride, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.last_norm(self.second(F.relu(self.norm(self.first(inputs)))))
        return F.relu(found + self.short(inputs))


def resnet() -> nn.Module:
    """Return a network of eight convolutions, for images [n, 3, 32, 32] and ten classes."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, 1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        _Block(16, 16, 1),
        _Block(16, 32, 2),
        _Block(32, 64, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


def normalized(images: Tensor) -> Tensor:
    """Return uint8 images as float32, from about -2 to 2."""
    return images.float().sub_(120.0).div_(62.0)


def accuracy(folder: Path) -> float:
    """Return the accuracy on the test images of the model that the last phase saved."""
    model = resnet()
    model.load_state_dict(torch.load(folder / "state.pt", weights_only=True)["model"])
    model.eval()
    with np.load(folder / "test.npz") as test, torch.no_grad():
        labels = torch.from_numpy(test["labels"])
        parts = torch.split(torch.from_numpy(test["images"]), 500)
        logits = [model(normalized(part)) for part in parts]
    return float((torch.cat(logits).argmax(1) == labels).float().mean())


def main() -> None:
    """Train on `--samples` samples. The step number in a step log is the number of samples so far."""
    options = _parse()
    torch.set_num_threads(1)  # on a busy machine, several threads wait longer than they compute
    torch.manual_seed(options.seed)
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    model = resnet()
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=options.rate, momentum=0.9, weight_decay=5e-4)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=options.samples // options.batch)
    with np.load(options.folder / "train.npz") as train:
        dataset = TensorDataset(torch.from_numpy(train["images"]), torch.from_numpy(train["labels"]))
    batch_size = options.batch * (world if options.ignoring else 1)
    sampler = ElasticSampler(len(dataset), global_batch=batch_size, seed=options.seed)
    schedule = SampleSchedule(cosine, samples_per_step=options.batch)
    trainer = ElasticTrainer(wrapped, optimizer, sampler=sampler, base_batch=options.batch, schedule=schedule)
    state = State(model=model, optimizer=optimizer, sampler=sampler, trainer=trainer, step=-1)
    step_log = StepLog(Task(options.folder, options.name, 0, 0.0))
    generation = int(os.environ["EDL_GENERATION"])
    with Checkpointer(state) as checkpointer:
        checkpointer.restore()
        for _ in sampler.epochs(10**6):
            for batch in DataLoader(dataset, batch_sampler=sampler):
                for images, labels in trainer.micro_batches(batch):
                    flipped = torch.where(_flips(images, options.seed + sampler.epoch), images.flip(3), images)
                    trainer.backward(F.cross_entropy(wrapped(normalized(flipped)), labels))
                trainer.step()
                state.step += 1
                step_log.finished(trainer.samples, generation, world)
                if trainer.samples >= options.samples:
                    _leave(options.folder, model)
                    return
                checkpointer.save(state.step)


def _leave(folder: Path, model: nn.Module) -> None:
    """Save the model on the first rank. No rank ends before it is saved."""
    if dist.get_rank() == 0:
        partial = folder / "state.partial"
        torch.save({"model": model.state_dict()}, partial)
        partial.replace(folder / "state.pt")
    dist.barrier()
    dist.destroy_process_group()


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True, help="folder with train.npz and test.npz")
    parser.add_argument("--name", required=True, help="name of the node")
    parser.add_argument("--seed", type=int, required=True, help="seed of weights, order and flips")
    parser.add_argument("--batch", type=int, required=True, help="batch size for which --rate is meant")
    parser.add_argument("--samples", type=int, required=True, help="samples to train on in total")
    parser.add_argument("--rate", type=float, required=True)
    parser.add_argument("--ignoring", action="store_true", help="give each process the whole --batch in any world")
    return parser.parse_args()


def _flips(images: Tensor, seed: int) -> Tensor:
    """Return which images to mirror, depending on the image and the epoch, not on the rank that trains on it."""
    sums = images.flatten(1).sum(1, dtype=torch.int64)
    return ((sums * 2654435761 + seed * 40503) >> 7 & 1).bool().view(-1, 1, 1, 1)


if __name__ == "__main__":
    main()
