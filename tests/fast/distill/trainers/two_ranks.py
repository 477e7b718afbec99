"""A script for two ranks: steps over all texts, in the ways in which a `Trainer` shares samples out."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from edl.distill.transformers import DistillArguments, DistillTrainer
from tests.fast.distill.trainers.students import (
    collate_flat,
    collate_left,
    collate_right,
    parameters,
    small_mixture,
    small_model,
    texts,
    training_arguments,
)

LENGTH = 14


class Stream(torch.utils.data.IterableDataset[Any]):
    """All texts, in their order."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __iter__(self) -> Iterator[Any]:
        return iter(texts(self._count))


def collate_to_length(samples: Sequence[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Pad to the same length, since rank 0 puts the batches of all ranks together when it reads for them."""
    batch = collate_right(samples)
    fill = {"input_ids": 0, "attention_mask": 0, "labels": -100}
    return {
        name: torch.nn.functional.pad(part, (0, LENGTH - part.shape[1]), value=fill[name])
        for name, part in batch.items()
    }


WAYS: dict[str, dict[str, Any]] = {
    "shuffled": {"count": 24},
    "by length": {"count": 24, "train_sampling_strategy": "group_by_length"},
    "uneven": {"count": 22, "train_sampling_strategy": "sequential"},
    "left, uneven": {"count": 22, "train_sampling_strategy": "sequential", "collate": collate_left},
    "dropped": {"count": 23, "train_sampling_strategy": "sequential", "dataloader_drop_last": True},
    "flat": {"count": 24, "collate": collate_flat},
    "dispatched": {"count": 24, "collate": collate_to_length, "accelerator_config": {"dispatch_batches": True}},
    "split": {
        "count": 24,
        "collate": collate_to_length,
        "accelerator_config": {"dispatch_batches": True, "split_batches": True},
        "per_device_train_batch_size": 6,
    },
    "stream": {"count": 24, "collate": collate_to_length, "stream": True},
    "workers": {"count": 24, "dataloader_num_workers": 1, "dataloader_persistent_workers": True},
    "chunked": {"count": 24, "chunked_head": True},
    "experts": {"count": 24, "train_sampling_strategy": "sequential", "experts": True},
    "own count": {"count": 24, "train_sampling_strategy": "sequential", "average_tokens_across_devices": False},
}


def main() -> None:
    folder = Path(sys.argv[1])
    found: dict[str, Any] = {}
    for name, way in WAYS.items():
        settings = dict(way)
        count, collate = settings.pop("count"), settings.pop("collate", collate_right)
        data: Any = Stream(count) if settings.pop("stream", False) else texts(count)
        arguments = DistillArguments(
            top_k=5, beta=0.5, hard_weight=0.25, chunked_head=settings.pop("chunked_head", False), ahead=2
        )
        student = small_mixture(2) if settings.pop("experts", False) else small_model(2)
        settings = {
            "per_device_train_batch_size": 3,
            "gradient_accumulation_steps": 3 if name == "dropped" else 4,
            "max_steps": 1,
            "lr_scheduler_type": "constant",
            **settings,
        }
        trainer = DistillTrainer(
            student,
            training_arguments(folder / "out", **settings),
            train_dataset=data,
            data_collator=collate,
            distill_args=arguments,
        )
        trainer.train()
        found[name] = {"parameters": parameters(trainer.model).tolist(), "loss": trainer.state.log_history[0]["loss"]}
    if torch.distributed.get_rank() == 0:
        (folder / "found.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
