"""`edl proxy`: elastic teachers for trainers that know a single vLLM's URL."""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Sequence

from edl.cli._changes import printable
from edl.cli._credentials import add_server_credentials
from edl.cli._option_values import Port
from edl.cli._store_option import add_store_option
from edl.end_signals import collect_signals
from edl.errors import SettingsError
from edl.log_output import log_to_stderr
from edl.settings import Credentials

__all__ = ["main"]

logger = logging.getLogger(__name__)

_POLL_S = 0.2  # how soon a signal is noticed
_EXIT_CUT = 1  # not everything was answered in time, as `edl serve` has it

_DESCRIPTION = """\
Answers as a vLLM does that is asked for the log-probabilities of prompts, with all live teachers
of a service behind it: language models of `edl serve --hf` and `edl register vllm://`. A trainer
that is configured with one teacher's URL (TRL, Axolotl, ms-swift, ...) gets teachers that come,
go and die by changing that URL. Nothing is generated."""

_EXAMPLES = """\
examples:
  edl proxy qwen --port 9000                        then teacher_model_server_url="http://localhost:9000" in TRL
  edl proxy qwen --store consul://10.0.0.7:8500 --top-k 100 --tokenizer ./student
  edl proxy 10.0.0.9:8001,10.0.0.10:8001 --model qwen       teachers without a store
  edl proxy qwen --host 0.0.0.0 --token-file tokens --tls-cert cert.pem --tls-key key.pem
  curl -s localhost:9000/v1/completions -H 'Content-Type: application/json' \\
       -d '{"prompt": [[3, 1, 4, 1, 5]], "max_tokens": 1, "prompt_logprobs": 5}'

POST /v1/completions takes prompts as token ids with prompt_logprobs up to --top-k, max_tokens 0 or
1, and temperature 1 (or 0, which is about the token that nobody reads). /health is 200 while a
teacher is live, /livez while this process is; /metrics is for Prometheus. While no teacher is live
a request waits --teacher-timeout, and is answered 503 with Retry-After then.

Start it beside each trainer, or once for all. SIGTERM: nothing new is taken, and what is under way
is answered (--drain). exit codes: 0 ended, 1 not everything was answered in time, 2 wrong usage."""


def main(argv: Sequence[str]) -> int:
    """Run `edl proxy`."""
    options = _parser().parse_args(argv)
    log_to_stderr("edl proxy", verbose=options.verbose, log_format="text")
    from edl.proxy.server import ProxyServer
    from edl.proxy.settings import ProxySettings

    settings = ProxySettings(
        service=options.service,
        discovery=options.store,
        model=options.model,
        host=options.host,
        port=options.port,
        top_k=options.top_k,
        max_tokens=options.max_tokens,
        timeout_s=options.timeout,
        teacher_timeout_s=options.teacher_timeout,
        version=options.version,
        tokenizer=options.tokenizer,
        allowed_hosts=tuple(options.allow_host),
        credentials=Credentials.of(
            ca=options.tls_ca,
            cert=options.tls_cert,
            key=options.tls_key,
            token_file=options.token_file,
            allow_insecure_tokens=options.allow_insecure_tokens,
            environ={},  # the variables name what is shown to teachers
        ),
    )
    with collect_signals() as caught, ProxyServer(settings) as server:
        print(printable(f"Teachers of {options.service} answer at {server.url} ; Ctrl-C ends it."), flush=True)
        while not caught:
            time.sleep(_POLL_S)
        logger.info("taking nothing new; answers under way have %g s", options.drain)
        drained = server.drain(options.drain)
    return 0 if drained else _EXIT_CUT


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="edl proxy",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("service", metavar="SERVICE", help="the teachers' service, or host:port of teachers, separated by commas")
    add_store_option(parser, "where teachers register", alias=True)
    add("--model", metavar="NAME", default="", help="the name that clients ask for (default: SERVICE)")
    add("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1, this machine only)")
    add("--port", action=Port, default=9000, help="0 for a free port (default: 9000)")
    add(
        "--top-k",
        type=int,
        default=64,
        metavar="K",
        help="largest prompt_logprobs, which teachers must give (default: 64)",
    )
    add(
        "--max-tokens",
        type=int,
        default=None,
        metavar="N",
        help="tokens that are held at a time, and of a request; what comes beyond waits (default: 256 MiB of labels, "
        "which are 262144 at --top-k 64)",
    )
    add("--timeout", type=_seconds, default=600.0, metavar="S", help="for an answer, in seconds (default: 600)")
    add("--teacher-timeout", type=_seconds, default=60.0, metavar="S", help="while no teacher is live (default: 60)")
    add("--drain", type=_seconds, default=30.0, metavar="S", help="for answers under way at SIGTERM (default: 30)")
    add("--version", metavar="TEXT", default="", help="ask teachers of this model version only")
    add("--tokenizer", metavar="PATH", default="", help="the student's: teachers of another are refused by name")
    add("--verbose", action="store_true", help="log more")
    add(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="answer to this name, too; on 127.0.0.1 without tokens only localhost and addresses are (DNS rebinding)",
    )
    add_server_credentials(
        parser, "clients", ". What is shown to teachers is in the environment (EDL_TLS_CA, EDL_TOKEN_FILE, ...)"
    )
    return parser


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise SettingsError(f"{text!r}: expected seconds") from None
