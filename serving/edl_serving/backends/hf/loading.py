"""Loads a complete transformers checkpoint from a folder of safetensors files, without running code from it."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError

from edl.errors import SettingsError
from edl.protocol import names
from edl.tokenizer_hash import hash_tokenizer
from edl_serving.backends.backend import Backend
from edl_serving.backends.hf.backends import (
    FeatureBackend,
    LanguageModelBackend,
    LoadedModel,
    SequenceClassifierBackend,
)
from edl_serving.backends.source import DEFAULT_MAX_TOKENS, ModelSource, digest
from edl_serving.backends.torch import device_of

_log = logging.getLogger(__name__)

TASKS = {
    "causal-lm": "AutoModelForCausalLM",
    "masked-lm": "AutoModelForMaskedLM",
    "feature-extraction": "AutoModel",
    "sequence-classification": "AutoModelForSequenceClassification",
}
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_NO_LENGTH = 10**7
"""If a tokenizer's `model_max_length` is at least this, its limit is unknown; transformers writes 1e30 in this case."""


def load_model(source: ModelSource, task: str, device: torch.device) -> Any:
    folder = _existing_folder(source.target)
    dtype = source.dtype or "auto"
    if dtype != "auto" and dtype not in _DTYPES:
        raise SettingsError(f"--dtype {dtype!r}: expected auto, {', '.join(_DTYPES)}")
    progress: Any = transformers.utils.logging
    progress.disable_progress_bar()  # it would write thousands of lines into a log file
    loader: Any = getattr(transformers, TASKS[task])
    try:
        model, info = loader.from_pretrained(
            folder,
            dtype=_DTYPES.get(dtype, "auto"),
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as exc:
        first = (str(exc).strip().splitlines() or [type(exc).__name__])[0]
        raise SettingsError(f"--hf {str(folder)!r} as {task}: {type(exc).__name__}: {first}") from exc
    missing = sorted(name for name in info["missing_keys"] if not (task == "feature-extraction" and "pooler" in name))
    if missing:
        raise SettingsError(
            f"--hf {str(folder)!r}: the checkpoint lacks {missing[0]} (missing weights: {len(missing)}), so "
            f"the outputs would be random: is the model for a --task other than {task}?"
        )
    for config in (model.config, model.config.get_text_config()):  # multimodal models configure text separately
        config.use_cache = False  # saves the keys and values of all layers, which only generation needs
    return model.eval().requires_grad_(False).to(device)


def _existing_folder(path: str) -> Path:
    folder = Path(path).expanduser()
    if not (folder / "config.json").is_file():
        raise SettingsError(
            f"--hf {path!r}: no folder with a config.json (in {Path.cwd()}); EDL downloads nothing: "
            "run `hf download NAME --local-dir FOLDER`"
        )
    if not _weights(folder):
        raise SettingsError(
            f"--hf {str(folder)!r} has no .safetensors file, and other formats may run code when they are loaded: "
            "save the model with model.save_pretrained(FOLDER)"
        )
    return folder


def _weights(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def _tokenizer_meta(folder: Path) -> dict[str, str]:
    """Return the tokenizer's hash, which students compare with their own; empty if the folder has no tokenizer."""
    try:
        return {names.TOKENIZER_META: hash_tokenizer(folder)}
    except SettingsError as exc:
        _log.warning("students cannot compare tokenizers with this teacher: %s", exc)
        return {}


def longest_sequence(folder: Path, model: Any, max_tokens: int) -> int:
    """Return the largest sequence length that configuration, tokenizer and `max_tokens` all allow."""
    limits = [max_tokens]
    config = model.config.get_text_config()
    embeddings = getattr(getattr(model.base_model, "embeddings", None), "position_embeddings", None)
    padding = getattr(embeddings, "padding_idx", None)
    taken = padding + 1 if isinstance(padding, int) else 0  # RoBERTa's positions start after the padding id
    for name in ("max_position_embeddings", "n_positions"):
        value = getattr(config, name, None)
        if isinstance(value, int) and value > taken:
            limits.append(value - taken)
    path = folder / "tokenizer_config.json"
    if path.is_file():
        try:
            value = json.loads(path.read_text()).get("model_max_length")
        except (OSError, ValueError) as exc:
            raise SettingsError(f"{path} cannot be read: {exc}") from exc
        if isinstance(value, int | float) and 0 < value < _NO_LENGTH:
            limits.append(int(value))
    return min(limits)


_TOP_K = 64
"""Default k. A token then takes 516 bytes, and the tail still holds the probability of the remaining tokens."""


def from_folder(source: ModelSource) -> Backend:
    task = source.task or ""
    if task not in TASKS:
        raise SettingsError(f"--hf needs --task, one of {', '.join(TASKS)}; got {task or 'none'}")
    language = task in ("causal-lm", "masked-lm")
    if source.top_k is not None and not language:
        raise SettingsError(f"--top-k does not apply to --task {task}: students ask for parts of outputs themselves")
    if source.packing and task != "causal-lm":
        raise SettingsError("--packing applies only to --task causal-lm")
    if source.threads is not None:
        torch.set_num_threads(source.threads)
    model = load_model(source, task, device_of(source.device))
    folder = Path(source.target).expanduser()
    max_tokens = source.max_tokens or DEFAULT_MAX_TOKENS
    kind = repr(("hf", task, str(model.dtype))).encode()
    version = source.version or digest([kind, folder / "config.json", *_weights(folder)])
    longest = longest_sequence(folder, model, max_tokens)
    loaded = LoadedModel(model, version, _tokenizer_meta(folder), max_tokens, longest)
    if language:
        causal = task == "causal-lm"
        return LanguageModelBackend(loaded, source.top_k or _TOP_K, causal=causal, packing=source.packing)
    return FeatureBackend(loaded) if task == "feature-extraction" else SequenceClassifierBackend(loaded)
