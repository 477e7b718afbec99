"""Tiny random models of transformers, made on the spot, whose logits are spread as a trained model's are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

VOCABULARY = 97
_SIZES = {"vocab_size": VOCABULARY, "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 32}
_TEXT = {**_SIZES, "intermediate_size": 48, "pad_token_id": 0, "max_position_embeddings": 64}
_LLAMA = {**_TEXT, "num_key_value_heads": 1}
_SOFTCAP = {"head_dim": 16, "final_logit_softcapping": 5.0, "sliding_window": 8}
_LONG = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0, 2.0, 4.0, 8.0, 8.0, 8.0, 8.0, 8.0]}
_PHI3 = {"rope_theta": 10000.0, "original_max_position_embeddings": 16, **_LONG}
_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
_GPT2 = {"vocab_size": VOCABULARY, "n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 48}
_MAMBA = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}

CHECKPOINTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("Llama", "CausalLM", _LLAMA),
    "gemma2": ("Gemma2", "CausalLM", {**_LLAMA, **_SOFTCAP}),  # changes logits behind its head
    # Has other rotary frequencies in calls of more than 16 tokens.
    "phi3": ("Phi3", "CausalLM", {**_LLAMA, "original_max_position_embeddings": 16, "rope_parameters": _PHI3}),
    # Has rotary frequencies that grow with the longest call so far, beyond 64 tokens.
    "dynamic": ("Llama", "CausalLM", {**_LLAMA, "rope_parameters": _DYNAMIC}),
    "big_bird": ("BigBird", "MaskedLM", _TEXT),
    "gpt2": ("GPT2", "LMHeadModel", _GPT2),
    "bert": ("Bert", "MaskedLM", _TEXT),
    "roberta": ("Roberta", "MaskedLM", {**_TEXT, "pad_token_id": 1}),
    "classifier": ("Bert", "SequenceClassification", {**_TEXT, "num_labels": 3}),
    # Has no token for padding.
    "llama_classifier": ("Llama", "SequenceClassification", {**_LLAMA, "pad_token_id": None, "num_labels": 4}),
    "mamba": ("Mamba", "CausalLM", _MAMBA),  # has a state, which packed sequences would hand on
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Of torch: for models of this size, more of them wait for one another wherever something else has the cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a model of `CHECKPOINTS`."""
    made: dict[str, Path] = {}

    def find(name: str) -> Path:
        if name not in made:
            folder = made[name] = tmp_path_factory.mktemp(name)
            family, task, fields = CHECKPOINTS[name]
            torch.manual_seed(7)
            kind = f"{family}{task}" if task == "LMHeadModel" else f"{family}For{task}"
            model = getattr(transformers, kind)(getattr(transformers, f"{family}Config")(**fields))
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.ndim == 2:
                        parameter.normal_(0, 0.3)
            model.save_pretrained(folder)
        return made[name]

    return find
