"""A request that is answered with an error, and how its message quotes what the client sent."""

from __future__ import annotations

from edl.protocol import names
from edl.protocol.transport import grpc

__all__ = ["Refusal", "clip", "invalid", "quote"]

_MAX_MESSAGE = 1000  # the status message travels as a header, and peers limit those to 8 KiB


class Refusal(Exception):
    """Ends a request with a gRPC status.

    Attributes:
        code: the status.
        message: for the person on the other side: what was refused, and what would be accepted.
        retry_after_ms: with UNAVAILABLE, when to try again here; without it, this server is no longer the place.
    """

    def __init__(self, code: grpc.StatusCode, message: str, retry_after_ms: int | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = clip(message, _MAX_MESSAGE)
        self.retry_after_ms = retry_after_ms

    @property
    def trailing_metadata(self) -> tuple[tuple[str, str], ...]:
        """What goes out beside the status."""
        if self.retry_after_ms is None:
            return ()
        return ((names.RETRY_AFTER_MS, str(self.retry_after_ms)),)


def invalid(message: str) -> Refusal:
    """The request itself is at fault: sent again, it fails again."""
    return Refusal(grpc.StatusCode.INVALID_ARGUMENT, message)


def clip(text: str, limit: int) -> str:
    """`text` with its middle left out where it is longer than `limit`."""
    if len(text) <= limit:
        return text
    return f"{text[: limit * 2 // 3]} ... {text[-limit // 4 :]}"


def quote(value: object) -> str:
    """A client's value for a message: as Python writes it, and never long."""
    if isinstance(value, str):
        value = value[:1000]  # before repr, which may be four times as long
    return clip(repr(value), 120)
