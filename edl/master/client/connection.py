"""A channel to a job's master, with every error of gRPC's translated here."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Final, TypeVar

from google.protobuf.message import Message

from edl.discovery.common.resource import Resource
from edl.errors import (
    ClosedError,
    ConflictError,
    EDLError,
    LeaseLostError,
    NoMasterError,
    ProtocolError,
    RejectedError,
    SettingsError,
)
from edl.master.naming import FORMAT, SERVICE
from edl.protocol import master as messages
from edl.protocol.channel import call_metadata, channel, is_forked_from_grpc
from edl.protocol.tls.credentials import CredentialFiles
from edl.protocol.transport import grpc
from edl.quoting import shown

__all__ = ["MasterConnection", "NotFoundError", "check_process"]

R = TypeVar("R", bound=Message)

CALL_S: Final = 10.0
"""For an answer: a commit takes milliseconds, and in a Store of several hosts up to its deadline of 5 s."""
_MESSAGE_NBYTES: Final = 64 << 20
"""The index of a data set of a million file names has some 15 MB."""
_OPTIONS: Final[tuple[tuple[str, int], ...]] = (
    ("grpc.max_receive_message_length", _MESSAGE_NBYTES),
    ("grpc.max_send_message_length", _MESSAGE_NBYTES),
    ("grpc.initial_reconnect_backoff_ms", 100),  # another master takes over within seconds
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.min_reconnect_backoff_ms", 2_000),  # which is how long an attempt to connect may take, too
    ("grpc.keepalive_time_ms", 10_000),  # a host that vanished sends nothing
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.use_local_subchannel_pool", 1),  # else channels of one process share a connection, and its backoff
)


def check_process() -> None:
    """Raise SettingsError in a process that was forked from one that uses gRPC."""
    if is_forked_from_grpc():
        raise SettingsError(
            "this process was forked from one that uses gRPC (a MasterClient, a DistillReader), which does not "
            "survive a fork: start it in another way, a DataLoader's workers with "
            'DataLoader(..., multiprocessing_context="forkserver"), or with "spawn"'
        )


class NotFoundError(EDLError):
    """The master has no such data set."""


class MasterConnection(Resource):
    """A channel to the master at an endpoint. Not for the main thread, where signal handlers run (`CallThread`).

    Args:
        job: that the master there must have.
        endpoint: `host:port`.
        files: certificates and tokens, None for neither.

    Raises:
        SettingsError: a token would cross the network as it is, or gRPC cannot be used in this process.
    """

    def __init__(self, job: str, endpoint: str, files: CredentialFiles | None) -> None:
        super().__init__()
        check_process()
        self.endpoint: Final = endpoint
        self._job = job
        self._metadata = call_metadata(endpoint, files)
        self._channel = channel(endpoint, files, _OPTIONS)

    def hello(self) -> None:
        """See that the job's master answers here, and leads.

        Raises:
            NoMasterError: it does not; it may later, here or elsewhere.
            SettingsError: it is a master of another version of EDL.
        """
        reply = self.call("Hello", messages.HelloRequest(), messages.HelloReply)
        if reply.format != FORMAT:
            raise SettingsError(
                f"the master at {self.endpoint} is of another version of EDL (protocol {reply.format}, not {FORMAT})"
            )
        if reply.job != self._job:
            raise NoMasterError(f"the master at {self.endpoint} is job {shown(reply.job)!r}'s, not {self._job!r}'s")

    def call(self, method: str, request: Message, reply: type[R], timeout_s: float = CALL_S) -> R:
        """Make a unary call.

        Returns:
            The answer.

        Raises:
            NoMasterError: there was none, and the call may have been heard or not.
            EDLError: the master refuses, with its words.
        """
        self._check()
        with self.translating():
            made: Any = self._channel.unary_unary(f"/{SERVICE}/{method}", _serialize, reply.FromString)
            answer: R = made(request, timeout=timeout_s, metadata=self._metadata)
            return answer

    def stream(self, requests: Iterator[messages.NextRequest], timeout_s: float) -> Any:
        """Open a stream of turns, which ends after `timeout_s` by itself. Iterate over it within `translating`."""
        self._check()
        made: Any = self._channel.stream_stream(f"/{SERVICE}/Next", _serialize, messages.NextReply.FromString)
        with self.translating():
            return made(requests, timeout=timeout_s, metadata=self._metadata)

    @contextlib.contextmanager
    def translating(self) -> Iterator[None]:
        """Raise EDL's errors for gRPC's."""
        try:
            yield
        except grpc.RpcError as exc:
            raise self._translated(exc) from exc
        except ValueError as exc:  # gRPC's way to say that a channel is closed
            if isinstance(exc, EDLError):
                raise
            raise ClosedError(f"the connection to the master at {self.endpoint} is closed") from exc

    def _translated(self, exc: grpc.RpcError) -> EDLError:
        if self._closed:
            return ClosedError(f"the connection to the master at {self.endpoint} is closed")
        code, words = exc.code(), shown(exc.details() or "")
        if code in _REFUSALS:
            return _REFUSALS[code](words)
        if code is grpc.StatusCode.UNAUTHENTICATED:
            return RejectedError(
                f"the master at {self.endpoint} refuses this process: {words}; name its tokens in EDL_TOKEN_FILE"
            )
        if code is grpc.StatusCode.UNIMPLEMENTED:
            return NoMasterError(f"what answers at {self.endpoint} is no master of EDL: {words}")
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return NoMasterError(f"the master at {self.endpoint} did not answer in time")
        return NoMasterError(f"{self.endpoint}: {words or code.name}")

    def _halt(self) -> None:
        self._channel.close()  # which ends the calls that are under way


_REFUSALS: Final[dict[grpc.StatusCode, type[EDLError]]] = {
    grpc.StatusCode.NOT_FOUND: NotFoundError,
    grpc.StatusCode.INVALID_ARGUMENT: SettingsError,
    grpc.StatusCode.ALREADY_EXISTS: ConflictError,
    grpc.StatusCode.FAILED_PRECONDITION: LeaseLostError,
    grpc.StatusCode.DATA_LOSS: ProtocolError,
}


def _serialize(message: Message) -> bytes:
    return message.SerializeToString()
