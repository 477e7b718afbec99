"""Keeps an existing server in discovery for as long as it is ready: what to do, and how to ask the server."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from edl.protocol import kserve, names
from edl.protocol.transport import grpc

__all__ = ["Answer", "Prober", "Server", "Turn", "Verdict"]


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
    """

    def __init__(self, target: str, model: str, timeout_s: float) -> None:
        self._model = model
        self._timeout_s = timeout_s
        # Left alone, gRPC waits up to two minutes before it tries a server again that was away.
        options = [("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 1000)]
        self._channel = grpc.insecure_channel(target, options=options)
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
        try:
            if not self._server_ready(kserve.ServerReadyRequest(), timeout=self._timeout_s).ready:
                return Verdict(Answer.NOT_READY, "the server says that it is not ready")
            if not self._model_ready(kserve.ModelReadyRequest(name=self._model), timeout=self._timeout_s).ready:
                return Verdict(Answer.NOT_READY, f"the server is ready, its model {self._model!r} is not")
        except grpc.RpcError as exc:
            return _of(exc, self._model)
        return Verdict(Answer.READY)

    def version(self) -> str:
        """The model's newest version; empty if the server does not say. Students ask the server itself for it."""
        try:
            versions = self._metadata(kserve.ModelMetadataRequest(name=self._model), timeout=self._timeout_s).versions
        except grpc.RpcError:
            return ""
        # Triton lists numbers; elsewhere a version is any text.
        return str(max(versions, key=lambda one: (one.isdecimal(), int(one) if one.isdecimal() else 0), default=""))

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()


_SILENT = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)


def _of(exc: grpc.RpcError, model: str) -> Verdict:
    code = exc.code() if isinstance(exc, grpc.Call) else None
    if code in _SILENT:
        return Verdict(Answer.NO_ANSWER, _words(exc))
    if code in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.INVALID_ARGUMENT):
        return Verdict(Answer.NOT_READY, f"the server has no model {model!r}: {_words(exc)}")
    return Verdict(Answer.NOT_READY, f"the server does not speak KServe v2: {_words(exc)}")


def _words(exc: grpc.RpcError) -> str:
    if isinstance(exc, grpc.Call):
        return f"{exc.code().name}: {exc.details()}"
    return str(exc)
