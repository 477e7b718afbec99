"""A script with Hugging Face's Trainer, which kills itself in one step, once, if it is told to."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from edl.collective.transformers import ElasticCallback
from tests.jobs.collective.trainers.fsdp_on_cpu import allow_fsdp_on_cpu
from tests.jobs.collective.trainers.outcome import parse_options, write_outcome

ROWS, FEATURES = 44, 4


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(FEATURES, 8), nn.Dropout(0.5), nn.Linear(8, 1))

    def forward(self, x, labels):
        logits = self.layers(x).squeeze(-1)
        return {"loss": (logits - labels).square().mean(), "logits": logits}


class Killed(TrainerCallback):
    def __init__(self, folder: Path, step: int) -> None:
        self.folder, self.step = folder, step

    def on_train_begin(self, args, state, control, **kwargs):
        with (self.folder / "begins").open("a") as file:
            file.write(f"{state.global_step}\n")

    def on_step_end(self, args, state, control, **kwargs):
        mark = self.folder / "killed"
        if state.global_step == self.step and args.process_index == 1 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    options = parse_options()
    folder = options.folder
    allow_fsdp_on_cpu()
    torch.manual_seed(3)
    rows = torch.randn(ROWS, FEATURES)
    data = [{"x": row, "labels": row.sum()} for row in rows]
    world = int(os.environ["WORLD_SIZE"])
    args = TrainingArguments(
        output_dir=str(folder / "out"),
        use_cpu=True,
        per_device_train_batch_size=3,
        gradient_accumulation_steps=4 // world,
        num_train_epochs=4,
        logging_steps=3,
        eval_strategy="steps",
        eval_steps=3,  # an FSDP2 root is saved right after a forward pass without a backward one
        save_strategy="no",
        learning_rate=0.01,
        report_to=[],
        disable_tqdm=True,
        fsdp=options.fsdp2,
        fsdp_config={"version": 2} if options.fsdp2 else None,
        torch_compile=bool(options.compile),
        torch_compile_backend=options.compile or None,
    )
    trainer = Trainer(model=Model(), args=args, train_dataset=data, eval_dataset=data[:8], callbacks=[])
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
