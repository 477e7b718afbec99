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
from edl.notifier import ReentrantEvent
from edl.protocol import names
from edl.quoting import quote
from edl.settings import Credentials
from edl_serving.command_line import option_values as v
from edl_serving.command_line.options import Group, Option, add_flags, read_file, values
from edl_serving.command_line.parser import Parser
from edl_serving.command_line.serve_config import (
    CLIENT_CREDENTIALS,
    DISCOVERY_OPTIONS,
    LOG_FORMAT,
    Announcement,
    credentials_of,
)
from edl_serving.process.log_output import log_to_stderr
from edl_serving.process.parent_watch import exit_with
from edl_serving.registration.address import warn_of_loopback
from edl_serving.registration.announcer import Announcer
from edl_serving.registration.probe import Answer, Prober, Server, Turn, Verdict
from edl_serving.registration.ready_file import ReadyFile

__all__ = ["RegisterConfig", "main"]

_log = logging.getLogger(__name__)
_LEAVE_S = 5.0
_LONGEST_VERSION = 512  # bytes; what a registry takes

_DESCRIPTION = """\
Puts an existing server into discovery: Triton, or anything that speaks KServe v2 over gRPC. It is
asked over and over whether it is ready, and is in discovery only while it is. Runs until SIGTERM,
which takes the server out."""

_EXAMPLES = """\
examples:
  edl register 127.0.0.1:8001 --model resnet50 --service resnet50
  edl register triton-0.example:8001 --model bert --capacity 4 --discovery consul://127.0.0.1:8500
  edl register 127.0.0.1:8001 --model bert --advertise 10.0.0.9:8001     probed here, reached there
  edl register triton.example:8001 --model bert --tls-ca ca.pem --token-file token
  edl register unix:/run/triton.sock --model bert                        students on this machine only

exit codes: 0 ended by a signal, 2 wrong usage or settings."""

