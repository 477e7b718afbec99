"""A script with Lightning's Trainer, whose model is sharded."""

from __future__ import annotations

import warnings

import lightning.pytorch as lightning
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from edl.collective.lightning import ElasticLightningCallback
from tests.jobs.collective.trainers.scripts import Run, run_twice

ROWS, FEATURES = 44, 4


class Model(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(FEATURES, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        self.logs: list[dict[str, float]] = []

    def configure_model(self):
        fully_shard(self.layers, mesh=self.device_mesh["data_parallel"])

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
    def __init__(self, run: Run) -> None:
        self.run = run

    def on_train_start(self, trainer, pl_module):
        self.run.begin(trainer.global_step)

    def on_train_batch_end(self, trainer, *args):
        self.run.kill(trainer.fit_loop.epoch_loop.batch_progress.total.ready)


def train(run: Run) -> None:
    warnings.simplefilter("ignore")
    torch.manual_seed(3)
    rows = torch.randn(ROWS, FEATURES)
    data = TensorDataset(rows, rows.sum(1))
    trainer = lightning.Trainer(
        accelerator="cpu",
        strategy=ModelParallelStrategy(run.world, 1),
        devices=run.world,
        max_epochs=3,
        accumulate_grad_batches=4 // run.world,
        default_root_dir=run.options.folder,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        callbacks=[Killed(run), *([ElasticLightningCallback(interval_steps=1)] if run.elastic else [])],
    )
    model = Model()
    trainer.fit(model, DataLoader(data, batch_size=3, shuffle=True), DataLoader(data, batch_size=4))
    run.write(model, trainer.optimizers[0], model.logs)


if __name__ == "__main__":
    run_twice(train)
