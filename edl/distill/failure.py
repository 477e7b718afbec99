"""What a gRPC status means to the dispatcher, be it of a call or of one request on a stream."""

from __future__ import annotations

from edl.distill.actions import Failure, FailureKind
from edl.protocol.transport import grpc

__all__ = ["RequestFailed", "failure_of"]

_REJECTED = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.OUT_OF_RANGE,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNAUTHENTICATED,
}


class RequestFailed(Exception):
    """A request, or the attempt to connect, came to nothing."""

    def __init__(self, kind: FailureKind, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.failure = Failure(kind, message, retry_after_s)


def failure_of(
    code: grpc.StatusCode, details: str, retry_after_ms: str | bytes | int | None, endpoint: str
) -> RequestFailed:
    """The failure that a status stands for.

    Args:
        retry_after_ms: as the teacher sent it beside the status, None if it did not.
    """
    message = f"{endpoint}: {details or code.name}"
    if code is grpc.StatusCode.UNAVAILABLE:
        if retry_after_ms is None:
            return RequestFailed(FailureKind.LOST, message)
        return RequestFailed(FailureKind.OVERLOADED, message, _seconds(retry_after_ms))
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" not in details:
        return RequestFailed(FailureKind.OVERLOADED, message, 0.05)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return RequestFailed(FailureKind.TIMEOUT, message)
    if code is grpc.StatusCode.CANCELLED:
        return RequestFailed(FailureKind.LOST, message)
    if code in _REJECTED or code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return RequestFailed(FailureKind.REJECTED, message)
    return RequestFailed(FailureKind.ERROR, message)


def _seconds(milliseconds: str | bytes | int) -> float:
    try:
        return min(max(float(milliseconds) / 1000, 0.0), 60.0)
    except ValueError:
        return 0.05
