"""A channel to a job's master, and the patience of a caller while there is none.

Everything that leaves this process for a master goes through a `MasterConnection`: single calls, and a stream of turns
on which a reader asks for shards and reports them. Errors of gRPC become EDL's here, and nowhere else: a master that
does not answer is a `NoMasterError`, which callers wait out; all other errors are the master's answer.

What does not belong here: where the master is (`master_client`), and what a reader says to it (`conversation`).
"""

from __future__ import annotations

import contextlib
import logging
import queue
import time
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeVar

from google.protobuf.message import Message

from edl.backoff import Backoff
from edl.discovery.resource import Resource
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

__all__ = ["MasterConnection", "MasterWait", "NotFoundError", "check_process"]

logger = logging.getLogger(__name__)

R = TypeVar("R", bound=Message)

CALL_S: Final = 10.0
"""Response timeout: a commit takes milliseconds, and in a Store of several hosts up to its deadline of 5 s."""
STREAM_S: Final = 60.0
"""gRPC ends a stream at this age, so a master that hangs is noticed within it."""
RENEW_STREAM_S: Final = 30.0
"""An idle stream of this age is replaced: a turn on it would have less than `STREAM_S` for its answer."""
_RETRY_S: Final = (0.1, 1.0)
"""The first and the longest wait between attempts: a restarted master answers after half a second."""
_MESSAGE_NBYTES: Final = 64 << 20
"""The index of a data set of a million file names has some 15 MB."""
_OPTIONS: Final[tuple[tuple[str, int], ...]] = (
    ("grpc.max_receive_message_length", _MESSAGE_NBYTES),
    ("grpc.max_send_message_length", _MESSAGE_NBYTES),
    ("grpc.initial_reconnect_backoff_ms", 100),  # another master takes over within seconds
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.min_reconnect_backoff_ms", 2_000),  # this is also the time limit of an attempt to connect
    ("grpc.keepalive_time_ms", 10_000),  # a host that vanished sends nothing
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.use_local_subchannel_pool", 1),  # else channels of one process share a connection and its backoff
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
    """A channel to the master of `job` at `endpoint`, a `host:port`.

    Not for the main thread, which signal handlers interrupt (`CallThread`). `exchange` is for one thread; closing the
    connection ends all calls that are under way.

    Raises:
        SettingsError: A token would cross the network unencrypted, or this process cannot use gRPC.
    """

    def __init__(self, job: str, endpoint: str, files: CredentialFiles | None) -> None:
        super().__init__()
        check_process()
        self.endpoint: Final = endpoint
        self._job = job
        self._metadata = call_metadata(endpoint, files)
        self._channel = channel(endpoint, files, _OPTIONS)
        self.on_stream_end: Callable[[], object] = lambda: None
        """Called in any thread when a stream of turns has ended, whichever side ended it. Must not block."""
        self._stream: Any = None
        self._requests: queue.SimpleQueue[messages.NextRequest | None] = queue.SimpleQueue()
        self._stream_opened = 0.0

    def hello(self) -> None:
        """Check that the job's leading master answers here.

        Raises:
            NoMasterError: It does not. It may later, here or elsewhere.
            SettingsError: The master is of another version of EDL.
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

        Raises:
            NoMasterError: No answer came. The master may have heard the call or not.
            EDLError: The master refuses, with its reason.
        """
        self._check()
        with self._translating():
            made: Any = self._channel.unary_unary(f"/{SERVICE}/{method}", _serialize, reply.FromString)
            answer: R = made(request, timeout=timeout_s, metadata=self._metadata)
            return answer

    @property
    def has_stream(self) -> bool:
        """Whether the next `exchange` uses the stream of the one before."""
        stream = self._stream
        return stream is not None and stream.is_active() and time.monotonic() < self._stream_opened + RENEW_STREAM_S

    def exchange(self, request: messages.NextRequest) -> messages.NextReply:
        """Send a message on the stream of turns, and wait for its answer.

        Raises:
            NoMasterError: No answer came. The master may have heard the message or not.
            EDLError: The master refuses, with its reason.
        """
        self._check()
        if not self.has_stream:
            self._open_stream()
        self._requests.put(request)
        try:
            with self._translating():
                for reply in self._stream:
                    answer: messages.NextReply = reply
                    return answer
            raise NoMasterError(f"the master at {self.endpoint} ended the stream")
        except BaseException:
            self.end_stream()  # it has ended, or a late answer would be mistaken for the next one
            raise

    def _open_stream(self) -> None:
        self.end_stream()
        self._requests = queue.SimpleQueue()
        self._stream_opened = time.monotonic()
        made: Any = self._channel.stream_stream(f"/{SERVICE}/Next", _serialize, messages.NextReply.FromString)
        with self._translating():
            self._stream = made(iter(self._requests.get, None), timeout=STREAM_S, metadata=self._metadata)
        self._stream.add_callback(self.on_stream_end)

    def end_stream(self) -> None:
        """End the stream of turns, if there is one. Waits for nothing."""
        stream, self._stream = self._stream, None
        if stream is not None:
            self._requests.put(None)  # gRPC's thread waits for the next message
            stream.cancel()

    @contextlib.contextmanager
    def _translating(self) -> Iterator[None]:
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
            return NoMasterError(f"the server at {self.endpoint} is not a master of EDL: {words}")
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return NoMasterError(f"the master at {self.endpoint} did not answer in time")
        return NoMasterError(f"{self.endpoint}: {words or code.name}")

    def _halt(self) -> None:
        self._requests.put(None)
        self._channel.close()  # this ends the calls that are under way


_REFUSALS: Final[dict[grpc.StatusCode, type[EDLError]]] = {
    grpc.StatusCode.NOT_FOUND: NotFoundError,
    grpc.StatusCode.INVALID_ARGUMENT: SettingsError,
    grpc.StatusCode.ALREADY_EXISTS: ConflictError,
    grpc.StatusCode.FAILED_PRECONDITION: LeaseLostError,
    grpc.StatusCode.DATA_LOSS: ProtocolError,
}


def _serialize(message: Message) -> bytes:
    return message.SerializeToString()


class MasterWait:
    """Remembers since when the master of `job` is away, for callers that wait up to `timeout_s`.

    For one thread; others may read `away_since`.
    """

    def __init__(self, job: str, timeout_s: float) -> None:
        self._job = job
        self._timeout_s = timeout_s
        self._backoff = Backoff(*_RETRY_S, jitter=0.5)
        self._reason = ""
        self.away_since: float | None = None
        """In seconds of `time.monotonic()`; None while the master answers."""

    def failed(self, exc: NoMasterError) -> float:
        """Note that the master did not answer; return the seconds until the next attempt."""
        self._reason = str(exc)
        if self.away_since is None:
            self.away_since = time.monotonic()
            logger.warning("no master of job %r answers (%s): waiting for up to %g s", self._job, exc, self._timeout_s)
        return self._backoff.next_wait_s()

    def answered(self) -> None:
        """Note that the master answers."""
        if self.away_since is not None:
            logger.info("the master of job %r answers, after %.1f s", self._job, time.monotonic() - self.away_since)
            self.away_since = None
        self._backoff.reset()

    def error(self) -> NoMasterError:
        """Return the error of a caller that has waited for `timeout_s`."""
        return NoMasterError(
            f"no master of job {self._job!r} answered within {self._timeout_s:g} s ({self._reason}): start one with "
            f"`edl master {self._job}`, with the same store"
        )
