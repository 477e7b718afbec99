"""`edl register`: put a Triton or other KServe v2 server that runs already into discovery."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from edl.background import start_call
from edl.discovery import Instance
from edl.end_signals import collect_signals
from edl.errors import SettingsError
from edl.protocol import names
from edl.quoting import quote
from edl.settings import Credentials
from edl_serving import options as v
from edl_serving.foreign_server import ForeignServer, ProbeResult, ProbeStatus, ReadinessTracker
from edl_serving.gateway.command import main as gateway_main
from edl_serving.gateway.engine import names_engine
from edl_serving.options import CommandParser, Option, OptionGroup
from edl_serving.registration import InstanceReconciler, ReadyFile, RegistrationSettings, TeacherLoad, warn_of_loopback
from edl_serving.serve_config import (
    CLIENT_CREDENTIALS,
    DISCOVERY_OPTIONS,
    PROCESS_OPTIONS,
    pick,
    prepare_process,
    refuse_zero,
    registration_settings_of,
)

_log = logging.getLogger(__name__)
_LEAVE_S = 5.0  # for a registry to hear of the end; the lease lapses by itself
_SIGNAL_LOOK_S = 0.1  # how often the main thread looks for a signal: an end takes no longer to begin
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
    """Parse a priority: a word or a level."""
    text = str(raw).strip()
    if text not in ("lowest", "default", "auto") and not (text.isascii() and text.isdigit() and 0 < int(text) < 2**32):
        raise ValueError("expected lowest, default, auto, or a level from 1 on")
    return text


_GROUPS = (
    OptionGroup(
        "the server",
        (
            Option("model", v.text, "NAME", "model to serve students from (default: the service's name)"),
            Option(
                "priority",
                _priority,
                "LEVEL",
                "priority of students beside the server's own clients: lowest, default, or a level from 1 on"
                " (default: lowest if it has levels)",
            ),
            Option("interval", v.duration_s, "TIME", "time between two probes (default 1s)"),
            Option("timeout", v.duration_s, "TIME", "time that a probe may take (default 2s)"),
            Option("failures", v.count, "N", "probes without an answer before it counts as gone (default 2)"),
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
            *PROCESS_OPTIONS,
        ),
    ),
)


@dataclass(frozen=True)
class RegisterConfig:
    """The settings of `edl register`.

    Attributes:
        target: Endpoint to probe, as gRPC takes it.
        address: Address at which students reach the server.
        port: Its port; 0 for a Unix socket.
        model: Model that must be ready.
        registration: How the server shows in discovery.
        interval_s: Seconds between two probes.
        timeout_s: Seconds that a probe may take.
        failures: Probes without an answer after which the server is gone.
        priority: Priority that students ask the server with; empty for their own choice.
        credentials: TLS and tokens for the server.
        ready_file: Path of the ready file; None for none.
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

    @classmethod
    def of(cls, endpoint: str, given: Mapping[str, Any]) -> RegisterConfig:
        """Build the settings from values of the options."""
        model = given.get("model") or given.get("service")
        if model is None:
            raise SettingsError("name the model: --model NAME (and --service NAME, if students look for another)")
        parse_endpoint("ENDPOINT", endpoint)
        address, port = parse_endpoint("--advertise", given.get("advertise", endpoint))
        registration = registration_settings_of(given, given.get("service") or model)
        if registration.url is None:
            raise SettingsError("--store none: registering is all that this command does")
        registration.check(address)
        refuse_zero(given, "interval", "timeout")
        names = {"interval": "interval_s", "timeout": "timeout_s", "priority": "", "failures": "", "ready_file": ""}
        rest = pick(given, names)
        return cls(endpoint, address, port, model, registration, credentials=Credentials.of_options(given), **rest)


