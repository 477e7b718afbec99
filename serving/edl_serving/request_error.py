"""A request that is answered with an error, and how its message quotes what the client sent."""

from __future__ import annotations

from edl.protocol import codec, names
from edl.protocol.codec import Buffer
from edl.protocol.transport import grpc
from edl.quoting import clip, quote

__all__ = ["Refusal", "clip", "invalid", "malformed", "quote"]

_MAX_MESSAGE = 1000  # the status message travels as a header, and peers limit those to 8 KiB


class Refusal(Exception):
    """Ends a request with a gRPC status.

    Attributes:
        code: the status.
        message: for the person on the other side: what was refused, and what would be accepted.
        retry_after_ms: with UNAVAILABLE and RESOURCE_EXHAUSTED, when to try again here; without it, this server is no
            longer the place.
        reason: one word for the metrics; the status if left out.
    """

    def __init__(
        self, code: grpc.StatusCode, message: str, retry_after_ms: int | None = None, reason: str = ""
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = clip(message, _MAX_MESSAGE)
        self.retry_after_ms = retry_after_ms
        self.reason = reason or code.name.lower()

    @property
    def trailing_metadata(self) -> tuple[tuple[str, str], ...]:
        """What goes out beside the status."""
        if self.retry_after_ms is None:
            return ()
        return ((names.RETRY_AFTER_MS, str(self.retry_after_ms)),)


def invalid(message: str) -> Refusal:
    """The request itself is at fault: sent again, it fails again."""
    return Refusal(grpc.StatusCode.INVALID_ARGUMENT, message)


def not_found(message: str) -> Refusal:
    """What the request names is not there, as Triton says it: another server may have it."""
    return Refusal(grpc.StatusCode.NOT_FOUND, message)


def malformed(data: Buffer, why: str) -> Refusal:
    """Bytes that are no message. Compressed ones are not inflated: a few hundred bytes could become gigabytes."""
    if codec.is_compressed(data):
        return invalid("this server takes no compressed messages: send them without compression")
    return invalid(why)
