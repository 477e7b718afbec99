"""`edl serve --hf`: the backend for a folder and a task."""

from __future__ import annotations

import torch

from edl.errors import SettingsError
from edl_serving.backends.backend import Backend
from edl_serving.backends.hf import loading
from edl_serving.backends.hf.encoder import FeatureBackend, SequenceClassifierBackend
from edl_serving.backends.hf.language_model import LanguageModelBackend
from edl_serving.backends.hf.transformers_backend import LoadedModel
from edl_serving.backends.source import DEFAULT_MAX_TOKENS, ModelSource
from edl_serving.backends.torch import device_of

__all__ = ["from_folder"]

_TOP_K = 64
"""A token then takes 516 bytes; the mass of what is left out is known all the same."""


def from_folder(source: ModelSource) -> Backend:
    """Load `--hf`.

    Raises:
        SettingsError: a setting is wrong, or the folder has no model that can be served so.
    """
    task = source.task or ""
    if task not in loading.TASKS:
        raise SettingsError(f"--hf needs --task, one of {', '.join(loading.TASKS)}; got {task or 'none'}")
    language = task in ("causal-lm", "masked-lm")
    if source.top_k is not None and not language:
        raise SettingsError(f"--top-k means nothing to --task {task}: students ask for parts of outputs themselves")
    if source.packing and task != "causal-lm":
        raise SettingsError("--packing is for --task causal-lm")
    if source.threads is not None:
        torch.set_num_threads(source.threads)
    model = loading.load_model(source, task, device_of(source.device))
    max_tokens = source.max_tokens or DEFAULT_MAX_TOKENS
    loaded = LoadedModel(
        model,
        loading.version_of(source, task, model),
        loading.instance_meta(source),
        max_tokens,
        loading.longest_sequence(source, model, max_tokens),
        loading.padding_id(model),
    )
    if language:
        causal = task == "causal-lm"
        return LanguageModelBackend(loaded, source.top_k or _TOP_K, causal=causal, packing=source.packing)
    return FeatureBackend(loaded) if task == "feature-extraction" else SequenceClassifierBackend(loaded)
