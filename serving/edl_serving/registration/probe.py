"""Keeps an existing server in discovery for as long as it is ready: what to do, and how to ask the server."""

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

__all__ = ["Answer", "Prober", "Server", "Turn", "Verdict", "newest_version"]


class Answer(enum.Enum):
    """What came of asking a server whether it is ready."""

    READY = "ready"
    NOT_READY = "not ready"
    NO_ANSWER = "no answer"


@dataclass(frozen=True)
class Verdict:
    """One probe's result, with words for the log."""

    answer: Answer
    reason: str = ""


class Turn(enum.Enum):
    """What to do after a probe."""

    ENTER = "enter"
    LEAVE = "leave"
    STAY = "stay"


class Prober:
    """Decides from one probe after the other. A server that says that it is not ready leaves at once; one that does
    not answer leaves after `failures` probes in a row, because a single one may be lost.

    Args:
        failures: probes without an answer, at least 1.
    """

    def __init__(self, failures: int) -> None:
        self._failures = failures
        self._missed = 0
        self._present = False

    @property
    def present(self) -> bool:
        """Whether the server should be in discovery."""
        return self._present

    def hear(self, answer: Answer) -> Turn:
        """What to do about the answer."""
        self._missed = self._missed + 1 if answer is Answer.NO_ANSWER else 0
        ready = answer is Answer.READY or (
            self._present and answer is Answer.NO_ANSWER and self._missed < self._failures
        )
        turn = Turn.STAY if ready == self._present else Turn.ENTER if ready else Turn.LEAVE
        self._present = ready
        return turn


class Server:
    """A KServe v2 server, asked over gRPC. Not thread-safe.

    Args:
        target: `host:port` or `unix:/path`.
        model: whose readiness counts.
        timeout_s: for each question.
        credentials: TLS and tokens for the server.

    Raises:
        SettingsError: they cannot be used.
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
        self._with = call_metadata(self._target, self._files)
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

    def ask(self) -> Verdict:
        """Whether server and model are ready."""
        if self._files is not None and self._files.current().version != self._version:
            self._channel.close()
            self._connect()
        timeout_s, metadata = self._timeout_s, self._with
        try:
            if not self._server_ready(kserve.ServerReadyRequest(), timeout=timeout_s, metadata=metadata).ready:
                return Verdict(Answer.NOT_READY, "the server says that it is not ready")
            request = kserve.ModelReadyRequest(name=self._model)
            if not self._model_ready(request, timeout=timeout_s, metadata=metadata).ready:
                return Verdict(Answer.NOT_READY, f"the server is ready, its model {self._model!r} is not")
        except grpc.RpcError as exc:
            verdict = _of(exc, self._model)
            return replace(verdict, reason=self._explain(verdict.reason) or verdict.reason)
        return Verdict(Answer.READY)

    def _explain(self, words: str) -> str:
        if not looks_like_handshake(words):
            return ""
        if self._explained[0] != words:  # a server that is away is asked every second, and an answer takes a handshake
            self._explained = words, asyncio.run(explain_handshake(self._target, self._files))
        return self._explained[1]

    def version(self) -> str:
        """The model's newest version; empty if the server does not say. Students ask the server itself for it."""
        try:
            request = kserve.ModelMetadataRequest(name=self._model)
            versions = self._metadata(request, timeout=self._timeout_s, metadata=self._with).versions
        except grpc.RpcError:
            return ""
        return newest_version(versions)

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()


def newest_version(versions: Sequence[str]) -> str:
    """The highest number among `versions`; where there is none, the text that sorts last. Empty for no version."""
    # Triton lists numbers, of 64 bits; elsewhere a version is any text, and of thousands of digits no number.
    numbers = [version for version in versions if version.isdecimal() and len(version) <= 18]
    return max(numbers, key=int) if numbers else max(versions, default="")


_SILENT = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)


def _of(exc: grpc.RpcError, model: str) -> Verdict:
    code = exc.code() if isinstance(exc, grpc.Call) else None
    if code in _SILENT:
        return Verdict(Answer.NO_ANSWER, _words(exc))
    if code in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.INVALID_ARGUMENT):
        return Verdict(Answer.NOT_READY, f"the server has no model {model!r}: {_words(exc)}")
    if code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
        return Verdict(Answer.NOT_READY, f"the server refuses edl register: {_words(exc)}")
    return Verdict(Answer.NOT_READY, f"the server does not speak KServe v2: {_words(exc)}")


def _words(exc: grpc.RpcError) -> str:
    if isinstance(exc, grpc.Call):
        return f"{exc.code().name}: {shown(exc.details() or '')}"
    return shown(exc)
