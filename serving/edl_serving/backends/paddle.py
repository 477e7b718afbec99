"""Serves PaddlePaddle inference models, as written by `paddle.jit.save` or `paddle.static.save_inference_model`.

Outputs have names that the export generated (`fetch_name_0`); `--output logits` renames them by position.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from edl.errors import ProtocolError, SettingsError
from edl.protocol.tensors import Array, datatype_of
from edl_serving.backends.backend import (
    BatchSizeRange,
    DescribedBackend,
    TensorSpec,
    default_output_names,
    parse_specs,
    predict_in_parts,
    read_sample,
    spec_of,
)
from edl_serving.backends.source import ModelSource, digest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Paddle warns at import that ccache is missing, but serving does not need it
    import paddle
    import paddle.inference

_FILES = (".json", ".pdmodel")


class PaddleBackend(DescribedBackend):
    """An inference model of PaddlePaddle, run by a `paddle.inference` predictor."""

    platform: str = "paddle"

    def __init__(self, source: ModelSource) -> None:
        program, weights = model_files(source.target)
        self.version = source.version or digest([program, weights, source.settings()])
        sample = read_sample(source.sample) if source.sample else None
        self._predictor: Any = paddle.inference.create_predictor(_config(program, weights, source))
        self._input_names: list[str] = self._predictor.get_input_names()
        self._output_names: list[str] = self._predictor.get_output_names()
        declared, accepted = self._declared(program)
        self._rows = accepted
        sampled = tuple(spec_of(name, array) for name, array in (sample or {}).items())
        specs = parse_specs(source.inputs) or declared or sampled
        if {spec.name for spec in specs} != set(self._input_names):
            why = f"got {', '.join(spec.name for spec in specs)}" if specs else "its files do not give the shapes"
            raise SettingsError(f"--input: the model's inputs are {', '.join(self._input_names)}; {why}")
        named = [text.rpartition(":")[0] or text for text in source.outputs]
        self._by_name = bool(named) and set(named) <= set(self._output_names)
        self._resolve_specs(specs, source.outputs, sample, "the model has no inputs")

    def _declared(self, program: Path) -> tuple[tuple[TensorSpec, ...], BatchSizeRange]:
        """Return inputs and batch sizes from the files; no inputs if this version of Paddle cannot read the files."""
        try:
            found = _shapes_of(program, self._input_names)
            declared = tuple(_spec(name, dtype, shape) for name, (dtype, shape) in found.items())
            batches = {shape[0] for _, shape in found.values()}
        except (AttributeError, TypeError, KeyError, IndexError, ProtocolError, RuntimeError, ValueError, OSError):
            return (), BatchSizeRange()
        fixed = batches.pop() if len(batches) == 1 else -1
        return declared, BatchSizeRange(fixed, fixed) if fixed > 0 else BatchSizeRange()

    def _run_model(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        return predict_in_parts(self._call, inputs, self._rows)

    def _call(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        for name in self._input_names:
            self._predictor.get_input_handle(name).copy_from_cpu(np.require(inputs[name], requirements=["C", "A"]))
        self._predictor.run()
        names = self._output_names if self._by_name else default_output_names(len(self._output_names))
        arrays = (self._predictor.get_output_handle(name).copy_to_cpu() for name in self._output_names)
        return dict(zip(names, arrays, strict=True))

    def close(self) -> None:
        self._predictor = None


def model_files(prefix: str) -> tuple[Path, Path]:
    path = Path(prefix).expanduser()
    if path.suffix in (*_FILES, ".pdiparams"):
        path = path.with_suffix("")
    programs = [path.with_name(path.name + suffix) for suffix in _FILES]
    program = next((file for file in programs if file.is_file()), None)
    weights = path.with_name(path.name + ".pdiparams")
    if program is None:
        raise SettingsError(f"--paddle: there is neither {programs[0]} nor {programs[1]} (in {Path.cwd()})")
    if not weights.is_file():
        raise SettingsError(f"--paddle: there is {program}, but no {weights}")
    return program, weights


def _config(program: Path, weights: Path, source: ModelSource) -> Any:
    config = paddle.inference.Config(str(program), str(weights))
    config.disable_glog_info()
    device = source.device
    kind, _, index = (device or "auto").replace("gpu", "cuda").partition(":")
    gpus = paddle.device.cuda.device_count() if paddle.device.is_compiled_with_cuda() else 0
    if kind not in ("cpu", "cuda", "auto") or (index and not index.isdecimal()):
        raise SettingsError(f"--device {device!r}: expected cpu, cuda, cuda:1 or auto")
    if kind == "cuda" and int(index or 0) >= gpus:
        raise SettingsError(f"--device {device!r}: PaddlePaddle sees {gpus} GPUs here")
    if kind == "cuda" or (kind == "auto" and gpus):
        config.enable_use_gpu(256, int(index or 0))  # initial memory pool in MiB; it grows
    else:
        config.disable_gpu()
        if source.threads is not None:
            config.set_cpu_math_library_num_threads(source.threads)
    return config


def _shapes_of(program: Path, names: Sequence[str]) -> dict[str, tuple[Any, list[int]]]:
    """Return types and shapes of a model's inputs, which the predictor knows only after a first call."""
    if program.suffix == ".pdmodel":
        # The public API cannot read the old format while the new one is enabled. A program owns its blocks and a block
        # its variables, but Paddle's bindings do not keep the owner alive.
        parsed = paddle.base.core.ProgramDesc(program.read_bytes())
        block = parsed.block(0)
        variables = {name: block.find_var(name.encode()) for name in names}
        found = {name: (variable.dtype(), list(variable.shape())) for name, variable in variables.items()}
        del variables, block, parsed  # in this order: owners last
        return found
    specs = {spec.name: spec for spec in paddle.jit.load(str(program.with_suffix("")))._input_spec()}
    return {name: (specs[name].dtype, list(specs[name].shape)) for name in names}


def _spec(name: str, dtype: Any, shape: Sequence[int]) -> TensorSpec:
    return TensorSpec(
        name, datatype_of(np.dtype(str(dtype).rpartition(".")[2])), tuple(int(size) for size in shape[1:])
    )
