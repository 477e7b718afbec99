"""A loop with Accelerate, whose model is sharded and compiled."""

from __future__ import annotations

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from edl.collective.accelerate import ElasticLoop
from tests.jobs.collective.trainers.scripts import Run, allow_fsdp_on_cpu, run_twice

ROWS, FEATURES, EPOCHS = 44, 4, 3


class Losses:
    """Of each epoch: registered for checkpointing."""

    def __init__(self) -> None:
        self.sum, self.epochs = 0.0, []

    def state_dict(self):
        return {"sum": self.sum, "epochs": list(self.epochs)}

    def load_state_dict(self, saved):
        self.sum, self.epochs = saved["sum"], list(saved["epochs"])


def train(run: Run) -> None:
    torch.manual_seed(3)
    rows = torch.randn(ROWS, FEATURES)
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=4 // run.world, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2)
    )
    model = nn.Sequential(nn.Linear(FEATURES, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    model = torch.compile(model, backend="aot_eager")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
    loader = DataLoader(TensorDataset(rows, rows.sum(1)), batch_size=3, shuffle=True)
    model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, loader)
    losses = Losses()
    accelerator.register_for_checkpointing(losses)
    loop = ElasticLoop(accelerator, interval_steps=1) if run.elastic else None
    begun = False
    for epoch in loop.epochs(EPOCHS) if loop else range(EPOCHS):
        if not begun:
            run.begin(epoch)
        begun = True
        for inputs, labels in loop.batches(loader) if loop else loader:
            with accelerator.accumulate(model):
                loss = (model(inputs).squeeze(-1) - labels).square().mean()
                losses.sum += accelerator.reduce(loss.detach(), "mean").item()
                accelerator.backward(loss)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            state = optimizer.optimizer.state
            run.kill(int(state[next(model.parameters())]["step"]) if state else 0)
        losses.epochs.append(losses.sum)
        losses.sum = 0.0
    run.write(accelerator.unwrap_model(model), optimizer.optimizer, losses.epochs)


if __name__ == "__main__":
    allow_fsdp_on_cpu()
    run_twice(train)
