"""Readiness probes of a KServe v2 server of another make, and what a registry is to do about them."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace

from edl.protocol import kserve, names
from edl.protocol.channel import call_metadata, channel
from edl.protocol.tls.credentials import CredentialFiles
from edl.protocol.tls.handshake import explain_handshake, looks_like_handshake
from edl.protocol.transport import grpc
from edl.quoting import shown
from edl.settings import Credentials

__all__ = ["ProbeStatus", "ReadinessTracker", "ReadinessProbe", "RegistryAction", "ProbeResult", "newest_version"]


class ProbeStatus(enum.Enum):
    """The outcome of a readiness probe."""

    READY = "ready"
    NOT_READY = "not ready"
    NO_ANSWER = "no answer"


@dataclass(frozen=True)
class ProbeResult:
    """The outcome of a readiness probe, with a reason for the log.

    Attributes:
        status: the outcome.
        reason: why the server is not ready; empty if it is.
    """

    status: ProbeStatus
    reason: str = ""


class RegistryAction(enum.Enum):
    """A change of the registry that follows from a probe."""

    REGISTER = "register"
    DEREGISTER = "deregister"
    KEEP = "keep"


class ReadinessTracker:
    """Decides after a probe whether a server is registered.

    A server that says that it is not ready leaves at once. A server that does not answer leaves after `failures` probes
    in a row, because a single probe may be lost.

    Args:
        failures: probes without an answer, at least 1.
    """

    def __init__(self, failures: int) -> None:
        self._failures = failures
        self._missed = 0
        self._registered = False

    @property
    def registered(self) -> bool:
        """Whether the server should be in discovery."""
        return self._registered

    def record_probe(self, status: ProbeStatus) -> RegistryAction:
        """Count a probe.

        Args:
            status: the probe's outcome.

        Returns:
            What to do about the registry.
        """
        self._missed = self._missed + 1 if status is ProbeStatus.NO_ANSWER else 0
        ready = status is ProbeStatus.READY or (
            self._registered and status is ProbeStatus.NO_ANSWER and self._missed < self._failures
        )
        changed = ready != self._registered
        self._registered = ready
        if not changed:
            return RegistryAction.KEEP
        return RegistryAction.REGISTER if ready else RegistryAction.DEREGISTER


class ReadinessProbe:
    """Asks a KServe v2 server over gRPC whether it is ready. Not thread-safe.

    Args:
        target: `host:port` or `unix:/path`.
        model: the model that must be ready, too.
        timeout_s: for a call.
        credentials: TLS and tokens for the server.

    Raises:
        SettingsError: the credentials cannot be used.
    """

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
        self._server_ready = self._channel.unary_unary(
            names.method("ServerReady"),
            request_serializer=kserve.ServerReadyRequest.SerializeToString,
            response_deserializer=kserve.ServerReadyResponse.FromString,
        )
        self._model_ready = self._channel.unary_unary(
            names.method("ModelReady"),
            request_serializer=kserve.ModelReadyRequest.SerializeToString,
            response_deserializer=kserve.ModelReadyResponse.FromString,
        )
        self._metadata = self._channel.unary_unary(
            names.method("ModelMetadata"),
            request_serializer=kserve.ModelMetadataRequest.SerializeToString,
            response_deserializer=kserve.ModelMetadataResponse.FromString,
        )

    def probe(self) -> ProbeResult:
        """Ask whether server and model are ready.

        Returns:
            The outcome; a failed call is an outcome, too.
        """
        if self._files is not None and self._files.current().version != self._version:
            self._channel.close()
            self._connect()
        timeout_s, metadata = self._timeout_s, self._call_metadata
        try:
            if not self._server_ready(kserve.ServerReadyRequest(), timeout=timeout_s, metadata=metadata).ready:
                return ProbeResult(ProbeStatus.NOT_READY, "the server says that it is not ready")
            request = kserve.ModelReadyRequest(name=self._model)
            if not self._model_ready(request, timeout=timeout_s, metadata=metadata).ready:
                return ProbeResult(ProbeStatus.NOT_READY, f"the server is ready, its model {self._model!r} is not")
        except grpc.RpcError as exc:
            result = _result_of(exc, self._model)
            return replace(result, reason=self._explain(result.reason) or result.reason)
        return ProbeResult(ProbeStatus.READY)

    def _explain(self, words: str) -> str:
        if not looks_like_handshake(words):
            return ""
        if self._explained[0] != words:  # a server that is away is asked every second, and an answer takes a handshake
            self._explained = words, asyncio.run(explain_handshake(self._target, self._files))
        return self._explained[1]

    def version(self) -> str:
        """Return the model's newest version; empty if the server does not say.

        Students ask the server itself for it.
        """
        try:
            request = kserve.ModelMetadataRequest(name=self._model)
            versions = self._metadata(request, timeout=self._timeout_s, metadata=self._call_metadata).versions
        except grpc.RpcError:
            return ""
        return newest_version(versions)

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()


def newest_version(versions: Sequence[str]) -> str:
    """Return the version that a server means by no version.

    Args:
        versions: as the server lists them.

    Returns:
        The highest number; where there is none, the text that sorts last; empty for no version.
    """
    # Triton lists numbers, of 64 bits; elsewhere a version is any text, and of thousands of digits no number.
    numbers = [version for version in versions if version.isdecimal() and len(version) <= 18]
    return max(numbers, key=int) if numbers else max(versions, default="")


_SILENT = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)


def _result_of(exc: grpc.RpcError, model: str) -> ProbeResult:
    code = exc.code() if isinstance(exc, grpc.Call) else None
    if code in _SILENT:
        return ProbeResult(ProbeStatus.NO_ANSWER, _error_text(exc))
    if code in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.INVALID_ARGUMENT):
        return ProbeResult(ProbeStatus.NOT_READY, f"the server has no model {model!r}: {_error_text(exc)}")
    if code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
        return ProbeResult(ProbeStatus.NOT_READY, f"the server refuses edl register: {_error_text(exc)}")
    return ProbeResult(ProbeStatus.NOT_READY, f"the server does not speak KServe v2: {_error_text(exc)}")


def _error_text(exc: grpc.RpcError) -> str:
    if isinstance(exc, grpc.Call):
        return f"{exc.code().name}: {shown(exc.details() or '')}"
    return shown(exc)
