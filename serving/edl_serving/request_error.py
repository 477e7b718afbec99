"""Errors that end a request. Their messages quote what the client sent."""

from __future__ import annotations

from edl.protocol import codec, names
from edl.protocol.codec import Buffer
from edl.protocol.transport import grpc
from edl.quoting import clip

_MAX_MESSAGE = 1000  # the status message travels as a header, and peers limit those to 8 KiB


class RequestError(Exception):
    """Ends a request with a gRPC status.

    The message tells the client's user what was refused and what would be accepted. `retry_after_ms` is sent with
    UNAVAILABLE and RESOURCE_EXHAUSTED; it is None if the client should ask another server. `reason` is used in the
    metrics.
    """

    def __init__(
        self, code: grpc.StatusCode, message: str, retry_after_ms: int | None = None, reason: str = ""
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = clip(message, _MAX_MESSAGE)
        self.retry_after_ms = retry_after_ms
        self.reason = reason or code.name.lower()

    def copy(self) -> RequestError:
        return RequestError(self.code, self.message, self.retry_after_ms, self.reason)

    @property
    def trailing_metadata(self) -> tuple[tuple[str, str], ...]:
        if self.retry_after_ms is None:
            return ()
        return ((names.RETRY_AFTER_MS, str(self.retry_after_ms)),)


def invalid_argument(message: str) -> RequestError:
    return RequestError(grpc.StatusCode.INVALID_ARGUMENT, message)


def not_found(message: str) -> RequestError:
    return RequestError(grpc.StatusCode.NOT_FOUND, message)


def malformed_message(data: Buffer, why: str) -> RequestError:
    """Return the error for bytes that do not parse. No bytes are decompressed: a few hundred could become gigabytes."""
    if codec.is_compressed(data):
        return invalid_argument("this server takes no compressed messages: send them without compression")
    return invalid_argument(why)
