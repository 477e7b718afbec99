"""Calls to a job's master, which wait while no master is available, and the channel for these calls.

Only `MasterConnection` translates gRPC's errors to EDL's. A `NoMasterError` means that no master answers; callers then
wait until a master does. All other errors are answers from the master.
"""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, TypeVar

from google.protobuf.message import Message

from edl.backoff import Backoff
from edl.datasets import Dataset, same_data
from edl.discovery import Store, open_store
from edl.errors import (
    ClosedError,
    ConflictError,
    DiscoveryError,
    EDLError,
    NoMasterError,
    RejectedError,
    SettingsError,
)
from edl.master.naming import FORMAT, MESSAGE_NBYTES, REFUSALS, SERVICE, NotFoundError, election_key, read_report
from edl.notifier import Notifier
from edl.protocol import master as messages
from edl.protocol.channel import CLIENT_OPTIONS, call_metadata, channel, is_forked_from_grpc
from edl.protocol.tls import CredentialFiles
from edl.protocol.transport import grpc
from edl.quoting import did_you_mean, shown
from edl.resource import Resource
from edl.settings import Credentials, DiscoverySettings, is_above_zero

logger = logging.getLogger(__name__)

R = TypeVar("R", bound=Message)

DEFAULT_TIMEOUT_S: Final = 300.0
"""Long enough to restart a master that was lost with its host, which takes minutes."""
CALL_S: Final = 10.0  # a commit takes milliseconds, or up to 5 s, the deadline of a Store with several hosts
STREAM_S: Final = 60.0  # gRPC ends a stream at this age, so a hung master is noticed by then
RENEW_STREAM_S: Final = 30.0
"""A stream of this age is replaced: otherwise, too little of `STREAM_S` would be left for the reply to a turn."""
_RETRY_S: Final = (0.1, 1.0)  # seconds, first and longest wait: a restarted master answers after half a second
_OPTIONS: Final[tuple[tuple[str, int], ...]] = (
    ("grpc.max_receive_message_length", MESSAGE_NBYTES),
    ("grpc.max_send_message_length", MESSAGE_NBYTES),
    *CLIENT_OPTIONS,
)


class NotCreatedError(NoMasterError):
    """The leading master has no such data set yet; the data set may still be created."""


class MasterConnection(Resource):
    """A channel to the master at `endpoint` (`host:port`). SettingsError if a token would be sent unencrypted.

    Call `exchange` from one thread only; closing the connection ends all calls in flight.
    """

    def __init__(self, endpoint: str, files: CredentialFiles | None) -> None:
        super().__init__()
        self.endpoint: Final = endpoint
        self._metadata = call_metadata(endpoint, files)
        self._channel = channel(endpoint, files, _OPTIONS)
        self.on_stream_end: Callable[[], object] = lambda: None
        """Called from any thread when a stream of turns has ended, whichever side ended it. Must not block."""
        self._stream: Any = None
        self._requests: queue.SimpleQueue[messages.NextRequest | None] = queue.SimpleQueue()
        self._stream_opened = 0.0

    def call(self, method: str, request: Message, reply: type[R], timeout_s: float = CALL_S) -> R:
        """Make a unary call. After a NoMasterError, the master may or may not have received the call."""
        self._check()
        with self._translating():
            serialize = type(request).SerializeToString
            made: Any = self._channel.unary_unary(f"/{SERVICE}/{method}", serialize, reply.FromString)
            answer: R = made(request, timeout=timeout_s, metadata=self._metadata)
            return answer

    @property
    def has_stream(self) -> bool:
        """Whether the next `exchange` reuses the stream of the previous one."""
        stream = self._stream
        return stream is not None and stream.is_active() and time.monotonic() < self._stream_opened + RENEW_STREAM_S

    def exchange(self, request: messages.NextRequest) -> messages.NextReply:
        """Send a message on the stream of turns, and wait for the reply. Raises the same errors as `call`."""
        self._check()
        if not self.has_stream:
            self.end_stream()
            self._requests = queue.SimpleQueue()
            self._stream_opened = time.monotonic()
            kinds = messages.NextRequest.SerializeToString, messages.NextReply.FromString
            made: Any = self._channel.stream_stream(f"/{SERVICE}/Next", *kinds)
            with self._translating():
                self._stream = made(iter(self._requests.get, None), timeout=STREAM_S, metadata=self._metadata)
            self._stream.add_callback(self.on_stream_end)
        self._requests.put(request)
        try:
            with self._translating():
                for reply in self._stream:
                    answer: messages.NextReply = reply
                    return answer
            raise NoMasterError(f"the master at {self.endpoint} ended the stream")
        except BaseException:
            self.end_stream()  # it has ended, or a late reply would be mistaken for the next one
            raise

    def end_stream(self) -> None:
        """End the stream of turns, if there is one. Does not block."""
        stream, self._stream = self._stream, None
        if stream is not None:
            self._requests.put(None)  # gRPC's thread waits for the next message
            stream.cancel()

    @contextlib.contextmanager
    def _translating(self) -> Iterator[None]:
        try:
            yield
        except grpc.RpcError as exc:
            raise self._translated(exc) from exc
        except ValueError as exc:  # gRPC raises this on a closed channel
            if isinstance(exc, EDLError):
                raise
            raise ClosedError(f"the connection to the master at {self.endpoint} is closed") from exc

    def _translated(self, exc: grpc.RpcError) -> EDLError:
        if self._closed:
            return ClosedError(f"the connection to the master at {self.endpoint} is closed")
        code, words = exc.code(), shown(exc.details() or "")
        if code.name in REFUSALS:
            return REFUSALS[code.name](words)
        if code is grpc.StatusCode.UNAUTHENTICATED:
            return RejectedError(
                f"the master at {self.endpoint} refuses this process: {words}; set EDL_TOKEN_FILE to the file"
                " with its tokens"
            )
        if code is grpc.StatusCode.UNIMPLEMENTED:
            return NoMasterError(f"the server at {self.endpoint} is not a master of EDL: {words}")
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return NoMasterError(f"the master at {self.endpoint} did not answer in time")
        return NoMasterError(f"{self.endpoint}: {words or code.name}")

    def _halt(self) -> None:
        self._requests.put(None)
        self._channel.close()  # this ends the calls in flight