def parse_endpoint(name: str, text: str) -> tuple[str, int]:
    """Parse `host:port`, `[v6]:port` or `unix:/path` to address and port as `Instance` has them."""
    if text.startswith("unix:/"):
        return text, 0
    match = re.fullmatch(r"(?:\[(?P<v6>[0-9A-Fa-f:.%\w]+)\]|(?P<host>[^\s:/\[\]]+)):(?P<port>\d{1,5})", text)
    if match is None or not 0 < int(match["port"]) < 65536:
        raise SettingsError(f"{name} {text!r}: expected host:port, [v6-address]:port or unix:/path")
    return match["v6"] or match["host"], int(match["port"])


def main(argv: Sequence[str]) -> int:
    """Run `edl register`; return the exit code."""
    if any(names_engine(argument) for argument in argv):
        return gateway_main(argv)
    parser = CommandParser("edl register ENDPOINT", _DESCRIPTION, _EXAMPLES)
    parser.add_argument("endpoint", metavar="ENDPOINT", help="the server's gRPC address, host:port")
    arguments, given = parser.parse_settings(_GROUPS, argv)
    config = RegisterConfig.of(arguments["endpoint"], given)
    prepare_process("edl register", given)
    ended = threading.Event()
    registering = start_call("edl-register", lambda: keep_registered(config, ended))
    with collect_signals() as caught:
        while not caught and not registering.done():
            time.sleep(_SIGNAL_LOOK_S)
    ended.set()  # from here on a second signal ends the process at once
    registering.result()
    return 0


def keep_registered(config: RegisterConfig, ended: threading.Event) -> None:
    """Probe the server and keep discovery in line with its readiness, until `ended`."""
    registration = config.registration
    assert registration.url is not None
    tracker = ReadinessTracker(config.failures)
    ready_file = ReadyFile(config.ready_file)

    def on_published(instance: Instance | None) -> None:
        if instance is None:
            ready_file.remove()
            return
        _log.info("registered as %s/%s at %s", instance.service, instance.id, registration.url)
        ready_file.write({"endpoint": instance.endpoint, "port": instance.port, "pid": os.getpid()})

    warn_of_loopback(registration.url, config.address, "--advertise HOST:PORT")
    with contextlib.ExitStack() as stack:
        server, counted = (  # its counts are read in the publisher's thread
            stack.enter_context(
                contextlib.closing(ForeignServer(config.target, config.model, config.timeout_s, config.credentials))
            )
            for _ in range(2)
        )
        stack.callback(ready_file.remove)
        reconciler = InstanceReconciler(registration.url, registration.ttl_s, on_published)
        stack.callback(reconciler.close, _LEAVE_S)
        load = stack.enter_context(
            contextlib.closing(TeacherLoad(registration.url, registration.service, registration.load))
        )
        last = ProbeResult(ProbeStatus.READY)
        while not ended.is_set():
            result = server.probe()
            before, registered = tracker.registered, tracker.record_probe(result.status)
            if result.status is not ProbeStatus.READY and result != last:
                _log.warning("%s: %s", config.target, result.reason)
            last = result
            if registered and not before:
                _log.info("%s is ready", config.target)
                instance = _instance(config, server.version())
                reconciler.set_desired(instance)
                load.set_ready(instance, counted.read_counts)
            elif before and not registered:
                _log.warning("%s is out of discovery until it is ready again", config.target)
                reconciler.set_desired(None)
                load.set_state("unhealthy")
            reconciler.wait_until_current(0)
            ended.wait(config.interval_s)


def _instance(config: RegisterConfig, version: str) -> Instance:
    registration = config.registration
    if registration.id is None:
        # The same on whatever host this runs: it is the server that is registered.
        address = re.sub(r"[^A-Za-z0-9.-]+", "-", f"{config.address}-{config.port}").strip("-")
        registration = replace(registration, id=address)
    meta = {"version": version} if version else {}
    if not version.isprintable() or len(version.encode(errors="replace")) > _LONGEST_VERSION:
        _log.warning(
            "%s: the version %s of its model is left out of discovery: it is not printable text of at most %d bytes",
            *(config.target, quote(version), _LONGEST_VERSION),
        )
        meta = {}
    if config.priority:
        meta[names.PRIORITY_META] = config.priority
    if config.credentials.ca:
        meta[names.TLS_META] = "1"
    return registration.instance(config.address, config.port, config.model, meta)
