"""Loaders for the models that the teacher server can serve, found by name and imported when used.

Each module turns one family of models into a `Backend`. All but `hf`, whose inputs are token ids, pass one conformance
suite. To serve another family of models, write a `--factory` that returns your own `Backend`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

from edl.errors import SettingsError
from edl_serving.backends.backend import Backend
from edl_serving.backends.source import ModelSource

__all__ = ["MODEL_LOADERS", "ModelSource", "open_backends"]
_PACKAGES = {
    "torch": ("PyTorch", "torch"),
    "paddle": ("PaddlePaddle", "paddlepaddle"),
    "transformers": ("transformers", "'elastic-distill[hf]'"),
}
_ANY_MODEL = frozenset({"inputs", "outputs", "sample", "version"})
_TORCH = _ANY_MODEL | {"device", "threads", "autocast", "normalize"}


MODEL_LOADERS = {
    "callable": ("callable:from_function", _ANY_MODEL),
    "factory": ("callable:from_factory", _ANY_MODEL | {"options"}),
    "torch-factory": ("torch:from_factory", _TORCH | {"options", "checkpoint"}),
    "torchscript": ("torch:from_torchscript", _TORCH),
    "torch-export": ("torch:from_export", _TORCH),
    "hf": (
        "hf.loading:from_folder",
        {"task", "top_k", "max_tokens", "dtype", "packing", "device", "threads", "version"},
    ),
    "paddle": ("paddle:PaddleBackend", _ANY_MODEL | {"device", "threads"}),
}
"""For each flag, the function in this package that turns a `ModelSource` into a `Backend`, and the fields it uses."""


def open_backends(source: ModelSource) -> list[Backend]:
    """Load the model that `source` describes, once per device; the caller must close the backends.

    Raises `SettingsError`, whose message names the flag, and any exception that the user's code raises while it builds
    the model.
    """
    loader, takes = MODEL_LOADERS[source.kind]
    for field in fields(source):
        given = getattr(source, field.name) not in (None, (), {}, False)
        if given and field.name not in takes | {"kind", "target"}:
            flags = {"inputs": "input", "outputs": "output", "options": "option", "version": "model-version"}
            flag = flags.get(field.name, field.name.replace("_", "-"))
            raise SettingsError(f"--{flag} does not apply to --{source.kind}")
    load = _import_loader(loader)
    devices: list[Any] = [device.strip() for device in source.device.split(",")] if source.device else [None]
    backends: list[Backend] = []
    try:
        backends += (load(replace(source, device=device)) for device in devices)
    except BaseException:
        for backend in backends:
            backend.close()
        raise
    return backends


def _import_loader(name: str) -> Callable[[ModelSource], Backend]:
    module, _, function = name.partition(":")
    try:
        found: Callable[[ModelSource], Backend] = getattr(importlib.import_module(f"{__name__}.{module}"), function)
    except ModuleNotFoundError as exc:
        missing = (exc.name or "").partition(".")[0]
        if missing not in _PACKAGES:
            raise
        framework, package = _PACKAGES[missing]
        raise SettingsError(f"{framework} is not installed: pip install {package}") from exc
    return found