class MasterWait:
    """Tracks how long the master of `job` has been unreachable. For one thread; other threads may read `away_since`."""

    def __init__(self, job: str, timeout_s: float) -> None:
        self._job = job
        self._timeout_s = timeout_s
        self._backoff = Backoff(*_RETRY_S, jitter=0.5)
        self._last: NoMasterError | None = None
        self.away_since: float | None = None  # a `time.monotonic()` time; None while the master answers

    @property
    def away_s(self) -> float:
        """Seconds for which no master has answered; 0.0 while a master answers."""
        since = self.away_since
        return 0.0 if since is None else time.monotonic() - since

    def failed(self, exc: NoMasterError) -> float:
        """Note that the master did not answer; return the seconds until the next attempt."""
        if self.away_since is None:
            self.away_since = time.monotonic()
        if type(exc) is not type(self._last):  # a master that now answers may lack the data set
            what = "answers, but does not have the data set" if isinstance(exc, NotCreatedError) else "does not answer"
            logger.warning(
                "the master of job %r %s (%s): waiting for up to %g s", self._job, what, exc, self._timeout_s
            )
        self._last = exc
        return self._backoff.next_wait_s()

    def answered(self) -> None:
        """Note that the master answers."""
        if self.away_since is not None:
            logger.info("the master of job %r answered after %.1f s", self._job, self.away_s)
            self.away_since = self._last = None
        self._backoff.reset()

    def error(self) -> NoMasterError:
        """Return the error for a caller that has waited for `timeout_s`."""
        if isinstance(self._last, NotCreatedError):
            return NotCreatedError(f"job {self._job!r}: not created within {self._timeout_s:g} s: {self._last}")
        return NoMasterError(
            f"no master of job {self._job!r} answered within {self._timeout_s:g} s ({self._last}): start one with "
            f"`edl master {self._job}`, with the same store"
        )


