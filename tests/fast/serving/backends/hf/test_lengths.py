"""Labels depend on neither the batch nor earlier calls, where a model changes with the length of a call."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edl.errors import SettingsError
from tests.fast.serving.backends.hf.checkpoints import VOCABULARY
from tests.fast.serving.backends.hf.test_oracle import assert_agrees, load, oracle, tokens

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

Folder = Callable[[str], Path]
LENGTHS = (15, 17, 16, 20, 3, 30, 14, 64)
"""On both sides of 16 tokens, similar ones among them."""


@pytest.mark.parametrize(("name", "packing"), [("phi3", False), ("phi3", True), ("dynamic", True)])
def test_neighbours_change_nothing(checkpoint: Folder, name: str, packing: bool) -> None:
    backend = load(checkpoint(name), "causal-lm", packing=packing)
    for lengths in (LENGTHS, (12,), (64, 64), (12, 13)):
        inputs = tokens(lengths)
        logits = oracle(checkpoint(name), "AutoModelForCausalLM", inputs)
        assert_agrees(backend.predict_top_k(inputs, 8, 1.0), logits, 8)


def test_padding_without_embedding(checkpoint: Folder, tmp_path: Path) -> None:
    """A token for padding was added to the tokenizer, and the model has no place for it: nobody may look it up."""
    folder = shutil.copytree(checkpoint("gpt2"), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "pad_token_id": VOCABULARY}))
    inputs = tokens((5, 7, 6))
    answer = load(folder, "causal-lm").predict_top_k(inputs, 8, 1.0)
    assert_agrees(answer, oracle(folder, "AutoModelForCausalLM", inputs), 8)


def test_dynamic_frequencies_have_an_end(checkpoint: Folder) -> None:
    backend = load(checkpoint("dynamic"), "causal-lm")
    assert backend.max_sequence == 64
    with pytest.raises(SettingsError, match=r"depend on earlier calls beyond 64 tokens .*--max-tokens 64"):
        type(backend)(replace(backend._loaded, longest=65), 8, causal=True, packing=False)


def test_attention_that_switches_is_refused(checkpoint: Folder) -> None:
    with pytest.raises(SettingsError, match=r"BigBirdForMaskedLM .*original_full"):
        load(checkpoint("big_bird"), "masked-lm")


def test_other_dependence_is_found_out(checkpoint: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the configuration says nothing, and the loaded model does so all the same."""
    model: Any = load(checkpoint("phi3"), "causal-lm")
    config = model._model.config
    monkeypatch.setitem(config.rope_parameters, "rope_type", "unheard-of")
    with pytest.raises(SettingsError, match=r"Phi3ForCausalLM .* change with the length of others"):
        type(model)(model._loaded, 8, causal=True, packing=False)
