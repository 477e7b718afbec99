"""The version of a model that Python code makes, where the user names none: a hash of its weights and code.

Hashed are

- the weights: parameters, buffers and attributes of a PyTorch module, or what a function's closure and defaults hold;
- the source of the user's modules: the module that is named, and those that it imports;
- which functions of that source are used, with the closures and defaults of methods as of functions;
- the arrays, numbers and text in the globals of those modules.

A version that stays the same although the model has changed would let students reuse labels of the old model. So where
a model holds anything else (an object, a container that is filled later, code without source), its version is unknown
until `--model-version` names it. Not seen, and for `--model-version` as well: files and environment variables that a
function reads when it is called, and the versions of installed libraries.

`user_modules` finds the modules, `content_hash` hashes values. What does not belong here: versions of files that hold a
whole model, which are the hashes of these files.
"""

from __future__ import annotations

import logging
import types
from typing import Any

from edl_serving.backends.model_version.content_hash import ContentHash
from edl_serving.backends.model_version.user_modules import UnknownStateError, UserModules
from edl_serving.backends.source import ModelSource, WeightsVersion

__all__ = ["compute_version"]

_log = logging.getLogger(__name__)


def compute_version(source: ModelSource, module: types.ModuleType, model: Any) -> str:
    """Hash the model that the user's code has made.

    Args:
        source: where the model comes from; its options are part of the version.
        module: the module that `source` names.
        model: a function over arrays or a PyTorch module, with its weights loaded.

    Returns:
        16 hexadecimal digits; empty, with a warning in the log that says why, if the model holds what cannot be hashed.
    """
    modules = UserModules(module)
    content = ContentHash(modules)
    try:
        content.add("the function's name", source.target.rpartition(":")[2])
        content.update(source.settings())
        modules.queue(module)
        content.add("the model", model)
        for found in modules.drain():
            content.update(modules.read_source(found))
            content.add_globals(found)
    except Exception as exc:  # noqa: BLE001 - objects of the user's may raise anything when they are looked at
        reason = str(exc) if isinstance(exc, UnknownStateError) else f"{type(exc).__name__}: {exc}"
        _log.warning(
            "the version of the model is unknown: %s. Students keep no labels of it in caches: name the version by "
            "--model-version, and another one with each change",
            reason,
        )
        return ""
    return WeightsVersion(content.digest())
