"""The Lightning callback without a process group: restarts in one process, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

lightning = pytest.importorskip("lightning.pytorch", reason="Lightning is not installed")
torchmetrics = pytest.importorskip("torchmetrics", reason="torchmetrics is not installed")

from edl.collective.checkpoint.memory.slots import SlotPair  # noqa: E402
from edl.collective.lightning import ElasticLightningCallback  # noqa: E402
from edl.collective.training.sampler import ElasticSampler  # noqa: E402
from edl.errors import SettingsError  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's advice: more workers, another logger
ROWS = torch.linspace(-1, 1, 4 * 27).reshape(27, 4)


class Rows(torch.utils.data.Dataset):
    """Draws an augmentation in this process."""

    def __len__(self) -> int:
        return len(ROWS)

    def __getitem__(self, index: int) -> Any:
        return ROWS[index] + 0.1 * torch.randn(4), ROWS[index].sum()


class Model(lightning.LightningModule):
    def __init__(self, manual: bool = False) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
        self.error = torchmetrics.MeanSquaredError()
        self.automatic_optimization = not manual
        self.seen: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        rows, labels = batch
        found = self.layers(rows).squeeze(-1)
        loss = (found - labels).square().mean()
        self.error(found, labels)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("error", self.error, on_step=False, on_epoch=True)
        if not self.automatic_optimization:
            self.manual_backward(loss)
            if batch_idx % 2:
                self.optimizers().step()
                self.optimizers().zero_grad()
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("checked", (self.layers(batch[0]).squeeze(-1) - batch[1]).square().mean())

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["seen"] = list(self.seen)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.seen = list(checkpoint["seen"])

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.seen.append(batch[1].sum().item())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.05)
        if not self.automatic_optimization:
            return optimizer
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "checked"}}


class Lines(lightning.loggers.logger.Logger):
    """Keeps what is logged; a line that is logged again takes the place of the first."""

    name = version = "lines"

    def __init__(self) -> None:
        super().__init__()
        self.lines: dict[Any, dict[str, float]] = {}

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.lines[step, tuple(sorted(metrics))] = metrics

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Nothing of it is compared."""


class Until(lightning.Callback):
    """Breaks off in a batch, as a crash does."""

    def __init__(self, batch: int) -> None:
        self.batch = batch
        self.began = -1

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.began = trainer.global_step

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.fit_loop.epoch_loop.batch_progress.total.ready == self.batch:
            raise LookupError("broken off")


def trainer_of(folder: Path, lines: Any, until: int = -1, **settings: Any) -> Any:
    callback = ElasticLightningCallback(interval_steps=1, slots=SlotPair(folder / "slots"))
    best = lightning.callbacks.ModelCheckpoint(folder / "best", monitor="loss_epoch", save_on_train_epoch_end=True)
    stop = lightning.callbacks.EarlyStopping("loss_epoch", patience=2, check_on_train_epoch_end=True)
    usual: dict[str, Any] = {"accelerator": "cpu", "max_epochs": 3, "log_every_n_steps": 1, "logger": lines}
    usual |= {"callbacks": [Until(until), callback, stop, best], "enable_progress_bar": False}
    return lightning.Trainer(**(usual | {"enable_model_summary": False} | settings))


def fit(folder: Path, lines: Any, until: int = -1, manual: bool = False, **settings: Any) -> tuple[Any, Any]:
    """Train until the end, or until it breaks off. Returns the trainer and its module."""
    folder.mkdir(exist_ok=True)
    loader = settings.pop("loader", None)
    torch.manual_seed(0)
    model = Model(manual)
    workers, checked = settings.pop("workers", {}), settings.pop("checked", {})
    data = torch.utils.data.TensorDataset(ROWS, ROWS.sum(1))
    loader = loader or torch.utils.data.DataLoader(data if workers else Rows(), 3, shuffle=True, **workers)
    checked = torch.utils.data.DataLoader(data, batch_size=9, **checked)
    trainer = trainer_of(folder, lines, until, **settings)
    trainer.fit(model, loader, checked)
    return trainer, model