class MasterClient(Resource):
    """Calls to the master of a job. Thread-safe. A forked child needs its own client.

    A call waits while the job has no master or its master does not answer, and logs that it waits. Every call may raise
    `NoMasterError` once the master has been unreachable for `timeout_s`, and `ClosedError` after `close`. Calls that
    change a data set raise `SettingsError` if the data set does not exist.

    Args:
        job: Name of the job.
        store: The Store in which the job's masters elect a leader, or the URL of that Store. Default: from the
            environment.
        endpoint: `host:port` of the master, instead of a Store.
        timeout_s: Seconds that a call waits for an unreachable master.
        credentials: Certificates and tokens. Default: from the environment.

    Raises:
        SettingsError: An argument is invalid, or this process was forked from one that uses gRPC.
    """

    def __init__(
        self,
        job: str,
        store: Store | str | None = None,
        *,
        endpoint: str | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        credentials: Credentials | None = None,
    ) -> None:
        super().__init__()
        if is_forked_from_grpc():  # before a Store is opened: SQLite hangs if a thread of the parent was inside it
            raise SettingsError(
                "this process was forked from one that uses gRPC (a MasterClient, a DistillReader), which does not "
                "survive a fork: start it without fork; for a DataLoader, pass "
                'multiprocessing_context="forkserver" or "spawn"'
            )
        if not is_above_zero(timeout_s):
            raise SettingsError(f"timeout_s={timeout_s!r}: must be a number above 0")
        if store is not None and endpoint is not None:
            raise SettingsError("store and endpoint are both given: pass only one of them")
        self.job: Final = job
        self.timeout_s: Final = timeout_s
        credentials = Credentials.of() if credentials is None else credentials
        self._files = CredentialFiles.of(credentials)
        self._endpoint = endpoint  # the last one known, if there is a Store
        self._store: Store | None = None
        if isinstance(store, Store):
            self._store = store
        elif endpoint is None:
            self._store = self._own(open_store(DiscoverySettings.of(store).url, credentials=credentials))
        self._wait = MasterWait(job, timeout_s)
        self._using = threading.Lock()
        self._connection: MasterConnection | None = None
        self._changed = Notifier()
        self.restored: Final = Counter[str]()
        """How often this client has reset each data set. After a reset, the client's readers drop prefetched shards at
        once."""

    def create_dataset(self, name: str, dataset: Dataset | messages.DatasetSpec) -> messages.DatasetSpec:
        """Create a data set for the master to hand out. Does nothing if an identical data set exists under this name.

        Args:
            name: Name of the data set in the job.
            dataset: The data set as `open_dataset` returns it, or its specification.

        Returns:
            The specification that the master has.

        Raises:
            ConflictError: A different data set already has this name.
            SettingsError: The master cannot hand out this data set.
        """
        spec = dataset if isinstance(dataset, messages.DatasetSpec) else dataset.spec
        request = messages.CreateDataset(dataset=name, spec=spec)
        try:
            return self._call("CreateDataset", request, messages.DatasetReply).spec
        except ConflictError:
            found = self.describe_dataset(name)
            if found is None or not same_data(found, spec):
                raise
            return found

    def describe_dataset(self, name: str) -> messages.DatasetSpec | None:
        """Return the current specification of a data set; None if the master has no such data set.

        Args:
            name: Name of the data set.
        """
        request = messages.DescribeDatasetRequest(dataset=name)
        try:
            return self._call("DescribeDataset", request, messages.DatasetReply).spec
        except NotFoundError:
            return None

    def extend_dataset(self, name: str, units: int, index: bytes = b"", known: int | None = None) -> None:
        """Tell the master that an endless source has grown. All units are handed out, the last ones in a shorter shard.

        Args:
            name: Name of the data set.
            units: Total number of units.
            index: Bytes to add to the data set's index.
            known: Number of units that the index covered before. Default: any.

        Raises:
            SettingsError: The data set does not grow.
            ConflictError: Another follower has extended the index, or the source has ended.
        """
        request = messages.ExtendDataset(dataset=name, units=units, index=index, known=known)
        self._call("ExtendDataset", request, messages.DatasetReply)

    def end_dataset(self, name: str) -> None:
        """Tell the master that a source will not grow any further.

        Args:
            name: Name of the data set.

        Raises:
            SettingsError: The data set does not grow.
        """
        self._call("EndDataset", messages.EndDataset(dataset=name), messages.DatasetReply)

    def retry_poisoned(self, name: str, shards: Sequence[int] = ()) -> int:
        """Requeue poisoned shards, and reset their failure counts.

        Args:
            name: Name of the data set.
            shards: Numbers of the shards. Default: all.

        Returns:
            Number of requeued shards.

        Raises:
            ConflictError: One of `shards` is not poisoned.
        """
        request = messages.RetryPoisoned(dataset=name, shards=shards)
        return self._call("RetryPoisoned", request, messages.RetryPoisonedReply).shards

    def progress(self, name: str) -> bytes:
        """Return the progress of a data set, as bytes for `restore_progress`.

        Args:
            name: Name of the data set.

        Raises:
            SettingsError: There is no such data set.
        """
        request = messages.DescribeDatasetRequest(dataset=name)
        return self._call("GetProgress", request, messages.Progress).progress

    def restore_progress(self, name: str, progress: bytes | None) -> None:
        """Reset a data set to earlier progress. All its readers lose their shards.

        Args:
            name: Name of the data set.
            progress: The result of `progress`. None resets the data set to its beginning, for a job that finds no
                checkpoint.

        Raises:
            ConflictError: The progress has a different specification, or the source has not grown that far here.
            ProtocolError: The bytes do not contain progress, or are damaged.
        """
        request = messages.RestoreProgress(dataset=name, progress=progress)
        self._call("RestoreProgress", request, messages.DatasetReply)
        self.restored[name] += 1

    def status(self) -> dict[str, Any]:
        """Return the master's status: data sets with their shards by state, holders, rates, and recent events."""
        reply = self._call("GetStatus", messages.GetStatusRequest(), messages.GetStatusReply)
        found: dict[str, Any] = json.loads(reply.json)
        return found

    def connect(self) -> MasterConnection:
        """Return a connection to the leading master; the caller closes it.

        Raises:
            NoMasterError: No master answers.
            SettingsError: The master runs a different version of EDL.
        """
        self._check()
        connection = MasterConnection(self._find(), self._files)
        try:
            reply = connection.call("Hello", messages.HelloRequest(), messages.HelloReply)
            where = f"the master at {connection.endpoint}"
            if reply.format != FORMAT:
                raise SettingsError(f"{where} has a different version of EDL (protocol {reply.format}, not {FORMAT})")
            if reply.job != self.job:
                raise NoMasterError(f"{where} belongs to job {shown(reply.job)!r}, not to {self.job!r}")
        except BaseException:
            connection.close()
            raise
        return connection

    def final_report(self) -> dict[str, Any] | None:
        """Return the last report of a master that ended with all data sets done; None if another master may follow."""
        if self._store is None:
            return None
        try:
            report = read_report(self._store, self.job)
            if report is None or report.get("state") != "done" or self._store.get(election_key(self.job)) is not None:
                return None
        except DiscoveryError:
            return None
        return report

    def _find(self) -> str:
        """Return the leader's endpoint; if the Store is unreachable, the last known one. NoMasterError if unknown."""
        if self._store is not None:
            key = election_key(self.job)
            try:
                entry = self._store.get(key)
                others = self._store.list(f"{key}-") if entry is None else []
            except DiscoveryError as exc:
                if self._endpoint is None:
                    raise NoMasterError(f"the store cannot be asked for the master's address: {exc}") from exc
                return self._endpoint
            if entry is None:
                names = [other.key.removeprefix(election_key("")) for other in others]
                raise NoMasterError(f"no master leads{did_you_mean(self.job, names)}")
            try:
                self._endpoint = str(json.loads(entry.value)["endpoint"])
            except (ValueError, TypeError, KeyError) as exc:
                raise NoMasterError(f"the store's value at {key} is not the address of a master") from exc
        assert self._endpoint is not None
        return self._endpoint

    def _call(self, method: str, request: Message, reply: type[R]) -> R:
        """Repeat a request until a master answers; NoMasterError after `timeout_s`. All requests are safe to repeat."""
        self._check()
        begun = time.monotonic()
        with self._using:
            while True:
                try:
                    if self._connection is None:
                        self._connection = self.connect()
                    answer = self._connection.call(method, request, reply)
                except NoMasterError as exc:
                    connection, self._connection = self._connection, None
                    if connection is not None:
                        connection.close()
                    wait_s = self._wait.failed(exc)
                    left_s = begun + self.timeout_s - time.monotonic()
                    if left_s <= 0:
                        raise self._wait.error() from exc
                    self._changed.wait_for(lambda: self._closed, min(wait_s, left_s))
                    if self._closed:
                        raise ClosedError("MasterClient is closed") from exc
                else:
                    self._wait.answered()
                    return answer

    def _halt(self) -> None:
        self._changed.notify()
        connection = self._connection
        if connection is not None:
            connection.close()
