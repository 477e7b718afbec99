"""An iterator over the shards of a data set. It reports the shards, and its position can be saved."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, Final, Literal

from edl.datasets import Dataset, load_dataset
from edl.errors import (
    ClosedError,
    ConflictError,
    LeaseLostError,
    PoisonedShardsError,
    SettingsError,
    SourceError,
    TemporaryError,
)
from edl.master.client.conversation import Conversation, Outcome, Report, Shard
from edl.master.client.master_client import MasterClient
from edl.master.shards.units import check_name
from edl.quoting import clip
from edl.resource import Resource

logger = logging.getLogger(__name__)

_FORMAT: Final = 1
_ASK_S: Final = 0.5  # between calls of `may_leave`, which may ask the master; may delay the end of an epoch
_WAIT_S: Final = 3600.0  # other readers' shards may be requeued whenever their leases end
_NOT_OF_THE_SHARD: Final = (
    *(ClosedError, ConflictError, LeaseLostError, PoisonedShardsError, SettingsError, TemporaryError),
)
"""Errors unrelated to a shard: a worker that ends with such an error gives its shards back, with no failure counted."""


class ShardReader(Resource):
    """Provides the shards that the master gives this reader, until none is left. Thread-safe.

    As an iterator, it reports each shard as done when the next one is taken, and raises `PoisonedShardsError` at the
    end if shards were given up. If an exception leaves the reader's `with` block, the shards that you have taken and
    not reported count as failed. They are retried after all other shards, and given up once they have failed too often.
    (No failure is counted for Ctrl-C, or for EDL's errors that are unrelated to a shard, such as NoMasterError.)

    A thread prefetches `prefetch` shards, renews the leases while the caller computes, and reconnects after a restart
    of the master. Calls that wait for the master raise `NoMasterError` if it is unreachable for the client's
    `timeout_s` during the wait, and all calls raise `ClosedError` after `close`.

    Args:
        client: Client of the job.
        dataset: Name of the data set at the master. A reader waits until the data set has been created.
        holder: Displayed name. Default: the host and the process id.
        prefetch: Number of shards to prefetch, in addition to the shards that the caller has.
        samples: Your own source of samples, for data sets whose source a worker cannot open itself (`load_dataset`).
        explicit: Whether shards are reported only when you call `report_done`, `report_failed` or `give_back`.
        on_poisoned: "raise" or "warn": what to do at the end of the iteration if shards were given up.
        stuck_s: Seconds after which a shard that the caller does not work on goes to other readers, with a failure
            counted. If a shard takes longer, raise this limit, or call `consume` from time to time. (`samples` calls
            `consume` with each sample.) Prefetched shards that the caller does not take in that time are returned,
            without a failure.
        may_leave: Called from time to time while an iterator waits for other readers' shards. If it returns True, the
            iteration ends, and other readers process returned shards.

    Raises:
        SettingsError: An argument is invalid.
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
        self._taken: dict[int, Shard] = {}  # shards that the caller has taken and not reported, by lease
        self._consumed: dict[int, int] = {}  # units consumed
        self._current: Shard | None = None  # the shard that an iterator yielded last
        self._sampling = False  # whether the caller still works on its last counted sample
        self._conversation = Conversation(client, dataset, self.holder, prefetch, stuck_s)

    @property
    def finished(self) -> bool:
        """Whether the master has no shard left and will have none."""
        return self._conversation.finished

    @property
    def by_checkpoint(self) -> bool:
        """Whether shards count as done at a `state_dict`, not when reported. Known once a shard has been received."""
        return self._conversation.by_checkpoint

    @property
    def poisoned(self) -> int:
        """Number of shards given up, as last reported by the master."""
        return self._conversation.poisoned

    @property
    def refused(self) -> int:
        """Number of reports that the master refused because the shard no longer belonged to this reader."""
        return self._conversation.refused

    @property
    def away_s(self) -> float:
        """Seconds for which no master has answered this reader; 0.0 while a master answers.

        Useful if you call `take` with timeouts shorter than the client's `timeout_s`.
        """
        return self._conversation.wait.away_s

    def take(self, timeout_s: float = 0.0) -> Shard | None:
        """Return the next shard, which you must report. Never raises because of poisoned shards: see `poisoned`.

        Args:
            timeout_s: Seconds to wait for a shard.

        Returns:
            The shard; None if no shard is available yet, no shard is left (`finished`), or the reader was closed.

        Raises:
            LeaseLostError: With commit="checkpoint": the session was lost, and data read after the last checkpoint goes
                to other readers. Load the last checkpoint.
        """
        self._check()
        shard = self._conversation.take(timeout_s)
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
                if not self._explicit:
                    self._current = shard
                    self._consumed[shard.id] = len(shard)
                return shard
            if self.finished:
                self._check_poisoned()
                break
            if self._may_leave is not None and self._conversation.rest(_ASK_S) and self._may_leave():
                break
        raise StopIteration

    def samples(self) -> Iterator[Any]:
        """Read the shards' samples in this process.

        A sample counts as consumed when the next one is requested. After a `break`, call this again to continue in the
        middle of the shard.

        Yields:
            Samples. An unreadable shard is reported as failed, and the next shard is read.

        Raises:
            SettingsError: The data set cannot be opened here.
            PoisonedShardsError: At the end, unless `on_poisoned` is "warn".
            Exception: Your code that makes the samples raised this error. The shard is reported as failed; call
                `samples` again to continue with the next shard.
        """
        shard = self._current if self._sampling else None
        while True:
            if shard is None:
                shard = next(self, None)
                if shard is None:
                    return
                self._current = shard
                self._consumed[shard.id] = 0
            try:
                yield from self._samples_of(shard)
            except SourceError as exc:
                self._fail([shard], exc)
            except _NOT_OF_THE_SHARD:
                raise
            except Exception as exc:
                self._fail([shard], exc)
                raise
            shard = None

    def _samples_of(self, shard: Shard) -> Iterator[Any]:
        consumed = self._consumed.get(shard.id, len(shard))
        if consumed < len(shard):
            rest = dataclasses.replace(shard, start=shard.start + consumed)
            for sample in self._data(rest).read(rest):
                if shard.id not in self._consumed:  # meanwhile the caller went back to an earlier position
                    return
                self._consumed[shard.id] += 1
                self._conversation.touch(shard)
                self._sampling = True
                yield sample
                self._sampling = False

    def report_done(self, shard: Shard, *, wait: bool = True) -> None:
        """Report that a shard is done.

        Args:
            shard: A shard that this reader gave you.
            wait: Whether to return only once the master has journalled the report. If False, this returns at once, and
                a refusal by the master is only logged.

        Raises:
            LeaseLostError: The master refuses the report because the lease has expired; the message says who has the
                shard now.
        """
        self._report(shard, "done", wait=wait)

    def report_failed(self, shard: Shard, reason: str, *, wait: bool = True) -> None:
        """Report a shard as failed: another worker tries the shard, until the shard has failed too often.

        Args:
            shard: A shard that this reader gave you.
            reason: Human-readable text.
            wait: See `report_done`.

        Raises:
            LeaseLostError: See `report_done`.
        """
        self._report(shard, "failed", reason or "no reason given", wait=wait)

    def give_back(self, shard: Shard, *, wait: bool = True) -> None:
        """Give back a shard that is neither done nor failed.

        Args:
            shard: A shard that this reader gave you.
            wait: See `report_done`.

        Raises:
            LeaseLostError: See `report_done`.
        """
        self._report(shard, "returned", wait=wait)

    def report_all(self, shards: Iterable[Shard], outcome: Outcome, reason: str = "") -> None:
        """Report several shards, and wait for all reports: a refused report does not affect the other reports.

        Args:
            shards: Shards that this reader gave you.
            outcome: "done", "failed" or "returned", for all of them.
            reason: Human-readable text about a failure.

        Raises:
            LeaseLostError: See `report_done`; raised if at least one report was refused.
            NoMasterError: No master answers. The reports are sent once a master is back.
        """
        self._check()
        reports = [Report(self._forget(shard), outcome, reason) for shard in shards]
        self._conversation.deliver(reports)
        refused = [f"shard {report.shard.shard}: {report.refused}" for report in reports if report.refused is not None]
        if refused:
            raise LeaseLostError(f"shards of {self.dataset} no longer belong to this reader: {'; '.join(refused[:8])}")

    def consume(self, shard: Shard, units: int) -> None:
        """Record the progress within a shard, for `state_dict` and `stuck_s`. The iterators call this themselves.

        Args:
            shard: A shard that this reader gave you, and that you have not reported yet.
            units: Number of the shard's units that were used, from its start.

        Raises:
            SettingsError: `units` is negative, or above the number of units of the shard.
        """
        if not 0 <= units <= len(shard):
            raise SettingsError(f"units={units!r}: must be 0 to {len(shard)}, the number of units of the shard")
        self._consumed[shard.id] = units
        self._conversation.touch(shard)

    def state_dict(self) -> dict[str, Any]:
        """Journal the position of this reader at the master, and return it, for a data set with commit="checkpoint".

        Everything that an iterator has yielded counts as consumed. The master keeps a reader's last 16 positions.

        Returns:
            Plain values for `load_state_dict`, in this process or another.

        Raises:
            SettingsError: The data set has commit="report": there is nothing to go back to.
            LeaseLostError: The session was lost: load the last checkpoint.
        """
        self._check()
        current = self._current
        if current is not None and self._consumed.get(current.id) == len(current):
            self._report_current()
        consumed = {lease: units for lease, units in list(self._consumed.items()) if units}
        session, mark = self._conversation.mark(consumed)
        return {
            "format": _FORMAT,
            "job": self._client.job,
            "dataset": self.dataset,
            "holder": self.holder,
            "session": session,
            "mark": mark,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go back to a reader's saved position: data read after that position is handed out again, to any reader.

        Args:
            state: The result of `state_dict`.

        Raises:
            SettingsError: The state belongs to a different data set, does not come from a reader, or is no longer kept
                by the master.
            ConflictError: Another reader has resumed from this state.
        """
        self._check()
        _check_position(state)
        found = (state.get("job"), state.get("dataset"))
        if found != (self._client.job, self.dataset):
            raise SettingsError(f"the position is in {found[1]!r} of job {found[0]!r}, not in {self.dataset!r}")
        self._go_back(state["holder"], state["session"], state["mark"])

    def start_over(self) -> None:
        """Undo everything that readers with this holder's name have read, for a process that finds no checkpoint.

        Otherwise, data before the positions that an earlier run saved would count as done, although that run's first
        checkpoint never reached the disk. The holder's name must be unique, and the same in each run of the process; it
        may contain the process's rank, for example.

        Raises:
            ConflictError: Another reader with this name is alive.
            SettingsError: The data set has commit="report".
        """
        self._check()
        self._go_back(self.holder, "", 0)

    def _go_back(self, holder: str, session: str, mark: int) -> None:
        self._current = None
        self._sampling = False
        self._taken.clear()
        self._consumed.clear()
        self._conversation.resume(holder, session, mark)

    def _report_current(self) -> None:
        shard, self._current = self._current, None
        self._sampling = False
        if shard is not None:
            self._report(shard, "done", wait=False)

    def _fail(self, shards: Iterable[Shard], exc: Exception) -> None:
        """Report the caller's shards as failed, from the first unit that is not known to be done."""
        self._check()
        reason = str(exc) if isinstance(exc, SourceError) else f"{type(exc).__name__}: {exc}"
        for shard in shards:
            units = self._consumed.get(shard.id, 0)
            if shard is self._current and self._sampling:
                units -= 1  # the last sample was being processed
            elif shard is self._current and units == len(shard):
                units = 0  # yielded by the iterator, and the caller's progress is unknown
            logger.warning("shard %d of %s failed at unit %d: %s", shard.shard, self.dataset, units, reason)
            self._conversation.tell(Report(self._forget(shard), "failed", reason, units))
        self._current = None
        self._sampling = False

    def _report(self, shard: Shard, outcome: Outcome, reason: str = "", *, wait: bool) -> None:
        if wait:
            self.report_all([shard], outcome, reason)
            return
        self._check()
        self._conversation.tell(Report(self._forget(shard), outcome, reason))

    def _forget(self, shard: Shard) -> Shard:
        self._taken.pop(shard.id, None)
        self._consumed.pop(shard.id, None)
        return shard

    def _check_poisoned(self) -> None:
        if not self.poisoned:
            return
        text = (
            f"{self.poisoned} shards of {self.dataset} were given up after repeated failures: "
            f"`edl status {self._client.job}` says why, and retry_poisoned() requeues them"
        )
        if self._on_poisoned == "raise":
            raise PoisonedShardsError(text)
        logger.warning("%s", text)

    def _data(self, shard: Shard) -> Dataset:
        if self._opened is None:
            self._opened = load_dataset(self._conversation.spec, samples=self._samples)
        if not self._opened.covers(shard):
            spec = self._client.describe_dataset(self.dataset)
            if spec is not None:
                self._opened.update(spec)
        return self._opened

    def close(self, *, commit: bool = False) -> None:
        """Return open shards, with no failure counted, and end the session. May be called twice.

        Args:
            commit: With commit="checkpoint": count shards reported after the last `state_dict` as done. By default,
                these shards go to other readers, even at the end of the iteration, since no checkpoint covers them.
        """
        if self._pid == os.getpid() and not self._closed:
            self._conversation.commit = commit
        super().close()

    def _halt(self) -> None:
        self._conversation.close()

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(exc, Exception) and not isinstance(exc, _NOT_OF_THE_SHARD):
            with contextlib.suppress(ClosedError):  # closed before, or inherited through a fork
                self._fail(list(self._taken.values()), exc)
        self.close()


def _check_position(state: object) -> None:
    found = state if isinstance(state, Mapping) else {}
    mark = found.get("mark")
    if (
        found.get("format") != _FORMAT
        or not all(
            isinstance(text, str) and text.isprintable() and text for text in map(found.get, ("session", "holder"))
        )
        or type(mark) is not int
        or not 0 < mark < 2**63
    ):
        raise SettingsError(
            f"{clip(repr(state), 200)} is not a position of a ShardReader: pass the result of its state_dict()"
        )
