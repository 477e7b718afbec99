"""A script with Lightning's Trainer, which kills itself in one batch, once, if it is told to."""

from __future__ import annotations

import os
import signal
import warnings
from pathlib import Path

import lightning.pytorch as lightning
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from edl.collective.lightning import ElasticLightningCallback
from tests.jobs.collective.trainers.outcome import parse_options, write_outcome

ROWS, FEATURES = 44, 4


class Model(lightning.LightningModule):
    def __init__(self, sharded: bool, backend: str) -> None:
        super().__init__()
        self.sharded = sharded
        self.backend = backend
        self.layers = nn.Sequential(nn.Linear(FEATURES, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        self.logs: list[dict[str, float]] = []

    def configure_model(self):
        if self.sharded:
            fully_shard(self.layers, mesh=self.device_mesh["data_parallel"])
        if self.backend:
            self.layers = torch.compile(self.layers, backend=self.backend)

    def training_step(self, batch, batch_idx):
        loss = (self.layers(batch[0]).squeeze(-1) - batch[1]).square().mean()
        self.log("loss", loss, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("checked", (self.layers(batch[0]).squeeze(-1) - batch[1]).square().mean(), sync_dist=True)

    def on_train_epoch_end(self):
        self.logs.append({name: float(value) for name, value in self.trainer.callback_metrics.items()})

    def on_save_checkpoint(self, checkpoint):
        checkpoint["logs"] = list(self.logs)

    def on_load_checkpoint(self, checkpoint):
        self.logs = list(checkpoint["logs"])

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.05)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]


class Killed(lightning.Callback):
    def __init__(self, folder: Path, batch: int) -> None:
        self.folder, self.batch = folder, batch

    def on_train_start(self, trainer, pl_module):
        with (self.folder / "begins").open("a") as file:
            file.write(f"{trainer.global_step}\n")

    def on_train_batch_end(self, trainer, *args):
        mark = self.folder / "killed"
        done = trainer.fit_loop.epoch_loop.batch_progress.total.ready
        if done == self.batch and trainer.global_rank == 1 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    options = parse_options()
    folder = options.folder
    warnings.simplefilter("ignore")
    torch.manual_seed(3)
    rows = torch.randn(ROWS, FEATURES)
    data = TensorDataset(rows, rows.sum(1))
    world = int(os.environ["WORLD_SIZE"])
    trainer = lightning.Trainer(
        accelerator="cpu",
        strategy=ModelParallelStrategy(world, 1) if options.fsdp2 else "ddp",
        devices=world,
        max_epochs=4,
        accumulate_grad_batches=4 // world,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        callbacks=[Killed(folder, options.kill_at), ElasticLightningCallback(interval_steps=1)],
    )
    model = Model(options.fsdp2, options.compile)
    trainer.fit(model, DataLoader(data, batch_size=3, shuffle=True), DataLoader(data, batch_size=4))
    write_outcome(folder / "result.json", model, trainer.optimizers[0], model.logs)


if __name__ == "__main__":
    main()
