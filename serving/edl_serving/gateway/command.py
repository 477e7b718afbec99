"""`edl register vllm://HOST:PORT` and `sglang://…`: a language model that an engine serves becomes a teacher."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence

from edl.errors import EDLError
from edl.log_output import log_to_stderr
from edl.protocol import names
from edl.protocol.tls.credentials import CredentialFiles
from edl.tokenizer_hash import hash_tokenizer
from edl_serving.command_line.parser import CommandParser
from edl_serving.gateway.config import BATCHES, GATEWAY_GROUPS, GatewayConfig
from edl_serving.process.parent_watch import terminate_with_parent
from edl_serving.registration.ready_file import ReadyFile
from edl_serving.registration.teacher import TeacherRegistration
from edl_serving.request_error import RequestError

__all__ = ["main"]

_log = logging.getLogger(__name__)
_EXIT_ENGINE = 3  # as `edl serve` has it for a model that fails to warm up

_DESCRIPTION = """\
Makes a teacher of a language model that vLLM or SGLang serves: runs beside the engine, asks it for
log-probabilities over HTTP, and answers students over KServe v2 as `edl serve` does: row t holds
the prediction of token t + 1, the last row that of what would follow. It is in discovery while the
engine is healthy. SIGTERM drains."""

_EXAMPLES = """\
examples:
  edl register vllm://127.0.0.1:8000 --model qwen --top-k 64 --tokenizer ./qwen --model-version r1
  edl register sglang://127.0.0.1:30000 --model qwen --model-version r1 --host 0.0.0.0
  edl register vllm+https://10.0.0.9:8000 --model qwen --model-version r1 --engine-ca ca.pem \\
               --engine-token-file key

vLLM gives 20 log-probabilities a token unless it is started with --max-logprobs 64; with
--enable-scale-out it answers without making text of them, which is faster.

exit codes: 0 drained, 1 not everything was answered in time, 2 wrong usage or settings, or an
engine that cannot be used, 3 the engine failed while the gateway started."""


def main(argv: Sequence[str]) -> int:
    """Run `edl register` with the address of an engine.

    Args:
        argv: what follows the command's name.

    Returns:
        The process's exit code.

    Raises:
        SettingsError: wrong usage or settings, or an engine that cannot be used.
    """
    parser = CommandParser("edl register vllm://HOST:PORT", _DESCRIPTION, _EXAMPLES)
    parser.add_argument("endpoint", metavar="ENGINE", help="vllm://host:port or sglang://host:port, +https for TLS")
    arguments, given = parser.parse_settings(GATEWAY_GROUPS, argv)
    config = GatewayConfig.of(arguments["endpoint"], given)
    log_to_stderr("edl register", verbose=config.verbose, log_format=config.log_format)
    return run(config)


def run(config: GatewayConfig) -> int:
    """Serve until a signal.

    Args:
        config: what to serve, and how.

    Returns:
        The process's exit code.

    Raises:
        SettingsError: a setting, or the engine, cannot be used.
    """
    from edl_serving.gateway.backend import GatewayBackend, GatewayModel
    from edl_serving.gateway.health import EngineHealth
    from edl_serving.gateway.inspection import find_facts
    from edl_serving.process.run import serve  # what these need is an extra, and `--help` needs none of it

    CredentialFiles.of(config.server.credentials, serving=True)
    meta = {names.TOKENIZER_META: hash_tokenizer(config.tokenizer)} if config.tokenizer else {}
    if config.exit_with is not None:
        terminate_with_parent(config.exit_with)
    with contextlib.ExitStack() as stack:
        ready_file = stack.enter_context(ReadyFile(config.ready_file))
        registration = stack.enter_context(
            TeacherRegistration(config.registration, config.address, config.linger_s, ready_file)
        )
        engine = config.engine
        facts = asyncio.run(find_facts(engine, config.engine_model, config.exact_model, config.top_k, config.wait_s))
        if facts.max_sequence > config.server.max_batch_rows:
            _log.warning(
                "%s takes sequences of %d tokens, and students get %d at most: more with --max-tokens %d",
                *(engine.address, facts.max_sequence, config.server.max_batch_rows, BATCHES * facts.max_sequence),
            )
        _log.info("%s, model %r, asked at %s", engine.address, facts.model, facts.endpoint.path)
        health = EngineHealth(engine, facts, config.top_k, config.interval_s, config.timeout_s, config.failures)
        stack.callback(health.close)
        model = GatewayModel(engine, facts, config.top_k, config.version, meta)
        registration.version = config.version
        backends = [GatewayBackend(model, health) for _ in range(BATCHES)]
        try:
            return serve(config.server, backends, join=registration.register, leave=registration.start_draining)
        except EDLError:
            raise
        except RequestError as exc:
            _log.error("the engine failed while the gateway started: %s", exc.message)
            return _EXIT_ENGINE
