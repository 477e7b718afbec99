"""Calls to a job's master, which wait while there is none."""

from __future__ import annotations

import json
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

from edl.datasets import Dataset, same_data
from edl.discovery import Store, open_store
from edl.discovery.common.call_thread import CallThread
from edl.discovery.common.resource import Resource
from edl.errors import ClosedError, ConflictError, NoMasterError, SettingsError
from edl.master.client.connection import MasterConnection, NotFoundError, check_process
from edl.master.client.locator import Locator
from edl.master.client.master_wait import MasterWait
from edl.notifier import Notifier
from edl.protocol import master as messages
from edl.protocol.tls.credentials import CredentialFiles
from edl.settings import Credentials, DiscoverySettings, is_above_zero

__all__ = ["MasterClient"]

T = TypeVar("T")

DEFAULT_TIMEOUT_S: Final = 300.0
"""A master that was lost with its host is started again within minutes."""


class MasterClient(Resource):
    """Calls to the master of a job. Thread-safe; a forked child makes its own.

    Every call waits while the job has no master, or none that answers, and says so in the log. All raise
    `NoMasterError` when it was away for `timeout_s`, and `ClosedError` after `close`.

    Args:
        job: its name.
        store: in which the job's masters compete, or its URL; None for what the environment names.
        endpoint: `host:port` of the master, in place of a Store.
        timeout_s: how long calls wait for a master that is away, in seconds.
        credentials: certificates and tokens; None for what the environment names.

    Raises:
        SettingsError: an argument cannot be used, or this process was forked from one that uses gRPC.
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
        check_process()  # before a Store is opened: SQLite hangs where a thread of the parent was in the middle of it
        if not is_above_zero(timeout_s):
            raise SettingsError(f"timeout_s={timeout_s!r}: must be a number above 0")
        if store is not None and endpoint is not None:
            raise SettingsError("a master is found in a store, or at an endpoint: pass either")
        self.job: Final = job
        self.timeout_s: Final = timeout_s
        credentials = Credentials.of() if credentials is None else credentials
        self._files = CredentialFiles.of(credentials)
        found = None if endpoint is not None else self._opened(store, credentials)
        self._locator = Locator(job, found, endpoint)
        self._wait = MasterWait(job, timeout_s)
        self._using = threading.Lock()  # never held by the main thread, which signal handlers interrupt
        self._connection: MasterConnection | None = None
        self._changed = Notifier()
        self.readers: Final[weakref.WeakSet[Any]] = weakref.WeakSet()
        """Readers of this client, which drop what they have at hand when progress is restored."""
        self._calls = self._own(CallThread("edl-master-calls"))

    def create_dataset(self, name: str, dataset: Dataset | messages.DatasetSpec) -> messages.DatasetSpec:
        """Have the master hand out a data set. Does nothing where it is there already, and the same.

        Args:
            name: of the data set in the job.
            dataset: as `open_dataset` returns it, or what it is made of.

        Returns:
            What it is made of at the master.

        Raises:
            ConflictError: another data set has the name.
            SettingsError: the master cannot hand it out.
        """
        spec = dataset if isinstance(dataset, messages.DatasetSpec) else dataset.spec
        request = messages.CreateDataset(dataset=name, spec=spec)
        try:
            return _spec(self._call("CreateDataset", request, messages.DatasetReply))
        except ConflictError:
            found = self.describe_dataset(name)
            if found is None or not same_data(found, spec):
                raise
            return found

    def describe_dataset(self, name: str) -> messages.DatasetSpec | None:
        """Return what a data set is made of as it is now; None where the master has none of this name.

        Args:
            name: of the data set.
        """
        try:
            return _spec(
                self._call("DescribeDataset", messages.DescribeDatasetRequest(dataset=name), messages.DatasetReply)
            )
        except NotFoundError:
            return None

    def extend_dataset(self, name: str, units: int, index: bytes = b"", known: int | None = None) -> None:
        """Tell the master that a source without an end has grown.

        Args:
            name: of the data set.
            units: that there are in all.
            index: what is added to its index.
            known: how many the index went to before; None for no matter how many.

        Raises:
            SettingsError: there is no such data set, or it does not grow.
            ConflictError: the index goes to another unit: another follower has added to it.
        """
        request = messages.ExtendDataset(dataset=name, units=units, index=index, known=known)
        self._call("ExtendDataset", request, messages.DatasetReply)

    def flush_dataset(self, name: str) -> None:
        """Have what fills no shard yet handed out as a short one.

        Args:
            name: of the data set.

        Raises:
            SettingsError: there is no such data set, or it does not grow.
        """
        self._call("FlushDataset", messages.FlushDataset(dataset=name), messages.DatasetReply)

    def end_dataset(self, name: str) -> None:
        """Tell the master that a source grows no more.

        Args:
            name: of the data set.

        Raises:
            SettingsError: there is no such data set.
        """
        self._call("EndDataset", messages.EndDataset(dataset=name), messages.DatasetReply)

    def retry_poisoned(self, name: str, shards: Sequence[int] = ()) -> int:
        """Put poisoned shards back, with no failure counted.

        Args:
            name: of the data set.
            shards: their numbers; none for all.

        Returns:
            How many were put back.

        Raises:
            SettingsError: there is no such data set.
        """
        request = messages.RetryPoisoned(dataset=name, shards=shards)
        return self._call("RetryPoisoned", request, messages.RetryPoisonedReply).shards

    def progress(self, name: str) -> bytes:
        """Return what is done of a data set, as bytes that `restore_progress` takes.

        Args:
            name: of the data set.

        Raises:
            SettingsError: there is no such data set.
        """
        try:
            request = messages.DescribeDatasetRequest(dataset=name)
            return self._call("GetProgress", request, messages.Progress).progress
        except NotFoundError as exc:
            raise SettingsError(str(exc)) from exc

    def restore_progress(self, name: str, progress: bytes) -> None:
        """Put a data set back to where it was. Readers that have shards of it lose them.

        Args:
            name: of the data set.
            progress: what `progress` returned.

        Raises:
            SettingsError: there is no such data set, or the bytes are another's.
            ProtocolError: the bytes are no progress.
        """
        request = messages.RestoreProgress(dataset=name, progress=progress)
        self._call("RestoreProgress", request, messages.DatasetReply)
        for reader in list(self.readers):
            if reader.dataset == name:
                reader.begin_anew()

    def status(self) -> dict[str, Any]:
        """Return what the master shows: data sets with their shards by state, holders, rates, what happened lately."""
        reply = self._call("GetStatus", messages.GetStatusRequest(), messages.GetStatusReply)
        found: dict[str, Any] = json.loads(reply.json)
        return found

    def connect(self) -> MasterConnection:
        """Connect to the leading master. Not for the main thread.

        Returns:
            A connection, which the caller closes.

        Raises:
            NoMasterError: there is none that answers. This method does not wait.
        """
        self._check()
        connection = MasterConnection(self.job, self._locator.find(), self._files)
        try:
            connection.hello()
        except BaseException:
            connection.close()
            raise
        return connection

    def last_report(self) -> dict[str, Any] | None:
        """Return what a master reported that has ended since all data sets were done; None where none has."""
        return self._locator.last_report()

    def _opened(self, store: Store | str | None, credentials: Credentials) -> Store:
        if isinstance(store, Store):
            return store
        return self._own(open_store(DiscoverySettings.of(store).url, credentials=credentials))

    def _call(self, method: str, request: Any, reply: type[T]) -> T:
        self._check()
        return self._calls.run(lambda: self._insist(lambda connection: connection.call(method, request, reply)))  # type: ignore[type-var]

    def _insist(self, ask: Callable[[MasterConnection], T]) -> T:
        """Ask until a master answers: what is asked changes nothing when it is heard twice."""
        begun = time.monotonic()
        with self._using:
            while True:
                try:
                    if self._connection is None:
                        self._connection = self.connect()
                    answer = ask(self._connection)
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

    def __enter__(self) -> MasterClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _halt(self) -> None:
        self._changed.notify()
        connection = self._connection
        if connection is not None:
            connection.close()


def _spec(reply: messages.DatasetReply) -> messages.DatasetSpec:
    return reply.spec
