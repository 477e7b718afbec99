"""PyTorch's files: weights for a module, and the specs in an exported program."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch

from edl.errors import ProtocolError, SettingsError
from edl.protocol.tensors import datatype_of
from edl_serving.backends.backend import TensorSpec
from edl_serving.backends.fixed_batch import BatchSizeRange
from edl_serving.backends.specs import default_output_names

__all__ = ["ExportedSpecs", "exported_specs", "load_state"]

# Where common trainers put the weights in a checkpoint that holds more than them.
_NESTED = ("state_dict", "model_state_dict", "model")


def load_state(module: torch.nn.Module, path: Path) -> None:
    """Load weights into a module. Files cannot run code: pickles are read with `weights_only`.

    Args:
        module: to load into.
        path: a state_dict, alone or in a common trainer's checkpoint, or a safetensors file.

    Raises:
        SettingsError: the file is something else, or does not fit the module.
    """
    state = _read(path)
    for key in _NESTED:
        if isinstance(state.get(key), Mapping):
            state = state[key]
            break
    state = dict(state)
    if state and all(name.startswith("module.") for name in state):  # saved from within DistributedDataParallel
        state = {name.removeprefix("module."): value for name, value in state.items()}
    try:
        module.load_state_dict(state)
    except (RuntimeError, TypeError, AttributeError) as exc:
        raise SettingsError(f"--checkpoint {str(path)!r} does not fit the model: {exc}") from exc


def _read(path: Path) -> Mapping[str, Any]:
    if path.suffix == ".safetensors":
        try:
            return safetensors.torch.load_file(path)
        except safetensors.SafetensorError as exc:
            raise SettingsError(f"--checkpoint {str(path)!r} is no safetensors file: {exc}") from exc
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as exc:
        raise SettingsError(
            f"--checkpoint {str(path)!r} cannot be read without running code from it, or is no checkpoint: save "
            f"model.state_dict() ({str(exc).strip().splitlines()[0]})"
        ) from exc
    except (RuntimeError, EOFError, ValueError) as exc:
        raise SettingsError(f"--checkpoint {str(path)!r}: {exc}") from exc
    if not isinstance(state, Mapping):
        raise SettingsError(f"--checkpoint {str(path)!r} holds {type(state).__name__}, not a state_dict")
    return state


@dataclass(frozen=True)
class ExportedSpecs:
    """Inputs, outputs and batch sizes of an exported program.

    Attributes:
        inputs: in the program's order.
        outputs: in the program's order.
        rows: the batch sizes that it accepts.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    rows: BatchSizeRange


def exported_specs(program: torch.export.ExportedProgram, *, normalized: bool) -> ExportedSpecs:
    """Read the specs of an exported program. Its dimension 0 is the batch, symbolic or fixed.

    Args:
        program: as `torch.export.load` returns it.
        normalized: the four-dimensional float inputs are fed from uint8.

    Raises:
        SettingsError: an input or output is no tensor with a batch dimension.
    """
    values = {node.name: node.meta.get("val") for node in program.graph.nodes}
    signature = program.graph_signature
    inputs = [(str(name), values.get(str(name))) for name in signature.user_inputs]
    outputs = [values.get(str(name)) for name in signature.user_outputs]
    names = _output_names(program, len(outputs))
    ins = [_spec("input", name, value) for name, value in inputs]
    if normalized:
        ins = [
            TensorSpec(s.name, "UINT8" if len(s.shape) == 3 and s.datatype == "FP32" else s.datatype, s.shape)
            for s in ins
        ]
    outs = [_spec("output", name, value) for name, value in zip(names, outputs, strict=True)]
    return ExportedSpecs(tuple(ins), tuple(outs), _rows(program, inputs[0][1]))


def _spec(kind: str, name: str, value: Any) -> TensorSpec:
    if not isinstance(value, torch.Tensor) or value.ndim == 0:
        raise SettingsError(f"--torch-export: {kind} {name!r} is no tensor with a batch dimension")
    shape = tuple(size if isinstance(size, int) else -1 for size in value.shape[1:])
    dtype = torch.float32 if kind == "output" and value.dtype == torch.bfloat16 else value.dtype
    try:
        return TensorSpec(name, datatype_of(torch.empty(0, dtype=dtype).numpy().dtype), shape)
    except (TypeError, ProtocolError) as exc:
        raise SettingsError(f"--torch-export: {kind} {name!r} is {dtype}, which cannot travel") from exc


def _output_names(program: torch.export.ExportedProgram, count: int) -> list[str]:
    """Return the keys of a returned dictionary, else `output`, or `output_0` and so on."""
    spec = program.call_spec.out_spec
    keys = getattr(spec, "context", None)
    if spec is not None and spec.type is dict and isinstance(keys, list) and len(keys) == count:
        return [str(key) for key in keys]
    return default_output_names(count)


def _rows(program: torch.export.ExportedProgram, first: Any) -> BatchSizeRange:
    size = first.shape[0]
    if isinstance(size, int):
        return BatchSizeRange(size, size)
    for symbol, bounds in program.range_constraints.items():
        if str(symbol) == str(size):
            return BatchSizeRange(max(1, int(bounds.lower)), int(bounds.upper) if bounds.upper.is_Integer else None)
    return BatchSizeRange()
