"""Trains the student on labels alone or on teachers' predictions. Nodes and teachers may come and go as it trains."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from data import accuracy_of, class_count, open_images
from nets import build, normalize
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from edl.collective import Checkpointer, ElasticSampler, ElasticTrainer, State
from edl.distill import ReaderStats
from edl.distill.losses import DistillLoss
from edl.distill.torch import distill


def main() -> None:
    options = parse()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if torch.cuda.is_available() else "cpu"
    if "RANK" in os.environ:  # under edl run or torchrun
        dist.init_process_group()
    torch.manual_seed(options.seed)
    train = open_images(options.data, "train", options.crop, options.images)
    test = DataLoader(open_images(options.data, "test", options.crop), batch_size=500, num_workers=options.workers)
    network = build(options.arch, class_count(train)).to(device)
    optimizer = torch.optim.SGD(network.parameters(), options.lr, momentum=0.9, weight_decay=5e-4, nesterov=True)
    steps = options.epochs * (len(train) // options.batch)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.lr, steps + 1, pct_start=0.2)
    loss_of = DistillLoss(options.temperature, options.alpha)

    sampler = ElasticSampler(len(train), global_batch=options.batch, seed=options.seed, tail="drop")
    state = State(model=network, optimizer=optimizer, schedule=schedule, sampler=sampler, step=0)
    with Checkpointer(state) as checkpointer:
        checkpointer.restore()  # resumes where training stopped; does nothing on the first start
        model = DistributedDataParallel(network) if dist.is_initialized() else network
        trainer = ElasticTrainer(model, optimizer, sampler=sampler)
        loader = DataLoader(train, batch_sampler=sampler, num_workers=options.workers, generator=torch.Generator())
        # Teachers get the images, not the labels. An empty list means no teachers: logits are None then.
        teachers = options.teachers or []
        with distill(loader, teachers, inputs=["image", None], outputs="logits", device=device) as batches:
            journal = Journal(options.log, steps, batches.stats if teachers else None)
            for epoch in sampler.epochs(options.epochs):
                for batch in batches:
                    for (images, labels), logits in trainer.micro_batches(batch):
                        loss = loss_of(model(normalize(images)), logits, labels)
                        trainer.backward(loss)
                    trainer.step()
                    schedule.step()
                    state.step += 1
                    checkpointer.save(state.step)
                    if state.step % 10 == 0:
                        journal.write(step=state.step, loss=round(loss.item(), 4))
                if journal.first:
                    journal.write(step=state.step, epoch=epoch + 1, accuracy=accuracy_of(network, test))
    if dist.is_initialized():
        dist.destroy_process_group()


class Journal:
    """Writes a line of JSON on the first rank every ten steps and after each epoch. Epochs are also printed."""

    def __init__(self, path: str, steps: int, stats: Callable[[], ReaderStats] | None) -> None:
        self.path, self.steps, self.stats = path, steps, stats
        self.first = not dist.is_initialized() or dist.get_rank() == 0
        self.nodes = dist.get_world_size() if dist.is_initialized() else 1

    def write(self, **facts: float) -> None:
        if not self.first:
            return
        facts |= {"of": self.steps, "time": time.time(), "cpu_s": time.process_time(), "nodes": self.nodes}
        if now := self.stats() if self.stats else None:
            facts |= {"teachers": now.teachers_live, "rows": now.rows_delivered, "resent": now.rows_resent}
            facts |= {"waited_s": now.wait_s}
        if self.path:
            with Path(self.path).open("a") as file:
                file.write(json.dumps(facts) + "\n")
        if "accuracy" in facts:
            taught = f", {now.line()}" if now else ""
            print(f"epoch {facts['epoch']}: {facts['accuracy']:.1%} right, {self.nodes} node(s){taught}", flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default="digits", help="a folder with train/CLASS/*.jpg and test/CLASS/*.jpg")
    parser.add_argument("--images", type=int, default=0, help="number of images to train on (default: all)")
    parser.add_argument("--crop", type=int, default=0, help="crop images of any size to this many pixels (torchvision)")
    parser.add_argument("--arch", default="small", help="small, deep, torchvision:NAME or timm:NAME (%(default)s)")
    parser.add_argument("--teachers", default="", help="the teachers' service, or host:port (default: labels alone)")
    parser.add_argument("--temperature", type=float, default=4.0)
    parser.add_argument("--alpha", type=float, default=0.9, help="weight of the teachers in the loss (%(default)s)")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch", type=int, default=64, help="images per step, over all nodes")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=0, help="processes that load images")
    parser.add_argument("--log", default="", help="append progress to this file, as lines of JSON")
    return parser.parse_args()


if __name__ == "__main__":
    main()
