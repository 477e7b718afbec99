"""Trains a ResNet under `edl run`, torchrun or alone. It resumes where it stopped, with any number of workers."""

from __future__ import annotations

import argparse
import os
import time

import torch
import torch.distributed as dist
from data import Images
from net import resnet
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset

from edl.collective import Checkpointer, ElasticSampler, ElasticTrainer, State


def main() -> None:
    options = parse()
    if "RANK" in os.environ:  # under edl run or torchrun
        dist.init_process_group("gloo")
    torch.manual_seed(options.seed)
    train, test = Images(options.data, "train"), Images(options.data, "test")
    network = resnet(train.classes)
    optimizer = torch.optim.SGD(network.parameters(), lr=options.lr, momentum=0.9, weight_decay=5e-4)

    sampler = ElasticSampler(len(train), global_batch=options.batch, seed=options.seed)
    state = State(model=network, optimizer=optimizer, sampler=sampler, step=-1)
    with Checkpointer(state) as checkpointer:
        checkpointer.restore()
        model = DistributedDataParallel(network) if dist.is_initialized() else network
        trainer = ElasticTrainer(model, optimizer, sampler=sampler)
        loader = DataLoader(train, batch_sampler=sampler, generator=torch.Generator())  # not torch's global one
        for epoch in sampler.epochs(options.epochs):
            begin, before = time.monotonic(), sampler.consumed
            for batch in loader:
                for images, labels in trainer.micro_batches(batch):
                    trainer.backward(cross_entropy(model(images), labels))
                share = sampler.share_rows
                trainer.step()
                state.step += 1
                checkpointer.save(state.step, samples=share)
            report(epoch, sampler.consumed - before, time.monotonic() - begin, network, test)
    if dist.is_initialized():
        dist.destroy_process_group()


def report(epoch: int, samples: int, seconds: float, network: nn.Module, test: Images) -> None:
    """Test the network, each worker on its share of the images, and print the epoch's results on the first rank."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    share = DataLoader(Subset(test, range(rank, len(test), world)), batch_size=500)
    right = torch.zeros(1, dtype=torch.int64)
    network.eval()
    with torch.inference_mode():
        for images, labels in share:
            right += (network(images).argmax(1) == labels).sum()
    network.train()
    if world > 1:
        dist.all_reduce(right)
    if rank == 0:
        who = "one worker" if world == 1 else f"{world} workers"
        accuracy = int(right) / len(test)
        print(f"epoch {epoch}: {accuracy:.1%} right, {samples:,} images in {seconds:.1f} s by {who}", flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default="digits", help="a folder with train/CLASS/*.jpg and test/CLASS/*.jpg")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--batch", type=int, default=64, help="images per step, over all workers")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
