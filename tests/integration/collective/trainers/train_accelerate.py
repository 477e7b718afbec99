"""A loop with Accelerate, which kills itself in one batch, once, if it is told to.

Arguments: a folder for what it finds out; then in which batch rank 1 is killed, or -1.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from edl.collective.accelerate import ElasticLoop

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
    folder, kill_at = Path(sys.argv[1]), int(sys.argv[2])
    torch.manual_seed(3)
    rows = torch.randn(ROWS, FEATURES)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4 // int(os.environ["WORLD_SIZE"]))
    model = nn.Sequential(nn.Linear(FEATURES, 8), nn.Dropout(0.5), nn.Linear(8, 1))
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
            with (folder / "begins").open("a") as file:
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
            mark = folder / "killed"
            steps = int(optimizer.optimizer.state[next(model.parameters())]["step"]) if optimizer.optimizer.state else 0
            if steps == kill_at and accelerator.process_index == 1 and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        losses.epochs.append(losses.sum)
        losses.sum = 0.0
    if accelerator.is_main_process:
        weights = {name: tensor.tolist() for name, tensor in accelerator.unwrap_model(model).state_dict().items()}
        (folder / "result.json").write_text(json.dumps({"weights": weights, "logs": losses.epochs}))


if __name__ == "__main__":
    main()
