"""`edl register`: register a running Triton or other KServe v2 server in discovery.

The load of such a server comes from Triton's extension `ModelStatistics`. Triton counts executions by batch size, so
the number of rows is the sum of batch size times executions, and the compute time is the executions' total time.
https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_statistics.md
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from edl.background import start_call
from edl.discovery import Instance
from edl.end_signals import collect_signals
from edl.errors import SettingsError
from edl.protocol import kserve, names
from edl.protocol.channel import call_metadata, channel
from edl.protocol.tls import CredentialFiles, explain_handshake
from edl.protocol.transport import grpc
from edl.quoting import quote, shown
from edl.settings import Credentials
from edl_serving import options as v
from edl_serving.gateway.command import main as gateway_main
from edl_serving.gateway.engine import names_engine
from edl_serving.options import Option, OptionGroup, ServingParser
from edl_serving.registration import (
    InstanceReconciler,
    ProbeStatus,
    ReadinessTracker,
    ReadyFile,
    RegistrationSettings,
    TeacherCounts,
    TeacherLoad,
    warn_of_loopback,
)
from edl_serving.serve_config import (
    CLIENT_CREDENTIALS,
    PROCESS_OPTIONS,
    REGISTRATION_OPTIONS,
    STORE_OPTION,
    pick,
    prepare_process,
    refuse_zero,
    registration_settings_of,
)

_log = logging.getLogger(__name__)

_LEAVE_S = 5.0  # time to deregister; after that, the lease expires by itself
_SIGNAL_LOOK_S = 0.1  # how often the main thread checks for a signal, and so the delay before shutdown starts
_LONGEST_VERSION = 512  # bytes that a registry accepts
_DESCRIPTION = """\
Registers an existing server: Triton, or anything that speaks KServe v2 over gRPC. The server is probed
repeatedly, and is in discovery only while it is ready. The command runs until SIGTERM, then unregisters the server."""
_EXAMPLES = """\
examples:
  edl register 127.0.0.1:8001 --service resnet50
  edl register triton-0.example:8001 --service bert --capacity 4 --store consul://127.0.0.1:8500
  edl register 127.0.0.1:8001 --service bert --advertise 10.0.0.9:8001     probe one address, advertise another
  edl register triton.example:8001 --service bert --model bert_fp16 --tls-ca ca.pem --token-file token
  edl register unix:/run/triton.sock --service bert                        students on this machine only
  edl register vllm://127.0.0.1:8000 --service qwen --model-version r1     a language model: row t predicts token t + 1
  edl register vllm:// --help            shows the options for vLLM and SGLang

exit codes: 0 ended by a signal, 2 wrong usage or settings."""


def _priority(raw: Any) -> str:
    text = str(raw).strip()
    if text not in ("lowest", "default", "auto") and not (text.isascii() and text.isdigit() and 0 < int(text) < 2**32):
        raise ValueError("expected lowest, default, auto, or a level from 1 up")
    return text


_GROUPS = (
    OptionGroup(
        "the server",
        (
            Option("service", v.text, "NAME", "students find the server under this name (default: --model)"),
            Option("model", v.text, "NAME", "the model's name on the server, if not the service's"),
            STORE_OPTION,
            Option("advertise", v.text, "ENDPOINT", "where students reach the server (default: ENDPOINT)"),
            Option(
                "priority",
                _priority,
                "LEVEL",
                "students' priority among the server's clients: lowest, default, or a level from 1 up"
                " (default: lowest if the model has levels)",
            ),
        ),
    ),
    OptionGroup(
        "probes",
        (
            Option("interval", v.duration_s, "TIME", "time between two probes (default 1s)"),
            Option("timeout", v.duration_s, "TIME", "time that a probe may take (default 2s)"),
            Option("failures", v.count, "N", "unanswered probes before the server counts as gone (default 2)"),
        ),
        advanced=True,
    ),
    CLIENT_CREDENTIALS,
    OptionGroup("more about discovery", REGISTRATION_OPTIONS, advanced=True),
    OptionGroup(
        "the process",
        (
            Option(
                "ready-file", v.text, "PATH", "JSON file kept while the server is in discovery: endpoint, port, pid"
            ),
            Option("exit-with", v.count, "PID", "exit when process PID ends"),
            *PROCESS_OPTIONS,
        ),
        advanced=True,
    ),
)


@dataclass(frozen=True)
class RegisterConfig:
    """The settings of `edl register`, which probes `target`; students reach the server at `address` and `port`.

    The port of a Unix socket is 0. `priority` is the priority of students' requests; if it is empty, students choose
    the priority themselves.
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
        model = given.get("model") or given.get("service")
        if model is None:
            raise SettingsError(
                "name the service: --service NAME (and --model NAME, if the server's name for its model differs)"
            )
        parse_endpoint("ENDPOINT", endpoint)
        address, port = parse_endpoint("--advertise", given.get("advertise", endpoint))
        registration = registration_settings_of(given, given.get("service") or model)
        if registration.url is None:
            raise SettingsError("--store none: a server cannot be registered without a store")
        registration.check(address)
        refuse_zero(given, "interval", "timeout")
        names = {"interval": "interval_s", "timeout": "timeout_s", "priority": "", "failures": "", "ready_file": ""}
        rest = pick(given, names)
        return cls(endpoint, address, port, model, registration, credentials=Credentials.of_options(given), **rest)


