"""Calls to a job's master, which wait while there is none."""

from __future__ import annotations

import json
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

from google.protobuf.message import Message

from edl.datasets import Dataset, same_data
from edl.discovery import Store, open_store
from edl.discovery.resource import CallThread, Resource
from edl.errors import ClosedError, ConflictError, DiscoveryError, NoMasterError, SettingsError
from edl.master.client.connection import MasterConnection, MasterWait, NotFoundError, check_process
from edl.master.naming import election_key
from edl.master.reports import read_report
from edl.notifier import Notifier
from edl.protocol import master as messages
from edl.protocol.tls.credentials import CredentialFiles
from edl.settings import Credentials, DiscoverySettings, is_above_zero

__all__ = ["MasterClient"]

R = TypeVar("R", bound=Message)

DEFAULT_TIMEOUT_S: Final = 300.0
"""A master that was lost with its host is started again within minutes."""


class MasterClient(Resource):
    """Calls to the master of a job. Thread-safe; a forked child needs its own.

    A call waits while the job has no master or none answers, and logs that it waits. Every call may raise
    `NoMasterError` after the master was away for `timeout_s`, and `ClosedError` after `close`.

    Args:
        job: Name of the job.
        store: The Store in which the job's masters compete, or its URL. Default: the one that the environment names.
        endpoint: `host:port` of the master, instead of a Store.
        timeout_s: Seconds that a call waits for a master that is away.
        credentials: Certificates and tokens. Default: those that the environment names.

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
        check_process()  # before a Store is opened: SQLite hangs if a thread of the parent was in the middle of it
        if not is_above_zero(timeout_s):
            raise SettingsError(f"timeout_s={timeout_s!r}: must be a number above 0")
        if store is not None and endpoint is not None:
            raise SettingsError("a master is found in a store, or at an endpoint: pass either")
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
        self._using = threading.Lock()  # never held by the main thread, which signal handlers interrupt
        self._connection: MasterConnection | None = None
        self._changed = Notifier()
        self._readers: list[weakref.ref[Any]] = []
        self._calls = self._own(CallThread("edl-master-calls"))

    def create_dataset(self, name: str, dataset: Dataset | messages.DatasetSpec) -> messages.DatasetSpec:
        """Have the master hand out a data set. Does nothing if the same data set is there already.

        Args:
            name: Name of the data set in the job.
            dataset: The data set as `open_dataset` returns it, or its specification.

        Returns:
            The specification at the master.

        Raises:
            ConflictError: Another data set has the name.
            SettingsError: The master cannot hand it out.
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
        """Return the specification of a data set as it is now; None if the master has no such data set.

        Args:
            name: Name of the data set.
        """
        request = messages.DescribeDatasetRequest(dataset=name)
        try:
            return self._call("DescribeDataset", request, messages.DatasetReply).spec
        except NotFoundError:
            return None

    def extend_dataset(self, name: str, units: int, index: bytes = b"", known: int | None = None) -> None:
        """Tell the master that a source without an end has grown.

        Args:
            name: Name of the data set.
            units: Number of units in all.
            index: Bytes to add to its index.
            known: Number of units that the index covered before. Default: any.

        Raises:
            SettingsError: There is no such data set, or it does not grow.
            ConflictError: The index covers another number of units: another follower has added to it.
        """
        request = messages.ExtendDataset(dataset=name, units=units, index=index, known=known)
        self._call("ExtendDataset", request, messages.DatasetReply)

    def flush_dataset(self, name: str) -> None:
        """Have the last units, which do not fill a shard yet, handed out as a short one.

        Args:
            name: Name of the data set.

        Raises:
            SettingsError: There is no such data set, or it does not grow.
        """
        self._call("FlushDataset", messages.FlushDataset(dataset=name), messages.DatasetReply)

    def end_dataset(self, name: str) -> None:
        """Tell the master that a source will not grow any further.

        Args:
            name: Name of the data set.

        Raises:
            SettingsError: There is no such data set.
        """
        self._call("EndDataset", messages.EndDataset(dataset=name), messages.DatasetReply)

    def retry_poisoned(self, name: str, shards: Sequence[int] = ()) -> int:
        """Put poisoned shards back, with no failure counted.

        Args:
            name: Name of the data set.
            shards: Numbers of the shards. Default: all.

        Returns:
            How many were put back.

        Raises:
            SettingsError: There is no such data set.
        """
        request = messages.RetryPoisoned(dataset=name, shards=shards)
        return self._call("RetryPoisoned", request, messages.RetryPoisonedReply).shards

    def progress(self, name: str) -> bytes:
        """Return what is done of a data set, as bytes for `restore_progress`.

        Args:
            name: Name of the data set.

        Raises:
            SettingsError: There is no such data set.
        """
        try:
            request = messages.DescribeDatasetRequest(dataset=name)
            return self._call("GetProgress", request, messages.Progress).progress
        except NotFoundError as exc:
            raise SettingsError(str(exc)) from exc

    def restore_progress(self, name: str, progress: bytes) -> None:
        """Put a data set back to earlier progress. All its readers lose the shards that they have.

        Args:
            name: Name of the data set.
            progress: What `progress` returned.

        Raises:
            SettingsError: There is no such data set.
            ConflictError: The progress is of a data set with another specification.
            ProtocolError: The bytes are not progress, or are damaged.
        """
        request = messages.RestoreProgress(dataset=name, progress=progress)
        self._call("RestoreProgress", request, messages.DatasetReply)
        for reader in [reference() for reference in self._readers]:
            if reader is not None and reader.dataset == name:
                reader.begin_anew()

    def status(self) -> dict[str, Any]:
        """Return what the master shows: data sets with their shards by state, holders, rates, and recent events."""
        reply = self._call("GetStatus", messages.GetStatusRequest(), messages.GetStatusReply)
        found: dict[str, Any] = json.loads(reply.json)
        return found

    def connect(self) -> MasterConnection:
        """Connect to the leading master, without waiting for one. Not for the main thread.

        Returns:
            A connection, which the caller closes.

        Raises:
            NoMasterError: There is none that answers.
        """
        self._check()
        connection = MasterConnection(self.job, self._find(), self._files)
        try:
            connection.hello()
        except BaseException:
            connection.close()
            raise
        return connection

    def add_reader(self, reader: Any) -> None:
        """Have a reader told when progress of its data set is restored. Does not keep it alive.

        Args:
            reader: Object with the attribute `dataset`, and the method `begin_anew` to call.
        """
        self._readers.append(weakref.ref(reader))

    def final_report(self) -> dict[str, Any] | None:
        """Return the last report of a master that ended with all data sets done; None if another is to come."""
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
        """Return the endpoint of the leading master. While the Store is away, the last one known counts.

        Raises:
            NoMasterError: There is none, or the Store does not answer and none was known.
        """
        if self._store is not None:
            key = election_key(self.job)
            try:
                entry = self._store.get(key)
            except DiscoveryError as exc:
                if self._endpoint is None:
                    raise NoMasterError(f"the store cannot be asked for the master's address: {exc}") from exc
                return self._endpoint
            if entry is None:
                raise NoMasterError("no master leads")
            try:
                self._endpoint = str(json.loads(entry.value)["endpoint"])
            except (ValueError, TypeError, KeyError) as exc:
                raise NoMasterError(f"the store's value of {key} is not the address of a master") from exc
        assert self._endpoint is not None
        return self._endpoint

    def _call(self, method: str, request: Message, reply: type[R]) -> R:
        self._check()
        return self._calls.run(lambda: self._insist(lambda connection: connection.call(method, request, reply)))

    def _insist(self, ask: Callable[[MasterConnection], R]) -> R:
        """Ask until a master answers. Asking twice does no harm: every request may be repeated."""
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
