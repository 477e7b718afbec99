"""Models that the teacher server can serve: their loaders, found by name and imported when used.

A module here turns a family of models into a `Backend`: `callable` Python functions over numpy arrays, `torch` PyTorch
in three formats, `paddle` inference models of PaddlePaddle, `hf` models of transformers. All but `hf`, whose inputs are
token ids, pass one conformance suite. `model_version` computes the version of a model that Python code makes.

What does not belong here: batching, requests, sockets. A backend sees arrays and gives arrays.
A model of another family needs no change here: a `--factory` may return a `Backend` of its own.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

from edl.errors import SettingsError
from edl_serving.backends.backend import Backend
from edl_serving.backends.source import ModelSource

__all__ = ["MODEL_LOADERS", "ModelLoader", "ModelSource", "open_backends"]

_PACKAGES = {
    "torch": ("PyTorch", "torch"),
    "paddle": ("PaddlePaddle", "paddlepaddle"),
    "transformers": ("transformers", "'elastic-distill[hf]'"),
}
_ANY_MODEL = frozenset({"inputs", "outputs", "sample", "version"})
_TORCH = _ANY_MODEL | {"device", "threads", "autocast", "normalize"}


@dataclass(frozen=True)
class ModelLoader:
    """A loader of models of a kind.

    Attributes:
        loader: `module:function`; the function makes a `Backend` of a `ModelSource`.
        takes: the fields of `ModelSource` that mean something to it.
    """

    loader: str
    takes: frozenset[str]

    def load(self) -> Callable[[ModelSource], Backend]:
        """Import the loader's function.

        Raises:
            SettingsError: what it needs is not installed; names the package.
        """
        name, _, function = self.loader.partition(":")
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as exc:
            missing = (exc.name or "").partition(".")[0]
            if missing not in _PACKAGES:
                raise
            framework, package = _PACKAGES[missing]
            raise SettingsError(f"{framework} is not installed: pip install {package}") from exc
        loader: Callable[[ModelSource], Backend] = getattr(module, function)
        return loader


MODEL_LOADERS = {
    "callable": ModelLoader("edl_serving.backends.callable:from_function", _ANY_MODEL),
    "factory": ModelLoader("edl_serving.backends.callable:from_factory", _ANY_MODEL | {"options"}),
    "torch-factory": ModelLoader("edl_serving.backends.torch:from_factory", _TORCH | {"options", "checkpoint"}),
    "torchscript": ModelLoader("edl_serving.backends.torch:from_torchscript", _TORCH),
    "torch-export": ModelLoader("edl_serving.backends.torch:from_export", _TORCH),
    "hf": ModelLoader(
        "edl_serving.backends.hf.factory:from_folder",
        frozenset({"task", "top_k", "max_tokens", "dtype", "packing", "device", "threads", "version"}),
    ),
    "paddle": ModelLoader("edl_serving.backends.paddle:from_inference_model", _ANY_MODEL | {"device", "threads"}),
}


def open_backends(source: ModelSource) -> list[Backend]:
    """Load the model that `source` names, an instance for every device that it names.

    Args:
        source: the model.

    Returns:
        The instances, at least one; the caller closes them.

    Raises:
        SettingsError: a field of the source cannot be used; names the flag.
        Exception: what the user's own code raised while it built the model.
    """
    kind = MODEL_LOADERS[source.kind]
    for field in fields(source):
        given = getattr(source, field.name) not in (None, (), {}, False)
        if given and field.name not in kind.takes | {"kind", "target"}:
            flags = {"inputs": "input", "outputs": "output", "options": "option", "version": "model-version"}
            flag = flags.get(field.name, field.name.replace("_", "-"))
            raise SettingsError(f"--{flag} means nothing to --{source.kind}")
    load = kind.load()
    devices: list[Any] = [device.strip() for device in source.device.split(",")] if source.device else [None]
    backends: list[Backend] = []
    try:
        backends += (load(replace(source, device=device)) for device in devices)
    except BaseException:
        for backend in backends:
            backend.close()
        raise
    return backends
