"""`edl register`: put a Triton or other KServe v2 server that runs already into discovery."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from edl.discovery import Instance
from edl.errors import SettingsError
from edl.log_output import log_to_stderr
from edl.notifier import ReentrantEvent
from edl.protocol import names
from edl.quoting import quote
from edl.settings import Credentials
from edl_serving.command_line import option_values as v
from edl_serving.command_line.options import Option, OptionGroup
from edl_serving.command_line.parser import CommandParser
from edl_serving.command_line.serve_config import (
    CLIENT_CREDENTIALS,
    DISCOVERY_OPTIONS,
    LOG_FORMAT,
    registration_settings_of,
)
from edl_serving.gateway.address import names_engine
from edl_serving.gateway.command import main as gateway_main
from edl_serving.process.parent_watch import terminate_with_parent
from edl_serving.registration.address import warn_of_loopback
from edl_serving.registration.load import TeacherLoad
from edl_serving.registration.probe import ProbeResult, ProbeStatus, ReadinessProbe, ReadinessTracker, RegistryAction
from edl_serving.registration.ready_file import ReadyFile
from edl_serving.registration.reconciler import InstanceReconciler
from edl_serving.registration.settings import RegistrationSettings
from edl_serving.registration.statistics import ModelStatisticsReader

__all__ = ["RegisterConfig", "main"]

_log = logging.getLogger(__name__)
_LEAVE_S = 5.0  # for a registry to hear of the end; the lease lapses by itself
_LONGEST_VERSION = 512  # bytes; what a registry takes

_DESCRIPTION = """\
Puts an existing server into discovery: Triton, or anything that speaks KServe v2 over gRPC. It is
asked over and over whether it is ready, and is in discovery only while it is. Runs until SIGTERM,
which takes the server out."""

_EXAMPLES = """\
examples:
  edl register 127.0.0.1:8001 --model resnet50 --service resnet50
  edl register triton-0.example:8001 --model bert --capacity 4 --store consul://127.0.0.1:8500
  edl register 127.0.0.1:8001 --model bert --advertise 10.0.0.9:8001     probed here, reached there
  edl register triton.example:8001 --model bert --tls-ca ca.pem --token-file token
  edl register unix:/run/triton.sock --model bert                        students on this machine only
  edl register vllm://127.0.0.1:8000 --model qwen --model-version r1     a language model; its options are others:
  edl register vllm:// --help            (row t of its labels holds the prediction of token t + 1)

