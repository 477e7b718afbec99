"""Small students, texts and collators, and what a student must become with the labels of `prefix_scores`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

from edl.distill.compress import TopK, top_k
from edl.distill.losses import token_loss
from edl.testing.models import prefix_scores_of

VOCABULARY = 31
PAD = 0


SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}
"""Of any model of transformers."""


def small_model(seed: int, **settings: Any) -> Any:
    torch.manual_seed(seed)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, num_key_value_heads=2, **settings))


def small_mixture(seed: int, coefficient: float = 0.5) -> Any:
    """A mixture of experts whose router has a loss of its own, of some weight."""
    torch.manual_seed(seed)
    experts: dict[str, Any] = {"num_local_experts": 4, "router_aux_loss_coef": coefficient}
    config = transformers.MixtralConfig(**SIZES, num_key_value_heads=2, output_router_logits=True, **experts)
    return transformers.MixtralForCausalLM(config)


def texts(count: int = 22) -> list[dict[str, list[int]]]:
    """Texts of 3 to 13 tokens, the first two of which are a prompt."""
    rng = np.random.default_rng(0)
    found = [rng.integers(1, VOCABULARY, int(rng.integers(3, 14))).tolist() for _ in range(count)]
    return [{"input_ids": ids, "labels": [-100, -100, *ids[2:]]} for ids in found]


def _padded(samples: Sequence[dict[str, list[int]]], side: str) -> dict[str, Tensor]:
    def pad(name: str, value: int) -> Tensor:
        rows = [torch.tensor(sample[name]) for sample in samples]
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value, padding_side=side)

    ids = pad("input_ids", PAD)
    return {"input_ids": ids, "attention_mask": (ids != PAD).long(), "labels": pad("labels", -100)}


collate_right, collate_left = partial(_padded, side="right"), partial(_padded, side="left")


def collate_flat(samples: Sequence[dict[str, list[int]]]) -> dict[str, Tensor]:
    return transformers.DataCollatorWithFlattening()(list(samples))


def training_arguments(folder: Path, **settings: Any) -> Any:
    """Arguments of plain SGD on the CPU, that write nothing."""
    usual: dict[str, Any] = {
        "per_device_train_batch_size": 4,
        "num_train_epochs": 1,
        "optim": "sgd",
        "learning_rate": 0.5,
        "max_grad_norm": 0,
        "save_strategy": "no",
        "logging_steps": 1,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
    }
    return transformers.TrainingArguments(str(folder), **{**usual, **settings})


def parameters(model: Any) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def expected_loss(model: Any, samples: Sequence[dict[str, list[int]]], *, k: int, beta: float, hard: float) -> Tensor:
    """The mean over the learned tokens of all samples, each computed alone."""
    losses = []
    for sample in samples:
        ids = torch.tensor([sample["input_ids"]])
        logits = model(input_ids=ids).logits
        labels: TopK = top_k(prefix_scores_of(ids[0].numpy(), VOCABULARY)[None], k)
        own = torch.tensor(sample["labels"])[1:]
        soft = token_loss(logits, labels, beta=beta, reduction="none")[0, :-1]
        cross_entropy = torch.nn.functional.cross_entropy(logits[0, :-1], own, reduction="none")
        losses.append(((1 - hard) * soft + hard * cross_entropy)[own != -100])
    return torch.cat(losses).mean()