WORKERS = {"num_workers": 1, "persistent_workers": True}
EVERY_THIRD = {"val_check_interval": 3}


@pytest.mark.parametrize(
    ("until", "settings"),
    [
        (19, {**EVERY_THIRD, "accumulate_grad_batches": 2}),
        (13, {**EVERY_THIRD, "manual": True}),
        (13, {"workers": WORKERS}),
        (13, {**EVERY_THIRD, "checked": WORKERS, "reload_dataloaders_every_n_epochs": 1}),
    ],
)
def test_goes_on_as_if_undisturbed(tmp_path: Path, until: int, settings: dict[str, Any]) -> None:
    whole, broken = Lines(), Lines()
    trainer, model = fit(tmp_path / "whole", whole, **settings)
    with pytest.raises(LookupError):
        fit(tmp_path / "broken", broken, until, **settings)
    again, other = fit(tmp_path / "broken", broken, **settings)
    assert again.global_step == trainer.global_step
    assert again.callbacks[0].began > 0, "it began anew, which is no recovery"
    assert other.seen == model.seen, "the same batches in the same order, and each once"
    for name, tensor in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor), name
    assert broken.lines == whole.lines
    assert again.checkpoint_callback.best_model_score == trainer.checkpoint_callback.best_model_score


def test_finished_training_is_not_repeated(tmp_path: Path) -> None:
    first, model = fit(tmp_path, Lines())
    again, other = fit(tmp_path, Lines(), 1)
    assert again.global_step == first.global_step
    assert all(map(torch.equal, model.state_dict().values(), other.state_dict().values()))
    with pytest.raises(SettingsError, match=r"one call of fit"):
        again.fit(other, torch.utils.data.DataLoader(Rows()))


def test_same_samples_go_on_others_do_not(tmp_path: Path) -> None:
    def loader(rows: int, **settings: Any) -> Any:
        data = torch.utils.data.TensorDataset(ROWS[:24], ROWS[:24].sum(1))
        return torch.utils.data.DataLoader(data, batch_size=rows, **settings)

    with pytest.raises(LookupError):
        fit(tmp_path, Lines(), 5, loader=loader(4))
    with pytest.raises(SettingsError, match="trained 4 samples, but trains 3 with 1 workers"):
        fit(tmp_path, Lines(), loader=loader(3))
    with pytest.raises(SettingsError, match=r"'SequentialSampler'.*'RandomSampler'"):
        fit(tmp_path, Lines(), loader=loader(4, shuffle=True))
    trainer, model = fit(tmp_path, Lines(), loader=loader(2), accumulate_grad_batches=2)
    assert trainer.callbacks[0].began == 4
    assert trainer.global_step == 18, "six steps in each of three epochs"
    assert len(model.seen) == 4 + (18 - 4) * 2, "four batches of four samples, and the rest in batches of two"


def test_what_cannot_go_on_is_refused(tmp_path: Path) -> None:
    def refused(match: str, **settings: Any) -> None:
        with pytest.raises(SettingsError, match=match):
            fit(tmp_path, Lines(), **settings)

    refused("reload_dataloaders_every_n_epochs=2", reload_dataloaders_every_n_epochs=2)
    average = lightning.callbacks.StochasticWeightAveraging(1e-2)
    refused("use WeightAveraging", callbacks=[ElasticLightningCallback(), average])
    sampler = ElasticSampler(len(ROWS), global_batch=4)
    refused("ElasticSampler counts", loader=torch.utils.data.DataLoader(Rows(), batch_sampler=sampler))
    trainer = trainer_of(tmp_path, Lines())
    trainer.fit_loop.epoch_loop = None
    with pytest.raises(SettingsError, match=r"Lightning .*: use 2\.6"):
        trainer.callbacks[1].setup(trainer, Model(), "fit")
