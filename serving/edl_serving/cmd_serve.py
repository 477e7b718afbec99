"""`edl serve`: serve a model to students as a teacher."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Sequence

from edl.errors import EDLError
from edl.log_output import log_to_stderr
from edl.protocol.tls.credentials import CredentialFiles
from edl_serving.backends import open_backends
from edl_serving.backends.backend import Backend
from edl_serving.command_line.model_failure import describe_failure
from edl_serving.command_line.parser import CommandParser
from edl_serving.command_line.serve_config import GROUPS, ServeConfig
from edl_serving.process.parent_watch import terminate_with_parent
from edl_serving.registration.ready_file import ReadyFile
from edl_serving.registration.teacher import TeacherRegistration

__all__ = ["main"]

_log = logging.getLogger(__name__)
EXIT_MODEL = 3  # 1 and 2 are a drain that was too slow, and wrong usage

_DESCRIPTION = """\
Serves a model over KServe v2 gRPC, batches the requests of many students, and registers itself
where students look for teachers. SIGTERM drains: it leaves discovery, finishes what it has
accepted, and exits."""

_EXAMPLES = """\
examples:
  edl serve --callable teacher.py:predict --input "image:float32[1,8,8]" --model digits
      any Python function {name: array} -> {name: array}; students find it as service "digits"
  edl serve --torch-factory nets:resnet50 --checkpoint resnet50.pt --model resnet50 \\
            --input "image:uint8[3,224,224]" --output logits --normalize imagenet \\
            --device cuda --autocast bfloat16 --max-delay 2ms
  edl serve --torch-export resnet50.pt2 --model resnet50 --device cuda:0,cuda:1
  edl serve --paddle inference/ernie --model ernie --store consul://10.0.0.7:8500 --host 0.0.0.0
  edl serve --hf models/qwen3-8b --task causal-lm --top-k 64 --max-tokens 8192 --dtype bfloat16 --model qwen3-8b
      a language model: students send token ids and positions, and get log-probabilities;
      row t holds the prediction of token t + 1, the last row that of what would follow
  edl serve --config teacher.toml --port 8001
  edl serve --torchscript resnet50.ts --input "image:float32[3,224,224]" --model resnet50 --host 0.0.0.0 \\
            --tls-cert teacher.pem --tls-key teacher.key --tls-ca students-ca.pem      mutual TLS

a config file has the same names as the flags; a flag wins over it:
  model = "digits"
  factory = "teacher.py:build"      # paths are relative to the current folder
  max-batch = 128
  max-delay = "2ms"
  tag = ["gpu"]
  [option]
  width = 512

exit codes: 0 drained, 1 not everything was answered in time, 2 wrong usage or settings,
3 the model failed to load or to warm up."""


def main(argv: Sequence[str]) -> int:
    """Run `edl serve`.

    Args:
        argv: what follows the command's name.

    Returns:
        The process's exit code.

    Raises:
        SettingsError: wrong usage or settings.
    """
    parser = CommandParser("edl serve", _DESCRIPTION, _EXAMPLES)
    _, given = parser.parse_settings(GROUPS, argv)
    config = ServeConfig.of(given)
    log_to_stderr("edl serve", verbose=config.verbose, log_format=config.log_format)
    return run(config)


def run(config: ServeConfig) -> int:
    """Serve until a signal.

    Args:
        config: what to serve, and how.

    Returns:
        The process's exit code.

    Raises:
        SettingsError: a setting cannot be used.
    """
    from edl_serving.process.run import serve  # what it needs, besides gRPC, is an extra, and `--help` needs none of it

    CredentialFiles.of(config.server.credentials, serving=True)  # what is wrong shows before a large model is loaded
    if config.exit_with is not None:
        terminate_with_parent(config.exit_with)
    with contextlib.ExitStack() as stack:
        ready_file = stack.enter_context(ReadyFile(config.ready_file))
        registration = stack.enter_context(
            TeacherRegistration(config.registration, config.address, config.linger_s, ready_file)
        )
        try:
            backends = _open(config)
            registration.version = backends[0].version
            return serve(config.server, backends, join=registration.register, leave=registration.start_draining)
        except EDLError:
            raise
        except Exception as exc:  # noqa: BLE001 - the user's model, whose own stack tells most
            print(f"edl serve: {describe_failure(exc, config.source)}", file=sys.stderr)
            return EXIT_MODEL


def _open(config: ServeConfig) -> list[Backend]:
    started = time.monotonic()
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
