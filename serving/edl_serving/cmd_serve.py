"""`edl serve`: serve a model to students as a teacher."""

from __future__ import annotations

import logging
import sys
import time
import traceback
import types
from collections.abc import Sequence

from edl.errors import EDLError
from edl_serving.backends import open_backends
from edl_serving.backends.backend import Backend, complete_outputs
from edl_serving.backends.source import ModelSource, is_library, top_name
from edl_serving.options import ServingParser
from edl_serving.serve_config import GROUPS, ServeConfig, prepare_process

_log = logging.getLogger(__name__)

_EXIT_MODEL = 3  # 1 means that draining took too long, and 2 wrong usage
_DESCRIPTION = """\
Serves a model over KServe v2 gRPC, batches the requests of many students, and registers the server
where students look for teachers. SIGTERM drains the server: it leaves discovery, finishes its requests,
and exits."""
_EXAMPLES = """\
examples:
  edl serve --callable teacher.py:predict --input "image:float32[1,8,8]" --service digits
      any Python function {name: array} -> {name: array}; students find it as service "digits"
  edl serve --torch-factory nets:resnet50 --checkpoint resnet50.pt --service resnet50 \\
            --input "image:uint8[3,224,224]" --output logits --device cuda --max-delay 2ms
  edl serve --hf models/qwen3-8b --task causal-lm --service qwen3-8b --store consul://10.0.0.7:8500 --host 0.0.0.0
      a language model: students send token ids, and get log-probabilities"""
_DETAILS = """\
more examples:
  edl serve --torch-export resnet50.pt2 --service resnet50 --device cuda:0,cuda:1 --autocast bfloat16
  edl serve --paddle inference/ernie --service ernie
  edl serve --hf models/qwen3-8b --task causal-lm --top-k 64 --max-tokens 8192 --dtype bfloat16 --service qwen3-8b
      row t predicts token t + 1; the last row predicts the token after the end
  edl serve --config teacher.toml --port 8001
  edl serve --torchscript resnet50.ts --input "image:float32[3,224,224]" --service resnet50 --host 0.0.0.0 \\
            --tls-cert teacher.pem --tls-key teacher.key --tls-ca students-ca.pem      mutual TLS

a config file uses the same names as the flags, which override it:
  service = "digits"
  factory = "teacher.py:build"      # paths are relative to the current folder
  max-batch = 128
  max-delay = "2ms"
  tag = ["gpu"]
  [option]
  width = 512

exit codes: 0 drained, 1 some requests were not answered in time, 2 wrong usage or settings,
3 the model failed to load or to warm up."""


def check_arguments(argv: Sequence[str]) -> None:
    """Raise SettingsError if `main` would refuse these arguments before it loads a model."""
    _, given = ServingParser("edl serve", _DESCRIPTION).parse_settings(GROUPS, argv)
    ServeConfig.of(given)


def main(argv: Sequence[str]) -> int:
    parser = ServingParser("edl serve", _DESCRIPTION, _EXAMPLES, _DETAILS)
    _, given = parser.parse_settings(GROUPS, argv)
    config = ServeConfig.of(given)
    prepare_process("edl serve", given)
    from edl_serving.server import serve  # here, because its dependencies are an extra that `--help` does not need

    with config.registering() as registration:
        try:
            backends = _open(config)
            return serve(config.server, backends, join=registration.register, leave=registration.start_draining)
        except EDLError:
            raise
        except Exception as exc:  # noqa: BLE001 - the user's model may raise anything
            print(f"edl serve: {describe_failure(exc, config.source)}", file=sys.stderr)
            return _EXIT_MODEL


def _open(config: ServeConfig) -> list[Backend]:
    started = time.monotonic()
    _log.info("loading %r: --%s %s", config.server.model, config.source.kind, config.source.target)
    backends = open_backends(config.source)
    first = backends[0]
    shapes = [
        ", ".join(f"{spec.name}:{spec.datatype}{list(spec.shape)}" for spec in specs)
        for specs in (first.inputs, first.outputs)
    ]
    _log.info(
        "model %r (%s, version %s): %s -> %s, loaded in %.1f s",
        config.server.model,
        first.platform,
        first.version or "unknown",
        *shapes,
        time.monotonic() - started,
    )
    return backends


_CALLS = {complete_outputs.__code__, Backend.warm_up.__code__}
"""Functions that call the model with a batch that EDL makes up from the user's flags."""


def describe_failure(exc: BaseException, source: ModelSource) -> str:
    """Describe, for output to standard error, an exception that a model raised.

    The stack starts at the user's code. The module that the user specified counts as the user's code even if it is an
    installed module. The stack is left out if a call of the model failed outside the user's code, because then the
    flags or the model's outputs are wrong.
    """
    _log.debug("the model failed", exc_info=exc)
    codes, trace = {frame.f_code for frame, _ in traceback.walk_tb(exc.__traceback__)}, exc.__traceback__
    while trace is not None and not _is_users(trace.tb_frame, source):
        trace = trace.tb_next
    batch = _batch_flags(source) if codes & _CALLS else ""
    if trace is None and codes & _CALLS:
        complaint = "".join(traceback.format_exception_only(type(exc), exc)).strip()
        called = f"the model was called with {batch}, and failed" if batch else "the model failed"
        return f"{called}: {complaint} (--verbose shows the stack)"
    stack = "".join(traceback.format_exception(type(exc), exc, trace or exc.__traceback__)).rstrip()
    return f"the model failed:\n{stack}" + (f"\nedl serve: it was called with {batch}" if batch else "")


def _is_users(frame: types.FrameType, source: ModelSource) -> bool:
    package, file = top_name(str(frame.f_globals.get("__name__"))), frame.f_code.co_filename
    return package == source.package or not (package in ("edl", "edl_serving") or is_library(file))


def _batch_flags(source: ModelSource) -> str:
    """Return the names of the flags that describe the batch; empty if the model itself describes its inputs."""
    form = "a dictionary of arrays by input, " if source.kind in ("callable", "factory") else ""
    if source.sample:
        return f"{form}the batch in --sample {source.sample!r}"
    flags = " ".join(f"--input {text!r}" for text in source.inputs)
    return f"{form}zeros of the types and sizes of {flags}" if flags else ""
