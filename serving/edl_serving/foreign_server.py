"""A KServe v2 server of another make, as `edl register` sees it: whether it is ready, and what it has computed.

What it has computed comes from Triton's extension `ModelStatistics`. Triton counts by size of the batch that a model
was executed with, so rows are the sum of sizes times executions, and compute time is that of executions.
(`inference_stats` has the time of a batch once for every request in it.)
https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_statistics.md
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Sequence
from typing import Any, NamedTuple

from edl.protocol import kserve, names
from edl.protocol.channel import call_metadata, channel
from edl.protocol.tls.credentials import CredentialFiles
from edl.protocol.tls.handshake import explain_handshake, looks_like_handshake
from edl.protocol.transport import grpc
from edl.quoting import shown
from edl.settings import Credentials
from edl_serving.registration import TeacherCounts

NO_STATISTICS = "the server has no statistics (ModelStatistics of KServe v2)"
NO_BATCHES = "its model has no batch dimension, so the server counts requests rather than rows"
_SILENT = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)


class ProbeStatus(enum.Enum):
    """The outcome of a readiness probe."""

    READY = "ready"
    NOT_READY = "not ready"
    NO_ANSWER = "no answer"


class ProbeResult(NamedTuple):
    """The outcome of a readiness probe, with a reason for the log."""

    status: ProbeStatus
    reason: str = ""


class ReadinessTracker:
    """Decides after each probe whether a server is registered.

    A server that says that it is not ready leaves at once. A server that does not answer leaves after `failures` probes
    in a row, because a single probe may be lost.
    """

    def __init__(self, failures: int) -> None:
        self._failures = failures
        self._missed = 0
        self.registered = False

    def record_probe(self, status: ProbeStatus) -> bool:
        """Count a probe; return whether the server should be in discovery."""
        self._missed = self._missed + 1 if status is ProbeStatus.NO_ANSWER else 0
        patient = self.registered and status is ProbeStatus.NO_ANSWER and self._missed < self._failures
        self.registered = status is ProbeStatus.READY or patient
        return self.registered


class ForeignServer:
    """Asks a server about itself and a model over gRPC. For a single thread."""

    def __init__(self, target: str, model: str, timeout_s: float, credentials: Credentials | None = None) -> None:
        self._target = target
        self._model = model
        self._timeout_s = timeout_s
        self._files = CredentialFiles.of(credentials or Credentials())
        self._explained = ("", "")  # gRPC's words, and what is behind them
        self._connect()

    def _connect(self) -> None:
        self._version = self._files.current(now=True).version if self._files is not None else 0
        self._call_metadata = call_metadata(self._target, self._files)
        # Left alone, gRPC waits up to two minutes before it tries a server again that was away.
        options = [("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 1000)]
        self._channel = channel(self._target, self._files, options)

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()

    def probe(self) -> ProbeResult:
        """Ask whether server and model are ready; a failed call is an outcome, too."""
        try:
            if not self._ask("ServerReady").ready:
                return ProbeResult(ProbeStatus.NOT_READY, "the server says that it is not ready")
            if not self._ask("ModelReady", name=self._model).ready:
                return ProbeResult(ProbeStatus.NOT_READY, f"the server is ready, its model {self._model!r} is not")
        except grpc.RpcError as exc:
            status, reason = _result_of(exc, self._model)
            return ProbeResult(status, self._explain(reason) or reason)
        return ProbeResult(ProbeStatus.READY)

    def version(self) -> str:
        """Return the model's newest version, empty if the server does not say."""
        try:
            return newest_version(self._ask("ModelMetadata", name=self._model).versions)
        except grpc.RpcError:
            return ""

    def read_counts(self) -> TeacherCounts:
        """Return what the model has computed; without rows, and with the reason, if the server does not say."""
        try:
            statistics = self._ask("ModelStatistics", name=self._model)
            config = self._ask("ModelConfig", name=self._model).config
        except grpc.RpcError as exc:
            code = exc.code() if isinstance(exc, grpc.Call) else None
            unknown = f"the server does not say what it computed: {_words_of(exc)}"
            note = NO_STATISTICS if code is grpc.StatusCode.UNIMPLEMENTED else unknown
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
        if not looks_like_handshake(words):
            return ""
        if self._explained[0] != words:  # a server that is away is asked every second, and an answer takes a handshake
            self._explained = words, asyncio.run(explain_handshake(self._target, self._files))
        return self._explained[1]


def newest_version(versions: Sequence[str]) -> str:
    """Return the version that a server means by no version: the highest number, else the text that sorts last."""
    # Triton lists numbers of 64 bits; elsewhere a version is any text, and thousands of digits are not a number.
    numbers = [version for version in versions if version.isdecimal() and len(version) <= 18]
    return max(numbers, key=int) if numbers else max(versions, default="")


def counts_of(versions: Sequence[kserve.ModelStatistics], config: kserve.ModelConfig) -> TeacherCounts:
    """Return what a model has computed, from the statistics of all its versions."""
    workers = max(1, sum(max(group.count, 1) * max(len(group.gpus), 1) for group in config.instance_group))
    if not config.max_batch_size:
        return TeacherCounts(None, None, workers, None, NO_BATCHES)
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
