"""A loop with Accelerate, which kills itself in one step, once, if it is told to."""

from __future__ import annotations

import os
import signal

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from edl.collective.accelerate import ElasticLoop
from tests.jobs.collective.trainers.fsdp_on_cpu import allow_fsdp_on_cpu
from tests.jobs.collective.trainers.outcome import parse_options, write_outcome

ROWS, FEATURES = 44, 4


class Losses:
    """Of each epoch: registered for checkpointing."""

    def __init__(self) -> None:
        self.sum, self.epochs = 0.0, []

    def state_dict(self):
        return {"sum": self.sum, "epochs": list(self.epochs)}

    def load_state_dict(self, saved):
        self.sum, self.epochs = saved["sum"], list(saved["epochs"])


def main() -> None:
    options = parse_options()
    allow_fsdp_on_cpu()
    torch.manual_seed(3)
    rows = torch.randn(ROWS, FEATURES)
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=4 // int(os.environ["WORLD_SIZE"]),
        fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2) if options.fsdp2 else None,
    )
    model = nn.Sequential(nn.Linear(FEATURES, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    model = torch.compile(model, backend=options.compile) if options.compile else model
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
    loader = DataLoader(TensorDataset(rows, rows.sum(1)), batch_size=3, shuffle=True)
    model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, loader)
    losses = Losses()
    accelerator.register_for_checkpointing(losses)
    loop = ElasticLoop(accelerator, interval_steps=1)
    begun = False
    for epoch in loop.epochs(4):
        if not begun and accelerator.is_main_process:
            with (options.folder / "begins").open("a") as file:
                file.write(f"{epoch}\n")
        begun = True
        for inputs, labels in loop.batches(loader):
            with accelerator.accumulate(model):
                loss = (model(inputs).squeeze(-1) - labels).square().mean()
                losses.sum += accelerator.reduce(loss.detach(), "mean").item()
                accelerator.backward(loss)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            mark = options.folder / "killed"
            steps = int(optimizer.optimizer.state[next(model.parameters())]["step"]) if optimizer.optimizer.state else 0
            if steps == options.kill_at and accelerator.process_index == 1 and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        losses.epochs.append(losses.sum)
        losses.sum = 0.0
    write_outcome(options.folder / "result.json", accelerator.unwrap_model(model), optimizer.optimizer, losses.epochs)


if __name__ == "__main__":
    main()
