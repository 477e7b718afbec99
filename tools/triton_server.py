"""Runs the real Triton with one Python model, from the PyTriton wheel that `tools/triton.sh` installs.

Run by the Python of `.tools/triton`; it knows nothing of EDL, so that what EDL is tested and measured against is no
work of its own::

    .tools/triton/bin/python tools/triton_server.py --grpc-port 8001 --http-port 8000 \\
        --name digits --input image:uint8:3,224,224 --output logits:float32:1000 --function constant

Prints `READY grpc=127.0.0.1:8001 ...` once it answers. SIGTERM and SIGINT stop it and clean up.
"""

from __future__ import annotations

import argparse
import importlib.util
import pathlib
import shutil
import signal
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os import environ
from types import FrameType

import numpy as np

Function = Callable[["dict[str, np.ndarray]", "list[TensorSpec]"], "dict[str, np.ndarray]"]


@dataclass(frozen=True)
class TensorSpec:
    """A tensor's name, numpy dtype and shape without the batch axis; written `name:dtype:dim,dim`."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]

    @classmethod
    def parse(cls, text: str) -> TensorSpec:
        """From `name:dtype:dim,dim`."""
        try:
            name, dtype, shape = text.split(":")
            return cls(name, np.dtype(dtype), tuple(int(size) for size in shape.split(",") if size))
        except (ValueError, TypeError) as exc:
            raise argparse.ArgumentTypeError(f"{text!r} is not name:dtype:dim,dim ({exc})") from exc


class Constant:
    """Answers ones out of prebuilt arrays: a teacher of no cost."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, int], np.ndarray] = {}

    def __call__(self, inputs: dict[str, np.ndarray], outputs: list[TensorSpec]) -> dict[str, np.ndarray]:
        rows = len(next(iter(inputs.values())))
        for spec in outputs:
            if (spec.name, rows) not in self._kept:
                self._kept[spec.name, rows] = np.ones((rows, *spec.shape), spec.dtype)
        return {spec.name: self._kept[spec.name, rows] for spec in outputs}


def row_sums(inputs: dict[str, np.ndarray], outputs: list[TensorSpec]) -> dict[str, np.ndarray]:
    """Each element of an output row is the sum of that row of all inputs: tells which input an answer belongs to."""
    sums = sum(array.reshape(len(array), -1).sum(axis=1, dtype=np.float64) for array in inputs.values())
    return {
        spec.name: np.broadcast_to(
            np.asarray(sums).reshape(-1, *(1 for _ in spec.shape)), (len(sums), *spec.shape)
        ).astype(spec.dtype)
        for spec in outputs
    }


def load_function(text: str) -> Function:
    """`constant`, `row_sums`, or `file.py:name` of a function `(inputs, output specs) -> outputs`, arrays by name."""
    if text == "constant":
        return Constant()
    if text == "row_sums":
        return row_sums
    path, _, name = text.rpartition(":")
    spec = importlib.util.spec_from_file_location("triton_model", path)
    if spec is None or spec.loader is None:
        raise SystemExit(f"--function {text!r}: expected constant, row_sums or file.py:name")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


def point_at_own_libpython() -> None:
    """Let Triton's Python backend load the libpython of this interpreter.

    Any other of the same version would be found first, and fails to import this one's compiled modules.
    """
    library = str(sysconfig.get_config_var("INSTSONAME"))
    places = [pathlib.Path(sysconfig.get_config_var("LIBDIR"))]
    places.append(places[0] / str(sysconfig.get_config_var("MULTIARCH")))  # Debian's Python
    folder = next((place for place in places if ".so" in library and (place / library).exists()), None)
    if folder is None:
        raise SystemExit(
            f"{sys.executable} has no shared libpython in {places[0]}, which Triton's Python backend loads; "
            "use a Python built with --enable-shared (PYTHON=... tools/triton.sh)"
        )
    environ["LD_LIBRARY_PATH"] = ":".join(filter(None, [str(folder), environ.get("LD_LIBRARY_PATH")]))


def serve(options: argparse.Namespace) -> None:
    """Serve until a signal or until Triton exits."""
    from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
    from pytriton.proxy.types import Request
    from pytriton.triton import Triton, TritonConfig, TritonSecurityConfig

    function = load_function(options.function)

    def infer(requests: Sequence[Request]) -> list[dict[str, np.ndarray]]:
        return [function(dict(request.items()), options.output) for request in requests]

    # A short path: the backend's Unix sockets lie in it. It must not exist yet.
    folder = tempfile.mkdtemp(prefix="triton-")
    config = TritonConfig(
        http_address="127.0.0.1",
        http_port=options.http_port,
        grpc_address="127.0.0.1",
        grpc_port=options.grpc_port,
        allow_metrics=False,
        exit_timeout_secs=5,
    )
    triton = Triton(
        config=config,
        workspace=f"{folder}/w",
        # Since 0.7 shared memory needs a token otherwise; this server listens on loopback only.
        security_config=TritonSecurityConfig(restricted_endpoints=[]),
    )
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        with triton:
            triton.bind(
                model_name=options.name,
                infer_func=infer,
                inputs=[Tensor(name=spec.name, dtype=spec.dtype.type, shape=spec.shape) for spec in options.input],
                outputs=[Tensor(name=spec.name, dtype=spec.dtype.type, shape=spec.shape) for spec in options.output],
                config=ModelConfig(
                    max_batch_size=options.max_batch,
                    batcher=DynamicBatcher(max_queue_delay_microseconds=options.max_delay_us),
                ),
            )
            print(f"READY grpc=127.0.0.1:{options.grpc_port} http=127.0.0.1:{options.http_port}", flush=True)
            triton.serve(monitoring_period_s=0.5)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main() -> None:
    """Parse the command line and serve."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only say whether Triton could run here")
    parser.add_argument("--grpc-port", type=int, default=8001)
    parser.add_argument("--http-port", type=int, default=8000)
    parser.add_argument("--name", default="teacher", help="the model's name")
    parser.add_argument("--input", type=TensorSpec.parse, action="append", help="name:dtype:dim,dim; repeatable")
    parser.add_argument("--output", type=TensorSpec.parse, action="append", help="name:dtype:dim,dim; repeatable")
    parser.add_argument("--function", default="row_sums", help="constant, row_sums or file.py:name")
    parser.add_argument("--max-batch", type=int, default=32, help="rows")
    parser.add_argument("--max-delay-us", type=int, default=0, help="how long a batch waits to fill")
    options = parser.parse_args()
    options.input = options.input or [TensorSpec.parse("x:float32:4")]
    options.output = options.output or [TensorSpec.parse("logits:float32:10")]
    point_at_own_libpython()
    if options.check:
        import pytriton.triton  # noqa: F401

        return
    try:
        serve(options)
    except KeyboardInterrupt:
        pass


if __name__ == "__main__":
    main()