_GROUPS = (
    Group(
        "the server",
        (
            Option("model", v.text, "NAME", "the model that counts (default: the service's name)"),
            Option("interval", v.duration_s, "TIME", "how often the server is asked (default 1s)"),
            Option("timeout", v.duration_s, "TIME", "how long it may take to answer (default 2s)"),
            Option("failures", v.count, "N", "it is gone after so many questions without an answer (default 2)"),
        ),
    ),
    CLIENT_CREDENTIALS,
    Group(
        "discovery",
        (
            *DISCOVERY_OPTIONS,
            Option("advertise", v.text, "ENDPOINT", "where students reach the server (default: the endpoint asked)"),
        ),
    ),
    Group(
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
    """All of it.

    Attributes:
        target: what gRPC connects to.
        address, port: where students reach the server.
        failures: questions without an answer until it is gone.
    """

    target: str
    address: str
    port: int
    model: str
    announcement: Announcement
    interval_s: float = 1.0
    timeout_s: float = 2.0
    failures: int = 2
    credentials: Credentials = field(default_factory=Credentials)
    ready_file: str | None = None
    exit_with: int | None = None
    verbose: bool = False
    log_format: str = "text"

    @classmethod
    def of(cls, endpoint: str, given: Mapping[str, Any]) -> RegisterConfig:
        """From values of the options.

        Raises:
            SettingsError: something is missing, or does not go together.
        """
        model = given.get("model") or given.get("service")
        if model is None:
            raise SettingsError("name the model: --model NAME (and --service NAME, if students look for another)")
        parse_endpoint("ENDPOINT", endpoint)
        address, port = parse_endpoint("--advertise", given.get("advertise", endpoint))
        announcement = Announcement.of(given, given.get("service") or model)
        if announcement.url is None:
            raise SettingsError("--discovery none: registering is all that this command does")
        announcement.check(address)
        for name in ("interval", "timeout"):
            if given.get(name) == 0:
                raise SettingsError(f"--{name} 0: expected more than nothing")
        seconds = {"interval": "interval_s", "timeout": "timeout_s"}
        kept = ("interval", "timeout", "failures", "ready_file", "exit_with", "verbose", "log_format")
        rest = {seconds.get(name, name): given[name] for name in kept if name in given}
        return cls(endpoint, address, port, model, announcement, credentials=credentials_of(given), **rest)


def parse_endpoint(name: str, text: str) -> tuple[str, int]:
    """`host:port`, `[v6]:port` or `unix:/path` as address and port, as `Instance` has them.

    Raises:
        SettingsError: it is none of these.
    """
    if text.startswith("unix:/"):
        return text, 0
    match = re.fullmatch(r"(?:\[(?P<v6>[0-9A-Fa-f:.%\w]+)\]|(?P<host>[^\s:/\[\]]+)):(?P<port>\d{1,5})", text)
    if match is None or not 0 < int(match["port"]) < 65536:
        raise SettingsError(f"{name} {text!r}: expected host:port, [v6-address]:port or unix:/path")
    return match["v6"] or match["host"], int(match["port"])


def main(argv: Sequence[str]) -> int:
    """Run `edl register`."""
    parser = Parser("edl register ENDPOINT", _DESCRIPTION, _EXAMPLES)
    parser.add_argument("endpoint", metavar="ENDPOINT", help="the server's gRPC address, host:port")
    parser.add_argument("--config", metavar="FILE", help="a TOML file with any of the settings below")
    add_flags(parser, _GROUPS)
    flags = vars(parser.parse(argv))
    path = flags.pop("config", None)
    endpoint = flags.pop("endpoint")
    config = RegisterConfig.of(endpoint, values(_GROUPS, flags, read_file(path) if path else {}, path or ""))
    log_to_stderr("edl register", verbose=config.verbose, log_format=config.log_format)
    if config.exit_with is not None:
        exit_with(config.exit_with)
    with _signals() as ended:
        keep_registered(config, ended)
    return 0


def keep_registered(config: RegisterConfig, ended: ReentrantEvent) -> None:
    """Ask the server and keep discovery in line with the answers, until `ended`.

    Raises:
        SettingsError: the registry cannot hold such a server.
    """
    server = Server(config.target, config.model, config.timeout_s, config.credentials)
    prober = Prober(config.failures)
    told = config.announcement
    ready_file = ReadyFile(config.ready_file)

    def shown(instance: Instance | None) -> None:
        if instance is None:
            ready_file.remove()
            return
        _log.info("registered as %s/%s at %s", instance.service, instance.id, told.url)
        ready_file.write({"endpoint": instance.endpoint, "port": instance.port, "pid": os.getpid()})

    assert told.url is not None
    warn_of_loopback(told.url, config.address, "--advertise HOST:PORT")
    announcer = Announcer(told.url, told.ttl_s, shown)
    last = Verdict(Answer.READY)
    try:
        while not ended.is_set():
            verdict = server.ask()
            turn = prober.hear(verdict.answer)
            if verdict.answer is not Answer.READY and verdict != last:
                _log.warning("%s: %s", config.target, verdict.reason)
            last = verdict
            if turn is Turn.ENTER:
                _log.info("%s is ready", config.target)
                announcer.want(_instance(config, server))
            elif turn is Turn.LEAVE:
                _log.warning("%s is out of discovery until it is ready again", config.target)
                announcer.want(None)
            announcer.settle(0)
            ended.wait(config.interval_s)
    finally:
        announcer.close(_LEAVE_S)
        ready_file.remove()
        server.close()


def _instance(config: RegisterConfig, server: Server) -> Instance:
    told = config.announcement
    if told.id is None:
        # The same on whatever host this runs: it is the server that is registered.
        address = re.sub(r"[^A-Za-z0-9.-]+", "-", f"{config.address}-{config.port}").strip("-")
        told = replace(told, id=address)
    version = server.version()
    meta = {"version": version} if version else {}
    if not version.isprintable() or len(version.encode(errors="replace")) > _LONGEST_VERSION:
        _log.warning(
            "%s: its model's version %s is not told to discovery: it is no text", config.target, quote(version)
        )
        meta = {}
    if config.credentials.ca:
        meta[names.TLS_META] = "1"
    return told.instance(config.address, config.port, config.model, meta)


@contextlib.contextmanager
def _signals() -> Iterator[ReentrantEvent]:
    """An event that SIGTERM and SIGINT set; a second signal ends the process at once."""
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
