"""Serves PyTorch models: a module built by a factory, a TorchScript file, or a `torch.export` program.

A model is called with one tensor per input: by keyword if all inputs have the names of its parameters, otherwise by
position, in the order of the inputs. A mistyped name must not change the order unnoticed, so names that contradict the
positions are refused. The model returns a tensor, a tuple, or a mapping of outputs, as Hugging Face's models do.
"""

from __future__ import annotations

import contextlib
import difflib
import inspect
import logging
import pickle
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.torch
import torch
from torch.utils._pytree import tree_unflatten

from edl.errors import ProtocolError, SettingsError
from edl.protocol.tensors import Array, datatype_of
from edl.quoting import did_you_mean, listed
from edl_serving.backends.backend import (
    Backend,
    BatchSizeRange,
    DescribedBackend,
    TensorSpec,
    default_output_names,
    parse_specs,
    predict_in_parts,
    read_sample,
    spec_of,
)
from edl_serving.backends.callable import call_factory
from edl_serving.backends.model_version import compute_version
from edl_serving.backends.source import ModelSource, digest, existing_file, import_target, module_of

_log = logging.getLogger(__name__)

# The channel means and standard deviations of ImageNet that torchvision's models were trained with.
_IMAGENET = "0.485,0.456,0.406/0.229,0.224,0.225"


