"""A script with `DistillTrainer` under `edl run`, which kills itself in one step, once, if it is told to."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from edl.collective.transformers import ElasticCallback
from edl.distill.transformers import DistillArguments, DistillTrainer
from tests.fast.distill.trainers.students import collate_left, small_model, texts, training_arguments
from tests.jobs.collective.trainers.outcome import parse_options, write_outcome


class Killed(TrainerCallback):
    """Notes where a run begins, and kills rank 1 at the end of a step, once."""

    def __init__(self, folder: Path, step: int) -> None:
        self._folder = folder
        self._step = step

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        with (self._folder / "begins").open("a") as file:
            file.write(f"{state.global_step}\n")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        mark = self._folder / "killed"
        if state.global_step == self._step and args.process_index == 1 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    options = parse_options()
    folder = options.folder
    args = training_arguments(
        folder / "out",
        per_device_train_batch_size=3,
        gradient_accumulation_steps=2,
        num_train_epochs=3,
        optim="adamw_torch",
        learning_rate=0.01,
        eval_strategy="steps",
        eval_steps=3,
    )
    trainer = DistillTrainer(
        small_model(2, attention_dropout=0.5),
        args,
        train_dataset=texts(44),
        eval_dataset=texts(8),
        data_collator=collate_left,
        distill_args=DistillArguments(top_k=6, beta=0.5, hard_weight=0.25, eval_teachers=True, ahead=3),
        callbacks=[],
    )
    trainer.add_callback(ElasticCallback(trainer, interval_steps=1))
    trainer.add_callback(Killed(folder, options.kill_at))
    trainer.train()
    logs = [
        {key: value for key, value in line.items() if "runtime" not in key and "per_second" not in key}
        for line in trainer.state.log_history
    ]
    write_outcome(folder / "result.json", trainer.model, trainer.optimizer.optimizer, logs)


if __name__ == "__main__":
    main()
