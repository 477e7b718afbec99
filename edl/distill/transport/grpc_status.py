"""Translates gRPC statuses, of calls and of requests on a stream, for the dispatcher."""

from __future__ import annotations

import math

from edl.distill.dispatch.actions import FailureKind, RequestFailure
from edl.protocol.transport import grpc

__all__ = ["ACCESS_DENIED", "RequestFailed", "TeacherLacks", "failure_from_status"]

_REJECTED = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.OUT_OF_RANGE,
}
ACCESS_DENIED = {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED}
"""The teacher refuses this student, whatever it asks: another teacher may answer the request."""


_NOT_TAKEN_HERE = ("CLIENT: Received message larger than max", "Decompressed message larger", "Compression algorithm")
"""What gRPC says on this side of an answer that it refuses; its code is one that the teacher could have sent, too."""
_REMEDY = (
    "answers must not be compressed, nor be larger than the model's metadata say, where they say it, nor larger than "
    "Options(max_answer_bytes=...)"
)
_LONGEST_HINT_S = 60.0
"""Longest pause that a teacher may ask for: a full queue is worked off sooner, or never."""


class RequestFailed(Exception):
    """Raised for a request, or an attempt to connect, that failed. `failure` says how."""

    def __init__(self, kind: FailureKind, message: str, retry_after_s: float = 0.0) -> None:
        self.failure = RequestFailure(kind, message, retry_after_s)
        super().__init__(self.failure.message)


class TeacherLacks(RequestFailed):
    """Raised for a teacher that answered and cannot serve this student: only a change of either would help."""

    def __init__(self, message: str) -> None:
        super().__init__(FailureKind.REJECTED, message)


def failure_from_status(
    code: grpc.StatusCode, details: str, retry_after_ms: str | bytes | int | None, endpoint: str
) -> RequestFailed:
    """Return the failure that a status stands for.

    Args:
        code: Code of the status.
        details: Text of the status.
        retry_after_ms: Milliseconds that the teacher sent beside the status, None if it sent none.
        endpoint: Address of the teacher, for messages.
    """
    message = f"{endpoint}: {details or code.name}"
    if any(words in details for words in _NOT_TAKEN_HERE):
        return RequestFailed(FailureKind.BAD_OUTPUT, f"{message}; {_REMEDY}")
    if retry_after_ms is not None and code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED):
        return RequestFailed(FailureKind.OVERLOADED, message, _hinted_s(retry_after_ms))
    if code is grpc.StatusCode.UNAVAILABLE:
        return RequestFailed(FailureKind.LOST, message)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" not in details:
        return RequestFailed(FailureKind.OVERLOADED, message)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return RequestFailed(FailureKind.TIMEOUT, message)
    if code in ACCESS_DENIED:
        return RequestFailed(
            FailureKind.LOST, f"{endpoint} refuses this student ({code.name}): {details or 'no words'}"
        )
    if code in (grpc.StatusCode.CANCELLED, grpc.StatusCode.NOT_FOUND):
        # The model, or the version that is asked for, is gone: that says nothing about the request.
        return RequestFailed(FailureKind.LOST, message)
    if code in _REJECTED or code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return RequestFailed(FailureKind.REJECTED, message)
    return RequestFailed(FailureKind.ERROR, message)


def _hinted_s(milliseconds: str | bytes | int) -> float:
    """Return the teacher's hint in seconds; 0 (no hint) for anything but a finite number above 0."""
    try:
        seconds = float(milliseconds) / 1000
    except (ValueError, OverflowError):
        return 0.0
    return min(seconds, _LONGEST_HINT_S) if math.isfinite(seconds) and seconds > 0 else 0.0