def parse_endpoint(name: str, text: str) -> tuple[str, int]:
    """Parse `host:port`, `[v6]:port` or `unix:/path` into the address and port of an `Instance`."""
    if text.startswith("unix:/"):
        return text, 0
    match = re.fullmatch(r"(?:\[(?P<v6>[0-9A-Fa-f:.%\w]+)\]|(?P<host>[^\s:/\[\]]+)):(?P<port>\d{1,5})", text)
    if match is None or not 0 < int(match["port"]) < 65536:
        raise SettingsError(f"{name} {text!r}: expected host:port, [v6-address]:port or unix:/path")
    return match["v6"] or match["host"], int(match["port"])


def main(argv: Sequence[str]) -> int:
    if any(names_engine(argument) for argument in argv):
        return gateway_main(argv)
    parser = ServingParser("edl register", _DESCRIPTION, _EXAMPLES)
    parser.add_argument("endpoint", metavar="ENDPOINT", help="the server's gRPC address, host:port")
    arguments, given = parser.parse_settings(_GROUPS, argv)
    config = RegisterConfig.of(arguments["endpoint"], given)
    prepare_process("edl register", given)
    ended = threading.Event()
    registering = start_call("edl-register", lambda: keep_registered(config, ended))
    with collect_signals() as caught:
        while not caught and not registering.done():
            time.sleep(_SIGNAL_LOOK_S)
    ended.set()  # from here on, a second signal ends the process at once
    registering.result()
    return 0


def keep_registered(config: RegisterConfig, ended: threading.Event) -> None:
    """Probe the server until `ended` is set, and register it only while it is ready."""
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
        server, counted = (  # two connections, because the publisher's thread reads the counts
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
        # Derived from the server's address, so that the id does not depend on the host that runs this command.
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


_SILENT = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)


class ProbeResult(NamedTuple):
    """The outcome of a readiness probe, with a reason for the log."""

    status: ProbeStatus
    reason: str = ""


