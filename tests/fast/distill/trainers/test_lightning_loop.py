"""Lightning's `Trainer` on teachers' labels: each batch with its own, and a restart that ends the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
lightning = pytest.importorskip("lightning.pytorch", reason="Lightning is not installed")

from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

from edl.collective.checkpoint.memory.slots import SlotPair  # noqa: E402
from edl.collective.lightning import ElasticLightningCallback  # noqa: E402
from edl.distill.torch import distill  # noqa: E402
from edl.testing import LocalTeacher  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's advice: more workers, another logger

ROWS, EPOCHS, BATCHES = 40, 3, 10


class Student(lightning.LightningModule):  # type: ignore[misc, name-defined]
    """Breaks off in a batch, if it is told to."""

    def __init__(self, until: int) -> None:
        super().__init__()
        self.model = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(4, 4))
        self.until = until
        self.trained = 0

    def training_step(self, pair: Any, batch_idx: int) -> Any:
        (rows,), labels = pair
        assert torch.equal(rows, labels)
        if self.trained == self.until:
            raise LookupError("broken off")
        self.trained += 1
        return (self.model(rows) - labels).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def train(folder: Path, teacher: str, until: int = -1) -> tuple[Any, int, int]:
    """Train up to a batch, or the end; return the weights, batches trained, and rows that teachers were asked for."""
    folder.mkdir(exist_ok=True)
    torch.manual_seed(0)
    student = Student(until)
    data = TensorDataset(torch.arange(ROWS * 4.0).reshape(ROWS, 4) / 100)
    trainer = lightning.Trainer(
        max_epochs=EPOCHS,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ElasticLightningCallback(interval_steps=1, slots=SlotPair(folder / "slots"))],
    )
    loader = DataLoader(data, batch_size=ROWS // BATCHES, shuffle=True)
    with distill(loader, teacher, inputs=["x"], outputs="y") as labelled:
        trainer.fit(student, labelled)
        asked = labelled.stats().rows_asked
    return torch.cat([parameter.detach().flatten() for parameter in student.parameters()]), student.trained, asked


def test_restart_reads_its_epoch_again(tmp_path: Path) -> None:
    with LocalTeacher("echo", width=4) as teacher:
        whole, trained, asked = train(tmp_path / "whole", teacher.endpoint)
        assert trained == EPOCHS * BATCHES
        # Lightning begins an epoch that it drops, to see that it can: batches of that may have been sent.
        assert EPOCHS * ROWS <= asked <= (EPOCHS + 1) * ROWS
        with pytest.raises(LookupError):
            train(tmp_path / "broken", teacher.endpoint, 14)  # the fifth batch of the second epoch
        again, trained, asked = train(tmp_path / "broken", teacher.endpoint)
    assert trained == EPOCHS * BATCHES - 14, "batches that were trained are not trained again"
    assert asked >= (EPOCHS - 1) * ROWS, "the broken epoch is read from its beginning, with labels"
    assert torch.equal(again, whole)
