"""Hugging Face's Trainer with a sharded model; with EDL_TEACHERS, `DistillTrainer` with one that is not."""

from __future__ import annotations

import os
from typing import Any

import torch
import transformers
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from edl.collective.transformers import ElasticCallback
from edl.distill.transformers import DistillArguments, DistillTrainer
from tests.jobs.collective.trainers.scripts import Run, allow_fsdp_on_cpu, run_twice

ROWS, FEATURES, VOCABULARY = 44, 4, 31


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(FEATURES, 8), nn.Dropout(0.5), nn.Linear(8, 1))

    def forward(self, x, labels):
        logits = self.layers(x).squeeze(-1)
        return {"loss": (logits - labels).square().mean(), "logits": logits}


class Killed(TrainerCallback):
    def __init__(self, run: Run) -> None:
        self.run = run

    def on_train_begin(self, args, state, control, **kwargs):
        self.run.begin(state.global_step)

    def on_step_end(self, args, state, control, **kwargs):
        self.run.kill(state.global_step)


def language_model() -> Any:
    settings = {"vocab_size": VOCABULARY, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "attention_dropout": 0.5}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings, **heads))


def collate(samples):
    """Pad on the left."""
    ids = nn.utils.rnn.pad_sequence(samples, batch_first=True, padding_side="left")
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": ids.masked_fill(ids == 0, -100)}


def trainer_of(args: TrainingArguments) -> Trainer:
    torch.manual_seed(3)
    if "EDL_TEACHERS" in os.environ:
        texts = [torch.randint(1, VOCABULARY, (3 + row % 11,)) for row in range(ROWS)]
        distill = DistillArguments(top_k=6, beta=0.5, hard_weight=0.25, eval_teachers=True, ahead=3)
        given = {"data_collator": collate, "distill_args": distill}
        return DistillTrainer(language_model(), args, train_dataset=texts, eval_dataset=texts[:8], **given)
    rows = torch.randn(ROWS, FEATURES)
    data = [{"x": row, "labels": row.sum()} for row in rows]
    return Trainer(model=Model(), args=args, train_dataset=data, eval_dataset=data[:8])


def train(run: Run) -> None:
    sharded = "EDL_TEACHERS" not in os.environ
    args = TrainingArguments(
        output_dir=str(run.options.folder / "out"),
        use_cpu=True,
        per_device_train_batch_size=3,
        gradient_accumulation_steps=4 // run.world,
        num_train_epochs=3,
        logging_steps=3,
        eval_strategy="steps",
        eval_steps=3,  # an FSDP2 root is saved right after a forward pass without a backward one
        save_strategy="no",
        optim="adamw_torch",
        learning_rate=0.01,
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
        fsdp=sharded,
        fsdp_config={"version": 2} if sharded else None,
    )
    trainer = trainer_of(args)
    if run.elastic:
        trainer.add_callback(ElasticCallback(trainer, interval_steps=1))
    trainer.add_callback(Killed(run))
    trainer.train()
    logs = [
        {key: value for key, value in line.items() if "runtime" not in key and "per_second" not in key}
        for line in trainer.state.log_history
    ]
    run.write(trainer.model, trainer.optimizer.optimizer, logs)


if __name__ == "__main__":
    allow_fsdp_on_cpu()
    run_twice(train)
