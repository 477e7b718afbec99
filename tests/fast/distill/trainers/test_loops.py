"""Accelerate's and Lightning's loops on teachers' labels: a restart goes on where it was, and ends the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

from edl.collective.checkpoint.memory.slots import SlotPair  # noqa: E402
from edl.distill.torch import distill  # noqa: E402
from tests.fast.distill.conftest import Serve  # noqa: E402

ROWS, EPOCHS, BATCHES = 40, 3, 10


def student() -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(4, 4))


def loader() -> Any:
    data = TensorDataset(torch.arange(ROWS * 4.0).reshape(ROWS, 4) / 100)
    return DataLoader(data, batch_size=ROWS // BATCHES, shuffle=True)


def parameters(model: Any) -> Any:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def test_accelerate_labels_what_is_left(serve: Serve, tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate", reason="Accelerate is not installed")
    from edl.collective.accelerate import ElasticLoop

    def train(folder: Path, until: int = -1) -> tuple[Any, int]:
        """Train up to a batch, or the end; return the weights and how many rows teachers were asked for."""
        folder.mkdir(exist_ok=True)
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        model = student()
        model, optimizer, data = accelerator.prepare(model, torch.optim.Adam(model.parameters(), lr=0.01), loader())
        loop = ElasticLoop(accelerator, interval_steps=1, slots=SlotPair(folder / "slots"))
        batches = 0
        with distill(data, teacher.endpoint, inputs=["x"], outputs="y", ahead=2) as labelled:
            for _ in loop.epochs(EPOCHS):
                for (rows,), labels in loop.batches(labelled):
                    assert torch.equal(rows, labels)
                    with accelerator.accumulate(model):
                        accelerator.backward((model(rows) - labels).square().mean())
                        optimizer.step()
                        optimizer.zero_grad()
                    batches += 1
                    if batches == until:
                        return None, 0
            return parameters(model), labelled.stats().rows_asked

    teacher = serve("echo")
    whole, asked = train(tmp_path / "whole")
    assert asked == EPOCHS * ROWS
    train(tmp_path / "broken", 15)  # the fifth batch of the second epoch
    again, asked = train(tmp_path / "broken")
    assert torch.equal(again, whole)
    assert asked == EPOCHS * ROWS - 14 * 4  # what was trained and saved is not labelled again


@pytest.mark.filterwarnings("ignore")  # Lightning's advice: more workers, another logger
def test_lightning_reads_its_epoch_again(serve: Serve, tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning.pytorch", reason="Lightning is not installed")
    from edl.collective.lightning import ElasticLightningCallback

    class Student(lightning.LightningModule):  # type: ignore[misc, name-defined]
        """Breaks off in a batch, if it is told to."""

        def __init__(self, until: int) -> None:
            super().__init__()
            self.model, self.until, self.trained = student(), until, 0

        def training_step(self, pair: Any, batch_idx: int) -> Any:
            (rows,), labels = pair
            assert torch.equal(rows, labels)
            if self.trained == self.until:
                raise LookupError("broken off")
            self.trained += 1
            return (self.model(rows) - labels).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=0.01)

    def train(folder: Path, until: int = -1) -> tuple[Any, int, int]:
        """Train; return the weights, batches trained, and rows that teachers were asked for."""
        folder.mkdir(exist_ok=True)
        model = Student(until)
        quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
        callback = ElasticLightningCallback(interval_steps=1, slots=SlotPair(folder / "slots"))
        trainer = lightning.Trainer(max_epochs=EPOCHS, accelerator="cpu", callbacks=[callback], **quiet)
        with distill(loader(), teacher.endpoint, inputs=["x"], outputs="y") as labelled:
            trainer.fit(model, labelled)
            return parameters(model), model.trained, labelled.stats().rows_asked

    teacher = serve("echo")
    whole, trained, asked = train(tmp_path / "whole")
    assert trained == EPOCHS * BATCHES
    # Lightning begins an epoch that it drops, to see that it can: batches of that may have been sent.
    assert EPOCHS * ROWS <= asked <= (EPOCHS + 1) * ROWS
    with pytest.raises(LookupError):
        train(tmp_path / "broken", 14)  # the fifth batch of the second epoch
    again, trained, asked = train(tmp_path / "broken")
    assert trained == EPOCHS * BATCHES - 14, "batches that were trained are not trained again"
    assert asked >= (EPOCHS - 1) * ROWS, "the broken epoch is read from its beginning, with labels"
    assert torch.equal(again, whole)