class ForeignServer:
    """Queries a server over gRPC for its state and the state of a model. Use it from a single thread."""

    def __init__(self, target: str, model: str, timeout_s: float, credentials: Credentials | None = None) -> None:
        self._target = target
        self._model = model
        self._timeout_s = timeout_s
        self._files = CredentialFiles.of(credentials or Credentials())
        self._explained = ("", "")  # gRPC's message, and its explanation
        self._connect()

    def _connect(self) -> None:
        self._version = self._files.current(now=True).version if self._files is not None else 0
        self._call_metadata = call_metadata(self._target, self._files)
        # By default, gRPC waits up to two minutes before it reconnects to a server that was away.
        options = [("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 1000)]
        self._channel = channel(self._target, self._files, options)

    def close(self) -> None:
        self._channel.close()

    def probe(self) -> ProbeResult:
        """Ask whether the server and the model are ready. A failed call is an outcome, not an error."""
        try:
            if not self._ask("ServerReady").ready:
                return ProbeResult(ProbeStatus.NOT_READY, "the server says that it is not ready")
            if not self._ask("ModelReady", name=self._model).ready:
                return ProbeResult(ProbeStatus.NOT_READY, f"the server is ready, but its model {self._model!r} is not")
        except grpc.RpcError as exc:
            status, reason = _result_of(exc, self._model)
            return ProbeResult(status, self._explain(reason) or reason)
        return ProbeResult(ProbeStatus.READY)

    def version(self) -> str:
        """Return the model's newest version; empty if the server does not report one."""
        try:
            return newest_version(self._ask("ModelMetadata", name=self._model).versions)
        except grpc.RpcError:
            return ""

    def read_counts(self) -> TeacherCounts:
        """Return the model's load; if the server does not report it, the counts contain the reason instead of rows."""
        try:
            statistics = self._ask("ModelStatistics", name=self._model)
            config = self._ask("ModelConfig", name=self._model).config
        except grpc.RpcError as exc:
            code = exc.code() if isinstance(exc, grpc.Call) else None
            note = f"the server does not report its load: {_words_of(exc)}"
            if code is grpc.StatusCode.UNIMPLEMENTED:
                note = "the server has no statistics (ModelStatistics of KServe v2)"
            return TeacherCounts(None, None, 1, None, note)
        except ValueError:  # raised by gRPC after `close` was called in another thread
            return TeacherCounts(None, None, 1, None, "the connection is closed")
        return counts_of(statistics.model_stats, config)

    def _ask(self, method: str, **fields: Any) -> Any:
        if self._files is not None and self._files.current().version != self._version:
            self._channel.close()
            self._connect()
        call: grpc.UnaryUnaryMultiCallable[Any, Any] = self._channel.unary_unary(
            names.method(method),
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=getattr(kserve, f"{method}Response").FromString,
        )
        request = getattr(kserve, f"{method}Request")(**fields)
        return call(request, timeout=self._timeout_s, metadata=self._call_metadata)

    def _explain(self, words: str) -> str:
        if self._explained[0] != words:  # an unreachable server is probed every second; explaining takes a handshake
            self._explained = words, explain_handshake(words, self._target, self._files)
        return self._explained[1]


def newest_version(versions: Sequence[str]) -> str:
    """Return the version used for requests that name no version: the highest number, else the text that sorts last."""
    # Triton's versions are 64-bit numbers. Other servers use any text, and Python cannot parse thousands of digits.
    numbers = [version for version in versions if version.isdecimal() and len(version) <= 18]
    return max(numbers, key=int) if numbers else max(versions, default="")


def counts_of(versions: Sequence[kserve.ModelStatistics], config: kserve.ModelConfig) -> TeacherCounts:
    workers = max(1, sum(max(group.count, 1) * max(len(group.gpus), 1) for group in config.instance_group))
    if not config.max_batch_size:
        note = "its model has no batch dimension, so the server counts requests rather than rows"
        return TeacherCounts(None, None, workers, None, note)
    batches = [batch for version in versions for batch in version.batch_stats]
    rows = sum(batch.batch_size * batch.compute_infer.count for batch in batches)
    compute_ns = sum(
        part.ns for batch in batches for part in (batch.compute_input, batch.compute_infer, batch.compute_output)
    )
    return TeacherCounts(rows, compute_ns / 1e9, workers, None)


def _result_of(exc: grpc.RpcError, model: str) -> ProbeResult:
    code, words = exc.code() if isinstance(exc, grpc.Call) else None, _words_of(exc)
    if code in _SILENT:
        return ProbeResult(ProbeStatus.NO_ANSWER, words)
    if code in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.INVALID_ARGUMENT):
        return ProbeResult(ProbeStatus.NOT_READY, f"the server has no model {model!r}: {words}")
    if code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
        return ProbeResult(ProbeStatus.NOT_READY, f"the server refuses edl register: {words}")
    return ProbeResult(ProbeStatus.NOT_READY, f"the server does not speak KServe v2: {words}")


def _words_of(exc: grpc.RpcError) -> str:
    return f"{exc.code().name}: {shown(exc.details() or '')}" if isinstance(exc, grpc.Call) else shown(exc)