def to_tensor(array: Array, device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return an array as a tensor that shares its memory if possible.

    A read-only or unaligned array is copied, because a model may work in place and torch cannot protect memory.
    """
    if not (array.flags.writeable and array.flags.aligned):
        # On the CPU, copy and convert in one step. For a GPU, convert there, so that fewer bytes are transferred.
        tensor = torch.tensor(array, dtype=dtype if device.type == "cpu" else None)
    else:
        tensor = torch.from_numpy(array)
    return tensor.to(device).to(dtype or tensor.dtype)


@dataclass(frozen=True)
class Normalization:
    """`(pixel / 255 - mean) / deviation` for the channels of uint8 images `[rows, channels, ...]`.

    With uint8 images, students send a quarter of the bytes that floats would take. Each pixel is multiplied by `scale`,
    and then `shift` is added; both have the shape `[channels, 1, ...]`.
    """

    scale: torch.Tensor
    shift: torch.Tensor

    @classmethod
    def parse(cls, text: str, inputs: Sequence[TensorSpec], device: torch.device) -> Normalization:
        """Parse "imagenet" or "m,m,m/s,s,s"; a single value applies to all channels."""
        means, slash, deviations = (_IMAGENET if text == "imagenet" else text).partition("/")
        try:
            mean = torch.tensor([float(value) for value in means.split(",")], dtype=torch.float64)
            deviation = torch.tensor([float(value) for value in deviations.split(",")], dtype=torch.float64)
        except ValueError:
            slash = ""
        if not slash or not (deviation > 0).all() or not mean.isfinite().all() or not deviation.isfinite().all():
            raise SettingsError(
                f"--normalize {text!r}: expected imagenet, or means/deviations as in 0.5,0.5,0.5/0.2,0.2,0.2"
            )
        channels = max(len(mean), len(deviation))
        images = [spec for spec in inputs if spec.datatype == "UINT8"]
        if not images:
            raise SettingsError(f"--normalize {text!r}: no input is UINT8")
        for spec in images:
            if (
                not spec.shape
                or (channels > 1 and spec.shape[0] != channels)
                or {len(mean), len(deviation)} - {1, channels}
            ):
                raise SettingsError(
                    f"--normalize {text!r}: {channels} channels, but input {spec.name!r} is {list(spec.shape)}"
                )
        shape = (-1, *[1] * (len(images[0].shape) - 1))
        return cls(
            scale=(1 / (255 * deviation)).float().reshape(shape).to(device),
            shift=(-mean / deviation).float().reshape(shape).to(device),
        )

    def apply(self, array: Array) -> torch.Tensor:
        return to_tensor(array, self.scale.device, torch.float32).mul_(self.scale).add_(self.shift)


# Keys under which common trainers store the weights in a larger checkpoint.
_NESTED = ("state_dict", "model_state_dict", "model")


def load_state(module: torch.nn.Module, path: Path) -> None:
    """Load weights into a module. Pickles are read with `weights_only`, so that a file cannot run code."""
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
            raise SettingsError(f"--checkpoint {str(path)!r} is not a safetensors file: {exc}") from exc
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as exc:
        raise SettingsError(
            f"--checkpoint {str(path)!r} cannot be read without running code from it, or is not a checkpoint: save "
            f"model.state_dict() ({str(exc).strip().splitlines()[0]})"
        ) from exc
    except (RuntimeError, EOFError, ValueError) as exc:
        raise SettingsError(f"--checkpoint {str(path)!r}: {exc}") from exc
    if not isinstance(state, Mapping):
        raise SettingsError(f"--checkpoint {str(path)!r} holds {type(state).__name__}, not a state_dict")
    return state


def exported_specs(
    program: torch.export.ExportedProgram, *, normalized: bool
) -> tuple[list[TensorSpec], list[TensorSpec], BatchSizeRange]:
    """Return a program's inputs (images as uint8 if `normalized`), outputs, and sizes of dimension 0, the batch."""
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
    return ins, outs, _rows(program, inputs[0][1])


def _spec(kind: str, name: str, value: Any) -> TensorSpec:
    if not isinstance(value, torch.Tensor) or value.ndim == 0:
        raise SettingsError(f"--torch-export: {kind} {name!r} is not a tensor with a batch dimension")
    shape = tuple(size if isinstance(size, int) else -1 for size in value.shape[1:])
    dtype = torch.float32 if kind == "output" and value.dtype == torch.bfloat16 else value.dtype
    try:
        return TensorSpec(name, datatype_of(torch.empty(0, dtype=dtype).numpy().dtype), shape)
    except (TypeError, ProtocolError) as exc:
        raise SettingsError(f"--torch-export: {kind} {name!r} is {dtype}, which cannot be sent") from exc


def _output_names(program: torch.export.ExportedProgram, count: int) -> list[str]:
    """Return the keys of the dictionary that the program returns, else `output`, or `output_0` and so on."""
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


_AUTOCAST = {"bfloat16": torch.bfloat16, "float16": torch.float16}


class TorchBackend(DescribedBackend):
    """A PyTorch module or function over tensors, on its device and in evaluation mode; see this file's docstring."""

    platform: str = "pytorch"

    def __init__(
        self,
        model: Callable[..., Any],
        inputs: Sequence[str | TensorSpec],
        outputs: Sequence[str | TensorSpec] = (),
        *,
        sample: Mapping[str, Array] | None = None,
        device: str | None = None,
        autocast: str | None = None,
        normalize: str | None = None,
        rows: BatchSizeRange | None = None,
    ) -> None:
        if autocast is not None and autocast not in _AUTOCAST:
            raise SettingsError(f"--autocast {autocast!r}: expected one of {', '.join(_AUTOCAST)}")
        self._model = model
        self._device = device_of(device)
        self._autocast = _AUTOCAST.get(autocast or "")
        self._rows = rows or BatchSizeRange()
        specs = parse_specs(inputs) or tuple(spec_of(name, array) for name, array in (sample or {}).items())
        for spec in specs:
            if spec.datatype == "BYTES":
                raise SettingsError(f"input {spec.name!r}: PyTorch has no tensors of BYTES")
        self._normalization = Normalization.parse(normalize, specs, self._device) if normalize else None
        self._by_keyword = _go_by_keyword([spec.name for spec in specs], _parameters(model))
        self._resolve_specs(
            specs,
            outputs,
            sample,
            "a PyTorch model does not describe its inputs: give --input name:TYPE[size,size] for each, "
            "or --sample FILE.npz",
        )

    def _run_model(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        return predict_in_parts(self._call, inputs, self._rows)

    def _call(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        cast = self._autocast
        casting = contextlib.nullcontext() if cast is None else torch.autocast(self._device.type, dtype=cast)
        with torch.inference_mode(), casting:
            tensors = {spec.name: self._tensor(spec, inputs[spec.name]) for spec in self.inputs}
            answer = self._model(**tensors) if self._by_keyword else self._model(*tensors.values())
            return {name: _to_array(tensor) for name, tensor in _named(answer)}

    def _tensor(self, spec: TensorSpec, array: Array) -> torch.Tensor:
        if self._normalization is not None and spec.datatype == "UINT8":
            return self._normalization.apply(array)
        return to_tensor(array, self._device)

    def close(self) -> None:
        del self._model
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


def device_of(name: str | None) -> torch.device:
    """Return a device by name; "auto" or None means the GPU if there is one, else the CPU."""
    if name in (None, "auto"):
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(str(name))
    except RuntimeError as exc:
        raise SettingsError(f"--device {name!r}: expected cpu, cuda, cuda:1 or auto") from exc
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise SettingsError(f"--device {name!r}: PyTorch sees {torch.cuda.device_count()} GPUs here")
    return device


def from_factory(source: ModelSource) -> Backend:
    factory = import_target(source.target, "--torch-factory")
    built = call_factory(factory, source, "--torch-factory")
    if not isinstance(built, torch.nn.Module):
        raise SettingsError(f"--torch-factory {source.target!r} returned {type(built).__name__}, not a torch.nn.Module")
    if source.checkpoint is not None:
        load_state(built, existing_file(source.checkpoint, "--checkpoint"))
    version = source.version or compute_version(source, module_of(source.target), built)
    return _backend(source, built.eval().requires_grad_(False).to(device_of(source.device)), version)


def from_torchscript(source: ModelSource) -> Backend:
    path = existing_file(source.target, "--torchscript")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # TorchScript is deprecated, but its files are in use
            model = torch.jit.load(str(path), map_location=device_of(source.device))  # type: ignore[no-untyped-call]
    except RuntimeError as exc:
        raise SettingsError(f"--torchscript {str(path)!r}: {_first_line(exc)}") from exc
    return _backend(source, model.eval(), source.version or digest([path, source.settings()]), "pytorch_torchscript")


def from_export(source: ModelSource) -> Backend:
    path = existing_file(source.target, "--torch-export")
    try:
        program = torch.export.load(str(path))
    except Exception as exc:
        raise SettingsError(f"--torch-export {str(path)!r}: {type(exc).__name__}: {_first_line(exc)}") from exc
    device = device_of(source.device)
    if device.type != "cpu":
        from torch.export.passes import move_to_device_pass

        program = move_to_device_pass(program, device)
    inputs, outputs, rows = exported_specs(program, normalized=source.normalize is not None)
    version = source.version or digest([path, source.settings()])
    specs = {"inputs": source.inputs or inputs, "outputs": source.outputs or outputs, "rows": rows}
    return _backend(source, _flat(program, [spec.name for spec in inputs]), version, "pytorch_export", **specs)


def _flat(program: torch.export.ExportedProgram, names: Sequence[str]) -> Callable[..., Any]:
    """Return a function of flat tensors that calls the program in the structure of the exported arguments."""
    module = program.module()
    structure = program.call_spec.in_spec
    assert structure is not None
    signature = inspect.Signature([inspect.Parameter(name, _BY_EITHER) for name in names])

    def call(*given: torch.Tensor, **named: torch.Tensor) -> Any:
        args, kwargs = tree_unflatten(signature.bind(*given, **named).args, structure)
        return module(*args, **kwargs)

    call.__signature__ = signature  # type: ignore[attr-defined]  # `inspect.signature` returns it
    return call


def _backend(
    source: ModelSource, model: Callable[..., Any], version: str, platform: str = "pytorch", **specs: Any
) -> TorchBackend:
    if source.threads is not None:
        torch.set_num_threads(source.threads)
    backend = TorchBackend(
        model,
        **{"inputs": source.inputs, "outputs": source.outputs, **specs},
        sample=read_sample(source.sample) if source.sample else None,
        device=source.device,
        autocast=source.autocast,
        normalize=source.normalize,
    )
    backend.version, backend.platform = version, platform
    return backend


_BY_EITHER, _REQUIRED = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.empty
_KEYWORD, _ANY_KEYWORD = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD


def _parameters(model: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the parameters of a model's `forward`, or of a function; empty if they are unknown, as in C code."""
    if isinstance(model, torch.jit.ScriptModule):
        schema: Any = getattr(model.forward, "schema", None)
        found = schema.arguments[1:] if schema else ()  # without `self`
        defaults = [None if one.has_default_value() else _REQUIRED for one in found]
        return [inspect.Parameter(one.name, _BY_EITHER, default=d) for one, d in zip(found, defaults, strict=True)]
    try:
        return [*inspect.signature(model.forward if isinstance(model, torch.nn.Module) else model).parameters.values()]
    except (ValueError, TypeError):
        return []


def _go_by_keyword(inputs: Sequence[str], parameters: Sequence[inspect.Parameter]) -> bool:
    """Return whether inputs go by keyword; if not, refuse names that do not fit their positions, and log the order."""
    more = next((one for one in parameters if one.kind is inspect.Parameter.VAR_POSITIONAL), None)
    known = {one.name: one.kind for one in parameters if one is not more and one.kind is not _ANY_KEYWORD}
    unknown = [name for name in inputs if name not in known]
    if not unknown and not any(known[name] is inspect.Parameter.POSITIONAL_ONLY for name in inputs):
        return True
    slots = [one for one in parameters if known.get(one.name, _KEYWORD) is not _KEYWORD]
    given = list(zip(inputs, [*slots, *[more] * len(inputs)], strict=False))
    for name, slot in given:
        if not _fits(name, slot, known, mixed=len(unknown) < len(inputs)):
            wrong, became = unknown[0] if unknown else name, repr(slot.name) if slot else "an extra one"
            near = (did_you_mean(wrong, known) or ".") if unknown else "; the order is wrong."
            raise SettingsError(
                f"--input {wrong!r}: the model's parameters are {listed(known)}{near} By position, {name!r} would "
                f"become {became}: give each --input the name of its parameter"
            )
    places = (f"{name!r} as {slot.name!r}" if slot else repr(name) for name, slot in given)
    _log.info("the model gets its inputs by position: %s", ", ".join(places))
    return False


def _fits(name: str, slot: inspect.Parameter | None, known: Iterable[str], *, mixed: bool) -> bool:
    """Return whether an input's name allows its position; `mixed` if the names of some inputs are parameters."""
    likeness = {n: difflib.SequenceMatcher(None, name.lower(), n.lower()).ratio() + (n == name) for n in known}
    most = max(likeness.values(), default=0.0)
    if most >= 0.8:  # 'attention_masks' counts as 'attention_mask', but 'image' not as 'image_size'
        return slot is not None and likeness.get(slot.name) == most
    return not mixed or (slot is not None and slot.default is _REQUIRED)


def _named(answer: Any) -> list[tuple[str, torch.Tensor]]:
    if isinstance(answer, torch.Tensor):
        return [*zip(default_output_names(1), [answer], strict=True)]
    if isinstance(answer, Mapping):
        return [(str(name), value) for name, value in answer.items() if isinstance(value, torch.Tensor)]
    if isinstance(answer, (tuple, list)):
        tensors = [value for value in answer if isinstance(value, torch.Tensor)]
        return [*zip(default_output_names(len(tensors)), tensors, strict=True)]
    raise TypeError(f"the model returned {type(answer).__name__}, not a tensor, tuple or mapping of tensors")


def _to_array(tensor: torch.Tensor) -> Array:
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.float()  # numpy has no bfloat16
    array: Array = np.ascontiguousarray(tensor.detach().cpu().numpy())
    return array


def _first_line(exc: BaseException) -> str:
    return (str(exc).strip().splitlines() or [type(exc).__name__])[0]
