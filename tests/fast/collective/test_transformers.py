"""The Hugging Face callback without a process group: restarts in one process, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", "5.23", reason="transformers is not installed, or too old")

from edl.collective.checkpoint.memory.slots import SlotPair  # noqa: E402
from edl.collective.transformers import ElasticCallback  # noqa: E402
from edl.errors import SettingsError  # noqa: E402

ROWS = torch.linspace(-1, 1, 48).reshape(12, 4)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.dropout = torch.nn.Dropout(0.0)

    def forward(self, x: Any, labels: Any) -> dict[str, Any]:
        return {"loss": (self.layer(self.dropout(x)).squeeze(-1) - labels).square().mean()}


class Until(transformers.TrainerCallback):
    """Breaks off in a step, as a crash does."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            raise LookupError("broken off")


def trainer_of(folder: Path, until: int = -1, **settings: Any) -> Any:
    data = [{"x": row, "labels": row.sum()} for row in ROWS]
    usual = {"per_device_train_batch_size": 2, "num_train_epochs": 3, "logging_steps": 4, "save_strategy": "no"}
    args = transformers.TrainingArguments(
        output_dir=str(folder / "out"), use_cpu=True, report_to=[], disable_tqdm=True, **(usual | settings)
    )
    torch.manual_seed(0)
    trainer = transformers.Trainer(model=Model(), args=args, train_dataset=data, eval_dataset=data[:4])
    trainer.add_callback(ElasticCallback(trainer, interval_steps=1, slots=SlotPair(folder / "slots")))
    trainer.add_callback(Until(until))
    return trainer


def weights(trainer: Any) -> list[Any]:
    return [one.detach().clone() for one in trainer.model.parameters()]


def test_only_the_same_samples_go_on(tmp_path: Path) -> None:
    for folder in (tmp_path / "whole", tmp_path / "broken"):
        folder.mkdir()
    whole = trainer_of(tmp_path / "whole")
    whole.train()
    with pytest.raises(LookupError):
        trainer_of(tmp_path / "broken", until=9).train()
    with pytest.raises(SettingsError, match="trained 2 samples, but trains 4 with 1 workers"):
        trainer_of(tmp_path / "broken", per_device_train_batch_size=4).train()
    with pytest.raises(SettingsError, match=r"in the order of .*'seed': 42.*'seed': 7"):
        trainer_of(tmp_path / "broken", seed=7).train()
    again = trainer_of(tmp_path / "broken", per_device_train_batch_size=1, gradient_accumulation_steps=2)
    again.train()
    assert again.state.global_step == whole.state.global_step
    for one, other in zip(weights(whole), weights(again), strict=True):
        torch.testing.assert_close(one, other)
    steps = [line["step"] for line in again.state.log_history]
    assert steps == [line["step"] for line in whole.state.log_history], "logs come back as well"


def logged(trainer: Any) -> list[dict[str, Any]]:
    """Return what it has logged, but for how long that took."""
    timed = ("_runtime", "_per_second")
    return [{key: line[key] for key in line if not key.endswith(timed)} for line in trainer.state.log_history]


def test_finished_training_is_not_repeated(tmp_path: Path) -> None:
    """Restarted in what the script does after training; five of the losses were not logged before its end."""
    settings = {"logging_steps": 13}
    first = trainer_of(tmp_path, **settings)
    result, trained, lines = first.train(), weights(first), logged(first)
    again = trainer_of(tmp_path, until=1, **settings)
    assert again.train().training_loss == result.training_loss
    assert logged(again) == lines
    assert all(map(torch.equal, trained, weights(again)))
    with pytest.raises(SettingsError, match="one call of train"):
        again.train()
    with pytest.raises(SettingsError, match="num_train_epochs=3 and max_steps=-1, but 4 and -1 are requested"):
        trainer_of(tmp_path, num_train_epochs=4, **settings).train()


def end_workers(trainer: Any) -> None:
    """End workers of loaders; the garbage collector, which finds them with the Trainer, has torch wait 5 s for each."""
    for loader in (trainer.callback_handler.train_dataloader, *trainer._eval_dataloaders.values()):
        if loader._iterator is not None:
            loader._iterator._shutdown_workers()


def test_persistent_workers_draw_once(tmp_path: Path) -> None:
    """Made before the first epoch and the first evaluation, and again after a restart in the second epoch."""
    settings = {"dataloader_num_workers": 1, "dataloader_persistent_workers": True, "num_train_epochs": 2}
    settings |= {"eval_strategy": "steps", "eval_steps": 2, "eval_on_start": True}
    ended = []
    for name, moments in {"whole": [-1], "broken": [9, -1]}.items():
        (tmp_path / name).mkdir()
        for moment in moments:
            trainer = trainer_of(tmp_path / name, until=moment, **settings)
            trainer.model.dropout.p = 0.5
            if moment > 0:
                with pytest.raises(LookupError):
                    trainer.train()
            else:
                trainer.train()
            end_workers(trainer)
        ended.append((weights(trainer), logged(trainer)))
    (whole, lines), (broken, others) = ended
    assert all(map(torch.equal, whole, broken))
    assert lines == others, "the evaluation on start is logged, and counts for early stopping, once"
    assert trainer.args.eval_on_start


def test_order_that_is_lost_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="train samples again"):
        trainer_of(tmp_path, ignore_data_skip=True)
    drawn = trainer_of(tmp_path, accelerator_config={"use_seedable_sampler": False})
    with pytest.raises(SettingsError, match="RandomSampler orders the data differently"):
        drawn.train()
    trainer = trainer_of(tmp_path)
    trainer._run_epoch = lambda: None
    with pytest.raises(SettingsError, match=r"transformers .*: use 5\.23"):
        ElasticCallback(trainer)