exit codes: 0 ended by a signal, 2 wrong usage or settings."""


def _priority(raw: Any) -> str:
    """Parse a priority: a word or a level.

    Raises:
        ValueError: it is neither.
    """
    text = str(raw).strip()
    if text not in ("lowest", "default", "auto") and not (text.isascii() and text.isdigit() and 0 < int(text) < 2**32):
        raise ValueError("expected lowest, default, auto, or a level from 1 on")
    return text


_GROUPS = (
    OptionGroup(
        "the server",
        (
            Option("model", v.text, "NAME", "the model that counts (default: the service's name)"),
            Option(
                "priority",
                _priority,
                "LEVEL",
                "how students ask it beside its own clients: lowest, default, or a level (default: lowest if it has"
                " levels)",
            ),
            Option("interval", v.duration_s, "TIME", "how often the server is asked (default 1s)"),
            Option("timeout", v.duration_s, "TIME", "how long it may take to answer (default 2s)"),
            Option("failures", v.count, "N", "it is gone after so many questions without an answer (default 2)"),
        ),
    ),
    CLIENT_CREDENTIALS,
    OptionGroup(
        "discovery",
        (
            *DISCOVERY_OPTIONS,
            Option("advertise", v.text, "ENDPOINT", "where students reach the server (default: the endpoint asked)"),
        ),
    ),
    OptionGroup(
        "the process",
        (
            Option("ready-file", v.text, "PATH", "there while the server is in discovery: JSON of endpoint, port, pid"),
            Option("exit-with", v.count, "PID", "exit when that process ends"),
            LOG_FORMAT,
            Option("verbose", v.flag, "", "log more", negative=True),
        ),
    ),
)


@dataclass(frozen=True)
class RegisterConfig:
    """The settings of `edl register`.

    Attributes:
        target: the endpoint that is probed, as gRPC takes it.
        address: at which students reach the server.
        port: at which students reach the server; 0 for a Unix socket.
        model: that must be ready.
        registration: how the server shows in discovery.
        interval_s: between two probes.
        timeout_s: for a probe.
        priority: with which students shall ask the server; empty for what they choose.
        failures: probes without an answer after which the server is gone.
        credentials: TLS and tokens for the server.
        ready_file: path of the ready file; None for none.
        exit_with: id of the process with which this process ends; None for none.
        verbose: whether debug lines are logged.
        log_format: "text" or "json".
    """

    target: str
    address: str
    port: int
    model: str
    registration: RegistrationSettings
    interval_s: float = 1.0
    timeout_s: float = 2.0
    failures: int = 2
    priority: str = ""
    credentials: Credentials = field(default_factory=Credentials)
    ready_file: str | None = None
    exit_with: int | None = None
    verbose: bool = False
    log_format: str = "text"

    @classmethod
    def of(cls, endpoint: str, given: Mapping[str, Any]) -> RegisterConfig:
        """Build the settings from values of the options.

        Args:
            endpoint: the server, `host:port` or `unix:/path`.
            given: values by key of their option.

        Raises:
            SettingsError: something is missing, or does not go together.
        """
        model = given.get("model") or given.get("service")
        if model is None:
            raise SettingsError("name the model: --model NAME (and --service NAME, if students look for another)")
        parse_endpoint("ENDPOINT", endpoint)
        address, port = parse_endpoint("--advertise", given.get("advertise", endpoint))
        registration = registration_settings_of(given, given.get("service") or model)
        if registration.url is None:
            raise SettingsError("--store none: registering is all that this command does")
        registration.check(address)
        for name in ("interval", "timeout"):
            if given.get(name) == 0:
                raise SettingsError(f"--{name} 0: expected more than nothing")
        seconds = {"interval": "interval_s", "timeout": "timeout_s"}
        kept = ("priority", "interval", "timeout", "failures", "ready_file", "exit_with", "verbose", "log_format")
        rest = {seconds.get(name, name): given[name] for name in kept if name in given}
        return cls(endpoint, address, port, model, registration, credentials=Credentials.of_options(given), **rest)


def parse_endpoint(name: str, text: str) -> tuple[str, int]:
    """Parse `host:port`, `[v6]:port` or `unix:/path`.

    Args:
        name: of the flag, for errors.
        text: the endpoint.

    Returns:
        Address and port, as `Instance` has them.

    Raises:
        SettingsError: the text is something else.
    """
    if text.startswith("unix:/"):
        return text, 0
    match = re.fullmatch(r"(?:\[(?P<v6>[0-9A-Fa-f:.%\w]+)\]|(?P<host>[^\s:/\[\]]+)):(?P<port>\d{1,5})", text)
    if match is None or not 0 < int(match["port"]) < 65536:
        raise SettingsError(f"{name} {text!r}: expected host:port, [v6-address]:port or unix:/path")
    return match["v6"] or match["host"], int(match["port"])


def main(argv: Sequence[str]) -> int:
    """Run `edl register`.

    Args:
        argv: what follows the command's name.

    Returns:
        The process's exit code.

    Raises:
        SettingsError: wrong usage or settings.
    """
    if any(names_engine(argument) for argument in argv):
        return gateway_main(argv)
    parser = CommandParser("edl register ENDPOINT", _DESCRIPTION, _EXAMPLES)
    parser.add_argument("endpoint", metavar="ENDPOINT", help="the server's gRPC address, host:port")
    arguments, given = parser.parse_settings(_GROUPS, argv)
    config = RegisterConfig.of(arguments["endpoint"], given)
    log_to_stderr("edl register", verbose=config.verbose, log_format=config.log_format)
    if config.exit_with is not None:
        terminate_with_parent(config.exit_with)
    with _signals() as ended:
        keep_registered(config, ended)
    return 0


def keep_registered(config: RegisterConfig, ended: ReentrantEvent) -> None:
    """Probe the server and keep discovery in line with its readiness.

    Args:
        config: what to do.
        ended: returns when this is set.

    Raises:
        SettingsError: the registry cannot hold such a server.
    """
    probe = ReadinessProbe(config.target, config.model, config.timeout_s, config.credentials)
    tracker = ReadinessTracker(config.failures)
    registration = config.registration
    ready_file = ReadyFile(config.ready_file)

    def on_published(instance: Instance | None) -> None:
        if instance is None:
            ready_file.remove()
            return
        _log.info("registered as %s/%s at %s", instance.service, instance.id, registration.url)
        ready_file.write({"endpoint": instance.endpoint, "port": instance.port, "pid": os.getpid()})

    assert registration.url is not None
    warn_of_loopback(registration.url, config.address, "--advertise HOST:PORT")
    reconciler = InstanceReconciler(registration.url, registration.ttl_s, on_published)
    load = TeacherLoad(registration.url, registration.service, registration.load)
    statistics = ModelStatisticsReader(config.target, config.model, config.timeout_s, config.credentials)
    last = ProbeResult(ProbeStatus.READY)
    try:
        while not ended.is_set():
            result = probe.probe()
            action = tracker.record_probe(result.status)
            if result.status is not ProbeStatus.READY and result != last:
                _log.warning("%s: %s", config.target, result.reason)
            last = result
            if action is RegistryAction.REGISTER:
                _log.info("%s is ready", config.target)
                instance = _instance(config, probe)
                reconciler.set_desired(instance)
                load.set_ready(instance, statistics.read)
            elif action is RegistryAction.DEREGISTER:
                _log.warning("%s is out of discovery until it is ready again", config.target)
                reconciler.set_desired(None)
                load.set_state("unhealthy")
            reconciler.wait_until_current(0)
            ended.wait(config.interval_s)
    finally:
        load.close()
        reconciler.close(_LEAVE_S)
        ready_file.remove()
        statistics.close()
        probe.close()


def _instance(config: RegisterConfig, probe: ReadinessProbe) -> Instance:
    registration = config.registration
    if registration.id is None:
        # The same on whatever host this runs: it is the server that is registered.
        address = re.sub(r"[^A-Za-z0-9.-]+", "-", f"{config.address}-{config.port}").strip("-")
        registration = replace(registration, id=address)
    version = probe.version()
    meta = {"version": version} if version else {}
    if not version.isprintable() or len(version.encode(errors="replace")) > _LONGEST_VERSION:
        _log.warning(
            "%s: its model's version %s is not told to discovery: it is no text", config.target, quote(version)
        )
        meta = {}
    if config.priority:
        meta[names.PRIORITY_META] = config.priority
    if config.credentials.ca:
        meta[names.TLS_META] = "1"
    return registration.instance(config.address, config.port, config.model, meta)


@contextlib.contextmanager
def _signals() -> Iterator[ReentrantEvent]:
    """Yield an event that SIGTERM and SIGINT set; a second signal ends the process at once."""
    ended = ReentrantEvent()  # the handler runs in the middle of `wait`, in the same thread

    def handle(number: int, frame: object) -> None:
        signal.signal(number, signal.SIG_DFL)
        ended.set()

    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield ended
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
