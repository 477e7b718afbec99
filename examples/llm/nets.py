"""The teacher and the student, two small Llamas that transformers and vLLM can load, and functions to measure them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from corpus import WINDOW, collate
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

SIZES = {
    "teacher": {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4},
    "student": {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 2},
}


def build(size: str, tokenizer: Tokenizer) -> PreTrainedModel:
    """Return a Llama with random weights."""
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        **SIZES[size],
        head_dim=32,  # the smallest that vLLM supports
        max_position_embeddings=2 * WINDOW,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    return LlamaForCausalLM(config)


@torch.no_grad()
def perplexity(model: PreTrainedModel, windows: Sequence[torch.Tensor]) -> float:
    """Return e to the power of the mean cross-entropy of a token, given the tokens before it in its window."""
    model.eval()
    total, tokens = 0.0, 0
    for start in range(0, len(windows), 16):
        batch = collate(windows[start : start + 16])
        learned = int((batch["labels"][:, 1:] >= 0).sum())
        if learned:  # a window may have a single token
            total += model(**batch).loss.item() * learned
            tokens += learned
    return math.exp(total / tokens)


@torch.no_grad()
def generate(model: PreTrainedModel, prompts: torch.Tensor, length: int) -> list[torch.Tensor]:
    """Return prompts [rows, tokens] continued by at most `length` tokens, sampled from the model's own predictions."""
    model.eval()
    found = model.generate(
        input_ids=prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=length,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
    )
    width = prompts.shape[1]
    ends = [(row[width:] == model.config.eos_token_id).nonzero() for row in found]
    return [row[: width + int(end[0, 0]) + 1] if len(end) else row for row, end in zip(found, ends, strict=True)]


@torch.no_grad()
def divergence_on_own_text(
    student: PreTrainedModel, teacher: PreTrainedModel, prompts: torch.Tensor, length: int
) -> float:
    """Return the mean KL(student || teacher), in nats, over the tokens that the student wrote."""
    sequences = generate(student, prompts, length)
    batch = collate(sequences)
    student_says, teacher_says = (
        model.eval()(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits.log_softmax(-1)
        for model in (student, teacher)
    )
    divergence = (student_says.exp() * (student_says - teacher_says)).sum(-1)
    return divergence[written(batch, prompts.shape[1])].mean().item()


def written(batch: dict[str, torch.Tensor], prompt: int) -> torch.Tensor:
    """Return which rows predict a token after the prompt, bool [sequences, length]. Row t predicts token t + 1."""
    mask = torch.zeros_like(batch["attention_mask"], dtype=torch.bool)
    mask[:, prompt - 1 : -1] = batch["attention_mask"][:, prompt:] == 1
    return mask
