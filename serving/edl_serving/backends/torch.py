"""PyTorch models: a module built by a factory, a TorchScript file, a `torch.export` program.

A model takes a tensor for an input: by keyword if the inputs bear the names of its parameters, by position in the order
of the inputs otherwise. It returns a tensor, a tuple, or a mapping (as Hugging Face's models do) of outputs.
"""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_unflatten

from edl.errors import SettingsError
from edl_serving.backends.backend import Array, Backend, TensorSpec
from edl_serving.backends.callable import call_factory
from edl_serving.backends.described import DescribedBackend
from edl_serving.backends.fixed_batch import BatchSizeRange, predict_in_parts
from edl_serving.backends.model_version import compute_version
from edl_serving.backends.source import ModelSource, digest, existing_file
from edl_serving.backends.specs import default_output_names, parse_specs, read_sample, spec_of
from edl_serving.backends.target import import_target, module_of
from edl_serving.backends.torch_files import exported_specs, load_state
from edl_serving.backends.torch_input import Normalization, to_tensor

__all__ = ["TorchBackend", "from_export", "from_factory", "from_torchscript"]

_AUTOCAST = {"bfloat16": torch.bfloat16, "float16": torch.float16}


class TorchBackend(DescribedBackend):
    """A PyTorch module or function over tensors; see the module's text.

    Args:
        model: called under `torch.inference_mode`, with tensors on `device`, where it must be, in evaluation mode.
        inputs: tensors as text or `TensorSpec`.
        outputs: likewise, or names alone, in the order in which the model returns them. Types and shapes that are not
            given are found out by calling the model, as are all outputs if none is given.
        sample: a batch of the inputs, to call it with instead of zeros; says the inputs too.
        device: "cpu", "cuda", "cuda:1", "auto".
        autocast: "bfloat16" or "float16".
        normalize: for uint8 inputs, as `Normalization.parse` takes it.
        version: of the weights.
        platform: as `ModelMetadata` calls it.
        rows: the batch sizes that the model accepts.

    Raises:
        SettingsError: an argument cannot be used.
        Exception: what the model raised when it was called to find its outputs.
    """

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
        version: str = "",
        platform: str = "pytorch",
        rows: BatchSizeRange | None = None,
    ) -> None:
        super().__init__(version, platform)
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
        self._by_keyword = _parameters(model).issuperset(spec.name for spec in specs)
        self._resolve_specs(
            specs,
            outputs,
            sample,
            "a PyTorch model does not say what its inputs are: give --input name:TYPE[size,size] for each, "
            "or --sample FILE.npz",
        )

    def _run_model(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        return predict_in_parts(self._call, inputs, self._rows)

    def _call(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        with torch.inference_mode(), self._casting():
            tensors = {spec.name: self._tensor(spec, inputs[spec.name]) for spec in self._inputs}
            answer = self._model(**tensors) if self._by_keyword else self._model(*tensors.values())
            return {name: _to_array(tensor) for name, tensor in _named(answer)}

    def _tensor(self, spec: TensorSpec, array: Array) -> torch.Tensor:
        if self._normalization is not None and spec.datatype == "UINT8":
            return self._normalization.apply(array)
        return to_tensor(array, self._device)

    @contextlib.contextmanager
    def _casting(self) -> Iterator[None]:
        if self._autocast is None:
            yield
            return
        with torch.autocast(self._device.type, dtype=self._autocast):
            yield

    def close(self) -> None:
        """Release the model and cached memory of the GPU."""
        self._model = _closed
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


def device_of(name: str | None) -> torch.device:
    """Return a device by name.

    Args:
        name: None and "auto" are the first GPU if there is one.

    Raises:
        SettingsError: no such device.
    """
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
    """Load `--torch-factory`, with `--checkpoint` or weights that the factory loads."""
    factory = import_target(source.target, "--torch-factory")
    built = call_factory(factory, source, "--torch-factory")
    if not isinstance(built, torch.nn.Module):
        raise SettingsError(f"--torch-factory {source.target!r} returned {type(built).__name__}, not a torch.nn.Module")
    if source.checkpoint is not None:
        load_state(built, existing_file(source.checkpoint, "--checkpoint"))
    computed = source.version or compute_version(source, module_of(source.target), built)
    device = device_of(source.device)
    backend = _backend(source, built.eval().requires_grad_(False).to(device), source.version or "")
    backend.version_if_unnamed = computed
    return backend


def from_torchscript(source: ModelSource) -> Backend:
    """Load `--torchscript`."""
    path = existing_file(source.target, "--torchscript")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of TorchScript as a whole; files of it are about
            model = torch.jit.load(str(path), map_location=device_of(source.device))  # type: ignore[no-untyped-call]
    except RuntimeError as exc:
        raise SettingsError(f"--torchscript {str(path)!r}: {_first_line(exc)}") from exc
    return _backend(source, model.eval(), source.version or digest([path, source.settings()]), "pytorch_torchscript")


def from_export(source: ModelSource) -> Backend:
    """Load `--torch-export`; inputs and outputs are the program's own."""
    path = existing_file(source.target, "--torch-export")
    try:
        program = torch.export.load(str(path))
    except Exception as exc:
        raise SettingsError(f"--torch-export {str(path)!r}: {type(exc).__name__}: {_first_line(exc)}") from exc
    device = device_of(source.device)
    if device.type != "cpu":
        from torch.export.passes import move_to_device_pass

        program = move_to_device_pass(program, device)
    specs = exported_specs(program, normalized=source.normalize is not None)
    version = source.version or digest([path, source.settings()])
    inputs = source.inputs or specs.inputs
    outputs = source.outputs or specs.outputs
    return _backend(source, _flat(program), version, "pytorch_export", inputs, outputs, specs.rows)


def _flat(program: torch.export.ExportedProgram) -> Callable[..., Any]:
    """Return the program as a function of its tensors, in whichever arguments it was exported."""
    module = program.module()
    structure = program.call_spec.in_spec
    assert structure is not None

    def call(*tensors: torch.Tensor) -> Any:
        args, kwargs = tree_unflatten(tensors, structure)
        return module(*args, **kwargs)

    return call


def _backend(
    source: ModelSource,
    model: Callable[..., Any],
    version: str,
    platform: str = "pytorch",
    inputs: Sequence[str | TensorSpec] | None = None,
    outputs: Sequence[str | TensorSpec] | None = None,
    rows: BatchSizeRange | None = None,
) -> TorchBackend:
    if source.threads is not None:
        torch.set_num_threads(source.threads)
    return TorchBackend(
        model,
        source.inputs if inputs is None else inputs,
        source.outputs if outputs is None else outputs,
        sample=read_sample(source.sample) if source.sample else None,
        device=source.device,
        autocast=source.autocast,
        normalize=source.normalize,
        version=version,
        platform=platform,
        rows=rows,
    )


def _parameters(model: Callable[..., Any]) -> set[str]:
    if isinstance(model, torch.jit.ScriptModule):
        schema: Any = getattr(model.forward, "schema", None)
        return {argument.name for argument in schema.arguments} if schema else set()
    try:
        parameters = inspect.signature(model.forward if isinstance(model, torch.nn.Module) else model).parameters
    except ValueError:
        return set()
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {name for name, parameter in parameters.items() if parameter.kind in kinds}


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


def _closed(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("this backend was closed")


def _first_line(exc: BaseException) -> str:
    return (str(exc).strip().splitlines() or [type(exc).__name__])[0]
