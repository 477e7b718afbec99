"""Shards of a data set as an iterator, with reports and a position that can be saved."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, Final, Literal

from edl.datasets import Dataset, load_dataset
from edl.discovery.common.resource import Resource
from edl.errors import (
    ClosedError,
    ConflictError,
    LeaseLostError,
    PoisonedShardsError,
    SettingsError,
    SourceError,
    TemporaryError,
)
from edl.master.client.master_client import MasterClient
from edl.master.client.session_requests import MarkRequest, ResumeRequest
from edl.master.client.session_thread import SessionThread
from edl.master.client.shard_session import Outcome, Report, Shard
from edl.master.shards.specification import check_name
from edl.quoting import clip

__all__ = ["ShardReader"]

logger = logging.getLogger(__name__)

_FORMAT: Final = 1
"""Of what `state_dict` returns."""
_NOT_OF_THE_SHARD: Final = (
    *(ClosedError, ConflictError, LeaseLostError, PoisonedShardsError, SettingsError, TemporaryError),
)
"""Errors that say nothing about a shard: a worker that ends with one gives its shards back, with no failure counted."""


class ShardReader(Resource):
    """Shards that the master gives to this reader, as long as there are any. Thread-safe.

    As an iterator it reports the shard before as done when the next is taken, and raises `PoisonedShardsError` at the
    end where shards were given up. Leave its `with` block by an exception, and the shard that you were working on has
    failed: it is tried again after all others, and given up once it has failed too often. A thread of the reader keeps
    `prefetch` shards at hand, renews the leases while the caller computes, and goes on where the master was started
    again.

    Args:
        client: of the job.
        dataset: its name at the master. A reader waits until it has been created.
        holder: the name that people see; the host and the process as it comes.
        prefetch: shards at hand beside those that the caller has. With fewer a slow worker holds less back; with more
            a fast one waits less for short shards.
        samples: the user's own source, for data sets that name none that a worker may open (`load_dataset`).
        explicit: nothing is reported but by `report_done` and its like.
        on_poisoned: "raise" or "warn", at the end of the iteration.
        stuck_s: a shard that the caller has had for so long goes to others, and a failure of it is counted: the thread
            that renews the leases would keep for ever what a caller that hangs holds, or has forgotten to report. A
            caller that needs longer for a shard sets more, or calls `consume` meanwhile; `samples` does so with each
            sample. Shards at hand that the caller does not take for so long go back, and no failure is counted.
        may_leave: asked from time to time while an iterator waits for shards that other readers have; True ends the
            iteration, and leaves what comes back to others.

    Raises:
        SettingsError: an argument cannot be used.
    """

    def __init__(
        self,
        client: MasterClient,
        dataset: str,
        *,
        holder: str | None = None,
        prefetch: int = 2,
        samples: object = None,
        explicit: bool = False,
        on_poisoned: Literal["raise", "warn"] = "raise",
        stuck_s: float = 3600.0,
        may_leave: Callable[[], bool] | None = None,
    ) -> None:
        super().__init__()
        if prefetch < 0:
            raise SettingsError(f"prefetch={prefetch!r}: must be at least 0")
        if on_poisoned not in ("raise", "warn"):
            raise SettingsError(f"on_poisoned={on_poisoned!r}: must be 'raise' or 'warn'")
        self.dataset: Final = dataset
        self.holder: Final = holder or f"{socket.gethostname()}:{os.getpid()}"
        check_name("holder", self.holder)
        check_name("data set", dataset)
        self._client = client
        self._explicit = explicit
        self._on_poisoned = on_poisoned
        self._may_leave = may_leave
        self._samples = samples
        self._opened: Dataset | None = None
        self._current: Shard | None = None
        self._taken: dict[int, Shard] = {}  # by lease, until they are reported
        self._consumed: dict[int, int] = {}
        self._sampling = False  # whether the caller works on the sample that was counted last
        self._thread = SessionThread(client, dataset, self.holder, prefetch, stuck_s)
        client.readers.add(self._thread)

    @property
    def finished(self) -> bool:
        """Whether the master has no shard any more, nor will have."""
        return self._thread.finished

    @property
    def by_checkpoint(self) -> bool:
        """Whether shards are done with a `state_dict`, and not when they are reported. Known once a shard was given."""
        return self._thread.by_checkpoint

    @property
    def poisoned(self) -> int:
        """How many shards were given up, as the master said last."""
        return self._thread.poisoned

    @property
    def refused(self) -> int:
        """How many of this reader's reports the master has refused: the shards were another's by then."""
        return self._thread.refused

    @property
    def away_s(self) -> float:
        """For how many seconds no master has answered this reader; 0.0 while it answers.

        A caller that waits a little at a time, and so never as long as the client's `timeout_s`, looks here.
        """
        return self._thread.away_s

    def take(self, timeout_s: float = 0.0) -> Shard | None:
        """Return the next shard, which is to be reported. Never raises for poisoned shards: see `poisoned`.

        Args:
            timeout_s: how long to wait for it, in seconds.

        Returns:
            The shard; None where there is none yet, or none any more (`finished`), or this was closed meanwhile.

        Raises:
            NoMasterError: the master was away for the client's `timeout_s` of the wait.
            LeaseLostError: of a data set whose shards are done with a checkpoint: the session was lost, and what was
                read after the last one is another's. Load the last checkpoint.
        """
        self._check()
        shard = self._thread.take(timeout_s)
        if shard is not None:
            self._taken[shard.id] = shard
            self._consumed[shard.id] = 0
        return shard

    def __iter__(self) -> Iterator[Shard]:
        return self

    def __next__(self) -> Shard:
        self._check()
        self._report_current()
        while not self._closed:
            shard = self.take(_WAIT_S if self._may_leave is None else _ASK_S)
            if shard is not None:
                self._current = None if self._explicit else shard
                if not self._explicit:
                    self._consumed[shard.id] = len(shard)
                return shard
            if self.finished:
                self._end()
                break
            if self._may_leave is not None and self._thread.rest(_ASK_S) and self._may_leave():
                break
        raise StopIteration

    def samples(self) -> Iterator[Any]:
        """Read the shards here.

        Yields:
            Samples. A shard that cannot be read is reported as failed, and the next one is read.

        Raises:
            SettingsError: the data set cannot be opened here.
            PoisonedShardsError: at the end, unless `on_poisoned` is "warn".
            Exception: what code of yours raised that makes the samples. The shard is reported as failed; call this
                again to go on with the next one.
        """
        for shard in self:
            self._current = shard
            self._consumed[shard.id] = 0
            try:
                samples = iter(self._data(shard).read(shard))
                while True:
                    try:
                        sample = next(samples)
                    except StopIteration:
                        break
                    self._consumed[shard.id] += 1
                    self._thread.touch(shard)
                    self._sampling = True
                    yield sample
                    self._sampling = False
            except SourceError as exc:
                self._fail_taken(exc)
            except _NOT_OF_THE_SHARD:
                raise
            except Exception as exc:
                self._fail_taken(exc)
                raise

    def report_done(self, shard: Shard, *, wait: bool = True) -> None:
        """Report that a shard is done.

        Args:
            shard: that this reader has given.
            wait: return when the master has journalled it; else at once, and a refusal is logged.

        Raises:
            LeaseLostError: the master refuses it: the lease has expired, and the message says who has the shard now.
            NoMasterError: the master was away for the client's `timeout_s`.
        """
        self._report(shard, "done", wait=wait)

    def report_failed(self, shard: Shard, reason: str, *, wait: bool = True) -> None:
        """Report that a shard could not be done: another worker tries it, until it has failed too often.

        Args:
            shard: that this reader has given.
            reason: which people see.
            wait: as for `report_done`.

        Raises:
            LeaseLostError: as for `report_done`.
            NoMasterError: as for `report_done`.
        """
        self._report(shard, "failed", reason or "no reason given", wait=wait)

    def give_back(self, shard: Shard, *, wait: bool = True) -> None:
        """Return a shard that was not done, and has not failed.

        Args:
            shard: that this reader has given.
            wait: as for `report_done`.

        Raises:
            LeaseLostError: as for `report_done`.
            NoMasterError: as for `report_done`.
        """
        self._report(shard, "returned", wait=wait)

    def report_all(self, shards: Iterable[Shard], outcome: Outcome, reason: str = "") -> None:
        """Report several shards, and wait for all of them: a refusal of one keeps no other from being reported.

        Args:
            shards: that this reader has given.
            outcome: "done", "failed" or "returned", of all.
            reason: of a failure, which people see.

        Raises:
            LeaseLostError: as for `report_done`, of one or more.
            NoMasterError: as for `report_done`; the reports are sent when there is a master again.
        """
        self._check()
        reports = [Report(shard, outcome, reason) for shard in shards]
        for report in reports:
            self._forget(report.shard)
        self._thread.deliver(reports)
        refused = [f"shard {report.shard.shard}: {report.refused}" for report in reports if report.refused is not None]
        if refused:
            raise LeaseLostError(f"this reader has these shards of {self.dataset} no more: {'; '.join(refused[:8])}")

    def consume(self, shard: Shard, units: int) -> None:
        """Say how far a shard is, for `state_dict` and `stuck_s`; the iterators do that themselves.

        Args:
            shard: that this reader has given, and which is not reported yet.
            units: of it that were used, from its beginning.

        Raises:
            SettingsError: the shard has fewer.
        """
        if not 0 <= units <= len(shard):
            raise SettingsError(f"units={units!r}: the shard has {len(shard)}")
        self._consumed[shard.id] = units
        self._thread.touch(shard)

    def state_dict(self) -> dict[str, Any]:
        """Return where this reader is, for a data set of commit="checkpoint". The master journals it.

        What an iterator has yielded counts as consumed. The master keeps the last 16 positions of a reader.

        Returns:
            Plain values, which `load_state_dict` takes in this process or another.

        Raises:
            SettingsError: shards of the data set are done when they are reported, and there is nothing to go back to.
            LeaseLostError: the session was lost: load the last checkpoint.
            NoMasterError: the master was away for the client's `timeout_s`.
        """
        self._check()
        current = self._current
        if current is not None and self._consumed.get(current.id) == len(current):
            self._report_current()
        mark = MarkRequest({lease: units for lease, units in list(self._consumed.items()) if units})
        self._thread.demand(mark)
        return {
            "format": _FORMAT,
            "job": self._client.job,
            "dataset": self.dataset,
            "holder": self.holder,
            "session": mark.session,
            "mark": mark.number,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go back to where a reader was: what it read afterwards is given again, to whoever asks.

        Args:
            state: what `state_dict` returned.

        Raises:
            SettingsError: it is another data set's, no position of a reader, or one that the master keeps no more.
            ConflictError: another reader has gone on from it.
            NoMasterError: the master was away for the client's `timeout_s`.
        """
        self._check()
        _check_position(state)
        found = (state.get("job"), state.get("dataset"))
        if found != (self._client.job, self.dataset):
            raise SettingsError(f"the position is in {found[1]!r} of job {found[0]!r}, not in {self.dataset!r}")
        self._go_back(ResumeRequest(state["holder"], state["session"], state["mark"]))

    def start_over(self) -> None:
        """Go back to before all that readers of this holder's name have read: for a process that finds no checkpoint.

        Without this, what a process marked that was killed before its first checkpoint was on disk would count as done.
        The name must be the same in each life of the process, and no other's: its rank, say.

        Raises:
            ConflictError: a reader of this name is alive.
            SettingsError: shards of the data set are done when they are reported.
            NoMasterError: the master was away for the client's `timeout_s`.
        """
        self._check()
        self._go_back(ResumeRequest(self.holder, "", 0))

    def _go_back(self, request: ResumeRequest) -> None:
        self._current = None
        self._taken.clear()
        self._consumed.clear()
        self._thread.demand(request)

    def _report_current(self) -> None:
        """Report the shard that the iterator gave last as done."""
        shard, self._current = self._current, None
        if shard is not None:
            self._report(shard, "done", wait=False)

    def _fail_taken(self, exc: BaseException) -> None:
        """Report the shards that the caller has as failed. What is known to be done of them counts."""
        self._check()
        reason = str(exc) if isinstance(exc, SourceError) else f"{type(exc).__name__}: {exc}"
        for shard in list(self._taken.values()):
            units = self._consumed.get(shard.id, 0)
            if shard is self._current:
                if self._sampling:
                    units -= 1  # the caller was at work on the last one
                elif units == len(shard):
                    units = 0  # an iterator gave it, and how far the caller came is not known
            logger.warning("shard %d of %s failed at unit %d: %s", shard.shard, self.dataset, units, reason)
            self._thread.tell(Report(shard, "failed", reason, units))
        self._current = None
        self._sampling = False
        self._taken.clear()
        self._consumed.clear()

    def _report(self, shard: Shard, outcome: Outcome, reason: str = "", *, wait: bool) -> None:
        if wait:
            self.report_all([shard], outcome, reason)
            return
        self._check()
        self._forget(shard)
        self._thread.tell(Report(shard, outcome, reason))

    def _forget(self, shard: Shard) -> None:
        self._taken.pop(shard.id, None)
        self._consumed.pop(shard.id, None)

    def _end(self) -> None:
        if not self.poisoned:
            return
        text = (
            f"{self.poisoned} shards of {self.dataset} were given up after they failed again and again: "
            f"`edl status {self._client.job}` says why, and retry_poisoned() puts them back"
        )
        if self._on_poisoned == "raise":
            raise PoisonedShardsError(text)
        logger.warning("%s", text)

    def _data(self, shard: Shard) -> Dataset:
        """Return the data set, opened here, with this shard in it."""
        if self._opened is None:
            self._opened = load_dataset(self._thread.spec, samples=self._samples)
        if not self._opened.covers(shard):
            spec = self._client.describe_dataset(self.dataset)
            if spec is not None:
                self._opened.update(spec)
        return self._opened

    def close(self, *, commit: bool = False) -> None:
        """Give open shards back, with no failure counted, and end the session. May be called twice.

        Args:
            commit: of a data set of commit="checkpoint": count what was reported after the last `state_dict` as done.
                As it comes it goes to others, also at the end of the iteration: no checkpoint has it.
        """
        if self._pid == os.getpid() and not self._closed:
            self._thread.commit = commit
        super().close()

    def _halt(self) -> None:
        self._thread.close()

    def __enter__(self) -> ShardReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(exc, Exception) and not isinstance(exc, _NOT_OF_THE_SHARD) and not self._closed:
            self._fail_taken(exc)
        self.close()


_ASK_S: Final = 0.5
"""Between two questions of `may_leave`, which may ask the master: an epoch that ends waits for as long."""
_WAIT_S: Final = 3600.0
"""Of a wait for the next shard, after which it is waited for again: others' leases may come back whenever they end."""


def _check_position(state: object) -> None:
    """Raise SettingsError for what `ShardReader.state_dict` has not returned."""
    texts = [state.get(key) for key in ("session", "holder")] if isinstance(state, Mapping) else []
    mark = state.get("mark") if isinstance(state, Mapping) else None
    if (
        not isinstance(state, Mapping)
        or state.get("format") != _FORMAT
        or not all(isinstance(text, str) and text and text.isprintable() for text in texts)
        or type(mark) is not int
        or not 0 < mark < 2**63
    ):
        raise SettingsError(
            f"{clip(repr(state), 200)} is no position of a ShardReader: pass what its state_dict() returned"
        )
