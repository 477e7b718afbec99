"""Tiny random models of transformers whose logits are spread as a trained model's are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

VOCABULARY = 97
_SIZES = {"vocab_size": VOCABULARY, "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 32}
_TEXT = {**_SIZES, "intermediate_size": 48, "pad_token_id": 0, "max_position_embeddings": 64}


def _random(kind: str, config: Any) -> Any:
    torch.manual_seed(7)
    model = getattr(transformers, kind)(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, 0.3)
    return model


def llama() -> Any:
    return _random("LlamaForCausalLM", transformers.LlamaConfig(**_TEXT, num_key_value_heads=1))


def gemma2() -> Any:
    """Changes logits behind its head."""
    config = transformers.Gemma2Config(
        **_TEXT, num_key_value_heads=1, head_dim=16, final_logit_softcapping=5.0, sliding_window=8
    )
    return _random("Gemma2ForCausalLM", config)


def phi3() -> Any:
    """Has other rotary frequencies in calls of more than 16 tokens."""
    long = [1.0, 2.0, 4.0, 8.0, 8.0, 8.0, 8.0, 8.0]
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 8, "long_factor": long}
    config = transformers.Phi3Config(
        **_TEXT,
        num_key_value_heads=1,
        original_max_position_embeddings=16,
        rope_parameters={**rope, "original_max_position_embeddings": 16},
    )
    return _random("Phi3ForCausalLM", config)


def dynamic() -> Any:
    """Has rotary frequencies that grow with the longest call so far, beyond 64 tokens."""
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    return _random("LlamaForCausalLM", transformers.LlamaConfig(**_TEXT, num_key_value_heads=1, rope_parameters=rope))


def big_bird() -> Any:
    return _random("BigBirdForMaskedLM", transformers.BigBirdConfig(**_TEXT))


def gpt2() -> Any:
    config = transformers.GPT2Config(vocab_size=VOCABULARY, n_layer=2, n_head=2, n_embd=32, n_positions=48)
    return _random("GPT2LMHeadModel", config)


def bert() -> Any:
    return _random("BertForMaskedLM", transformers.BertConfig(**_TEXT))


def roberta() -> Any:
    return _random("RobertaForMaskedLM", transformers.RobertaConfig(**{**_TEXT, "pad_token_id": 1}))


def classifier() -> Any:
    return _random("BertForSequenceClassification", transformers.BertConfig(**_TEXT, num_labels=3))


def llama_classifier() -> Any:
    """Has no token for padding."""
    sizes = {**_TEXT, "pad_token_id": None}
    config = transformers.LlamaConfig(**sizes, num_key_value_heads=1, num_labels=4)
    return _random("LlamaForSequenceClassification", config)


def mamba() -> Any:
    """Has a state, which packed sequences would hand on."""
    config = transformers.MambaConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, state_size=4)
    return _random("MambaForCausalLM", config)


MAKERS: dict[str, Callable[[], Any]] = {
    "llama": llama,
    "gemma2": gemma2,
    "phi3": phi3,
    "dynamic": dynamic,
    "big_bird": big_bird,
    "gpt2": gpt2,
    "bert": bert,
    "roberta": roberta,
    "classifier": classifier,
    "llama_classifier": llama_classifier,
    "mamba": mamba,
}
