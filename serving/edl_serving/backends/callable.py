"""Serves a Python function over numpy arrays as a model.

The function takes a dictionary of arrays, `{input name: [rows, *shape]}`, and returns a dictionary of outputs, with the
same number of rows in the same order; a single output may be returned as the bare array. The function may have these
attributes:

- `inputs`, `outputs`: tensors as strings, such as `["image:uint8[3,224,224]"]`, unless the command line specifies them;
- `version`: identifies the weights;
- `warm_up(max_rows)`, which replaces the default warm-up (two calls on zeros), and `close()`;
- `sequence_input`, `max_sequence`: see `Backend`;
- `writes_inputs = True`: the function changes its inputs, so it gets copies. Set this only if the function has its own
  `warm_up`, because the default warm-up detects such changes.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from edl.errors import ProtocolError, SettingsError
from edl.protocol.tensors import Array, array_of
from edl_serving.backends.backend import Backend, DescribedBackend, TensorSpec, UnnamedVersion, read_sample
from edl_serving.backends.model_version import compute_version
from edl_serving.backends.source import ModelSource, import_target, module_of


class CallableBackend(DescribedBackend):
    """A function over numpy arrays; the module's docstring describes the function."""

    def __init__(
        self,
        function: Callable[[Mapping[str, Array]], Any],
        inputs: Sequence[str | TensorSpec] = (),
        outputs: Sequence[str | TensorSpec] = (),
        *,
        sample: Mapping[str, Array] | None = None,
        version: str = "",
    ) -> None:
        if not callable(function):
            raise SettingsError(
                f"a model must be callable; this is a {type(function).__qualname__}: name a function or an instance "
                "with __call__, or give --factory a function that returns a callable"
            )
        self._function = function
        self.version = version or _own_version(function) or self.version
        self.writes_inputs = bool(getattr(function, "writes_inputs", False))
        self.sequence_input = getattr(function, "sequence_input", None)
        self.max_sequence = getattr(function, "max_sequence", None)
        self._resolve_specs(
            inputs or getattr(function, "inputs", ()),
            outputs or getattr(function, "outputs", ()),
            sample,
            "the model's inputs are unknown: give --input name:TYPE[size,size], --sample FILE.npz, "
            "or set the function's attribute `inputs`",
        )

    def _run_model(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        answer = self._function(inputs)
        if isinstance(answer, Mapping):
            return {str(name): self._array_of(str(name), value) for name, value in answer.items()}
        if isinstance(answer, np.ndarray):
            return {"output": self._array_of("output", answer)}
        raise TypeError(f"the function returned {type(answer).__name__}, not a dictionary of arrays or an array")

    def _array_of(self, name: str, value: Any) -> Array:
        try:
            array = array_of(value)
        except (ProtocolError, ValueError) as exc:
            raise TypeError(f"output {name!r}, a {type(value).__name__}, cannot become an array: {exc}") from exc
        if array.dtype == object and array.ndim == 0:  # what numpy makes of anything that is not an array
            example = f"return {{{name!r}: inputs[{self.inputs[0].name!r}]}}"
            raise TypeError(f"output {name!r} is a {type(value).__name__}, not an array: write, for example, {example}")
        return array

    def warm_up(self, max_rows: int) -> None:
        own = getattr(self._function, "warm_up", None)
        if own is not None:
            own(max_rows)
        else:
            super().warm_up(max_rows)

    def close(self) -> None:
        close = getattr(self._function, "close", None)
        if close is not None:
            close()


def from_function(source: ModelSource) -> Backend:
    function = import_target(source.target, "--callable")
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(function, torch.nn.Module):
        raise SettingsError(
            f"--callable {source.target!r} is a PyTorch module, not a function of arrays: give --torch-factory a "
            "function that returns it"
        )
    return _backend(source, function)


def from_factory(source: ModelSource) -> Backend:
    """Call the user's `--factory` with its options. The factory returns a `Backend` or a function to serve."""
    factory = import_target(source.target, "--factory")
    if not callable(factory):
        raise SettingsError(f"--factory {source.target!r}: {type(factory).__name__} cannot be called")
    built = call_factory(factory, source, "--factory")
    if not isinstance(built, Backend):
        return _backend(source, built)
    for name, given in (("input", source.inputs), ("output", source.outputs), ("sample", source.sample)):
        if given:
            raise SettingsError(f"--{name} does not apply to a factory that returns a Backend")
    if isinstance(built.version, UnnamedVersion):
        built.version = source.version or compute_version(source, module_of(source.target), built)
    elif source.version:
        raise SettingsError("--model-version does not apply to a factory that returns a Backend with a version")
    return built


def call_factory(factory: Callable[..., Any], source: ModelSource, flag: str) -> Any:
    try:
        inspect.signature(factory).bind(**source.options)
    except TypeError as exc:
        raise SettingsError(f"{flag} {source.target!r} does not take these options: {exc}") from exc
    except ValueError:
        pass  # functions written in C may have no signature
    return factory(**source.options)


def _backend(source: ModelSource, function: Any) -> Backend:
    version = source.version or _own_version(function) or compute_version(source, module_of(source.target), function)
    sample = read_sample(source.sample) if source.sample else None
    backend = CallableBackend(function, source.inputs, source.outputs, sample=sample)
    backend.version = version
    return backend


def _own_version(function: Any) -> str:
    return str(getattr(function, "version", "") or "")
