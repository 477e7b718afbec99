"""A candidate for a job's master: leads while it may, and stands by otherwise.

The candidate elected in the Store takes over the journal, and so fences the previous master. It replays the journal,
and answers workers until it is stopped, the journal fails, or another candidate leads. If the
leader's candidacy expires while the Store is unreachable, it continues to lead, because no other master can journal
anything without fencing it.

A leader's report remains in the Store, so that the next leader can check that it has the right journal.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import os
import socket
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Final

from prometheus_client import CollectorRegistry, Histogram

from edl.background import start_call
from edl.backoff import Backoff
from edl.datasets import same_data
from edl.discovery import Store, open_store
from edl.discovery.served.addresses import ListenAddress, is_loopback, outward_address
from edl.discovery.store import Election
from edl.discovery.store_url import servers_of
from edl.errors import (
    ClosedError,
    ConflictError,
    DiscoveryError,
    EDLError,
    JournalError,
    LeaseLostError,
    SettingsError,
)
from edl.grpc_server import LoopServer, make_server
from edl.master.journal import Journal, open_journal, set_aside
from edl.master.naming import MESSAGE_NBYTES, candidacy, read_report, report_key
from edl.master.scaling.workers import UnitRates
from edl.master.server.term import (
    TICK_S,
    MasterServicer,
    Term,
    describe_datasets,
    encode_report,
)
from edl.master.shards import ShardBook
from edl.master.shards.units import check_spec, describe_difference
from edl.notifier import Notifier
from edl.protocol import master as messages
from edl.protocol.channel import listen
from edl.protocol.tls import CredentialFiles
from edl.quoting import shown
from edl.settings import Credentials, DiscoverySettings

logger = logging.getLogger(__name__)

_STOP_S: Final = 0.2  # for calls in flight; clients ask the next master
_LOOK_S: Final = 0.05  # how often a candidate checks whether it leads, without asking the Store
_RIVAL_S: Final = 1.0  # how often a candidate that stands by asks the Store who leads
_RETRY_S: Final = (0.5, 5.0)  # seconds, first and longest wait before reloading the journal from an unreachable Store
_FENCED_LEASES: Final = 20
"""A leader whose journal was taken takes it back, but only once per this many leases: the master that took the journal
may be dead. If that master is alive, with a different Store, it takes the journal again within two leases."""
_IN_STORE: Final = "store"
_OPTIONS: Final = (
    ("grpc.max_receive_message_length", MESSAGE_NBYTES),
    ("grpc.max_send_message_length", MESSAGE_NBYTES),
)
_BUCKETS: Final = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
"""Buckets for commit times in seconds: a disk takes 1 ms, and a Store on several hosts takes up to its deadline of 5
s."""
_WINDOW_S: Final = 15.0  # rates are averages over this time: a shard may take seconds
_FLUSH_S: Final = 2.0  # for a report to reach the Store
_ALL_ADDRESSES: Final = ("0.0.0.0", "::", "*", "")


@dataclass(frozen=True)
class MasterSettings:
    """Settings of a master.

    Attributes:
        store: URL of the Store in which the job's masters elect a leader, and in which workers find the leader.
            Default: from the environment.
        journal: Where the state is kept: `sqlite:///absolute/path`, or `store:` for the Store itself. A master on
            another host can take over only with `store:`.
        host: Address to listen on; `::` or `0.0.0.0` for all addresses of this host.
        port: Port to listen on; 0 for any.
        lease_s: Seconds after which another master takes over from a lost leader.
        begin_anew: Start the job over, with an empty or a different journal. When this master begins to lead, it
            renames an existing journal file to set it aside.
        retry_poisoned: Requeue poisoned shards when this master begins to lead.
        credentials: Certificates and tokens to serve with.
    """

    store: str | None = None
    journal: str = "store:"
    host: str = "127.0.0.1"
    port: int = 0
    lease_s: float = 5.0
    begin_anew: bool = False
    retry_poisoned: bool = False
    credentials: Credentials = field(default_factory=Credentials)


class MasterServer(LoopServer):
    """A candidate that runs in its own threads: it never blocks its caller, and runs until it is closed or fails.

    Args:
        job: Name of the job.
        settings: Settings of this candidate.
        datasets: Specifications, by name, of data sets that the leader creates; identical data sets may already exist.
            If an existing data set with the same name differs, `failure` is a ConflictError that says how.
        metrics: Registry for the master's own metrics. Default: a new one.

    Raises:
        SettingsError: The address, the credentials, the Store's URL or a specification cannot be used.
        DiscoveryError: Another program listens at the address, or the Store's file cannot be opened.

    Attributes:
        endpoint: Address at which this candidate listens.
        failure: Why this candidate ended without being closed; None until then.
        done: Whether all data sets are done (poisoned shards may be left) and no reader has a session.
        rival: Address of the leader, if known, while this candidate stands by.
        metrics: Prometheus metrics that only the master itself can measure.
    """

    def __init__(
        self,
        job: str,
        settings: MasterSettings,
        datasets: Mapping[str, messages.DatasetSpec] | None = None,
        *,
        metrics: CollectorRegistry | None = None,
    ) -> None:
        super().__init__()
        self.job: Final = job
        self.settings: Final = settings
        self.endpoint = ""
        self.done = False
        self.rival = ""
        self.metrics: Final = CollectorRegistry() if metrics is None else metrics
        self._commits = Histogram(
            "edl_master_journal_commit_seconds",
            "Time to journal a group of commands.",
            registry=self.metrics,
            buckets=_BUCKETS,
        )
        self._datasets = {name: check_spec(name, spec) for name, spec in (datasets or {}).items()}
        self._files = CredentialFiles.of(settings.credentials, serving=True)
        self._changed = Notifier()
        self._servicer = MasterServicer(job, self._status)
        self._journal_name = _IN_STORE if settings.journal.startswith("store:") else settings.journal
        self._anew = settings.begin_anew  # until this master leads
        self._rates = UnitRates(_WINDOW_S)
        self._shown: dict[str, Any] = {}
        self._address = ListenAddress(settings.host, settings.port)
        self._address.check_free()
        self._url = DiscoverySettings.of(settings.store).url
        self._store: Store = self._own(open_store(self._url, credentials=settings.credentials))
        self._overwrites = settings.begin_anew  # a report of a later term, written with another journal
        self._newest: dict[str, Any] | None = None  # the report that waits to be written
        self._writing: Future[None] | None = None
        self._store_is_away = False
        self._start("edl-master", f"the master of job {job!r} at {self._address.endpoint}")
        if not is_loopback(settings.host) and not settings.credentials.token_file:
            logger.warning(
                "the master listens on %s without a token: anyone who reaches this port can read where the job's data "
                "are, and take or report its shards; set --token-file (docs/security.md)",
                settings.host,
            )

    @property
    def is_leader(self) -> bool:
        """Whether this candidate leads and answers workers."""
        return self._servicer.term is not None

    def wait_leading(self, timeout_s: float) -> bool:
        """Wait until this candidate leads, has failed or is closed.

        Args:
            timeout_s: Seconds to wait.

        Returns:
            Whether it leads.
        """
        self._changed.wait_for(lambda: self.is_leader or self.failure is not None or self._closed, timeout_s)
        return self.is_leader

    def wait_done(self, timeout_s: float) -> bool:
        """Wait until all data sets are done, or this candidate has failed or is closed.

        Args:
            timeout_s: Seconds to wait.

        Returns:
            Whether they are done.
        """
        self._changed.wait_for(lambda: self.done or self.failure is not None or self._closed, timeout_s)
        return self.done

    def status(self) -> dict[str, Any]:
        """Return the latest report, as in `master_reports/JOB`; empty before this candidate has led."""
        return self._shown

    def _halt(self) -> None:
        self._changed.notify()

    # --- In the event loop's thread. ---

    async def _serve(self) -> None:
        server = make_server(self._files, self._servicer.handler(), _OPTIONS)
        try:
            port = listen(server, self._address.endpoint, self._files)
        except RuntimeError as exc:
            raise SettingsError(f"a master cannot listen on {self._address.endpoint}: {exc}") from exc
        await server.start()
        try:
            self.endpoint = shown_endpoint(self.settings.host, port, self._url)
            value = {"endpoint": self.endpoint, "host": socket.gethostname(), "journal": self._journal_name}
            election = self._store.elect(candidacy(self.job), json.dumps(value).encode(), self.settings.lease_s)
            self._started.set()
            try:
                await self._campaign(election)
            finally:
                # A process that continues without its master, such as a labelling worker, must let others lead.
                await asyncio.wrap_future(start_call("edl-master-step-down", election.close))
        finally:
            self._servicer.stand_by("it ends")
            await server.stop(_STOP_S)

    async def _campaign(self, election: Election) -> None:
        """Lead whenever this candidate may, until it is stopped."""
        backoff = Backoff(*_RETRY_S, jitter=0.5)
        looked_at = 0.0
        fenced_at = -math.inf
        while not self._stop.is_set():
            if not election.is_leader:
                if time.monotonic() > looked_at + _RIVAL_S:
                    looked_at = time.monotonic()
                    self._check_rival(await self._leader(election))
                await self._sleep(_LOOK_S)
                continue
            self.rival = ""
            failure: BaseException | None
            try:
                term = await self._take_over()
                backoff.reset()
                await self._lead(term, election)
                failure = term.failure
            except (DiscoveryError, JournalError, LeaseLostError) as exc:
                failure = exc
            if self._stop.is_set() or failure is None:
                continue
            self._servicer.stand_by(str(failure))
            if isinstance(failure, LeaseLostError):
                # A new master opens the journal a moment after this one's candidacy in the Store has expired.
                if election.is_leader and not await self._sleep(self.settings.lease_s) and election.is_leader:
                    before, fenced_at = fenced_at, time.monotonic()
                    if fenced_at - before < _FENCED_LEASES * self.settings.lease_s:
                        raise SettingsError(
                            f"another master has taken the journal {self._journal_name} while this one leads in the "
                            "Store: two masters of a job must have the same Store"
                        ) from failure
                    logger.warning(
                        "another master began to lead job %r and stopped; this one continues: %s", self.job, failure
                    )
                continue
            # A master that is paused in the middle of a commit keeps its file locked until it resumes, or is killed.
            busy = isinstance(failure, JournalError) and failure.busy
            if not isinstance(failure, DiscoveryError) and not busy and self._journal_name != _IN_STORE:
                raise failure
            logger.warning("this master stands by until it can read and write the journal: %s", failure)
            await self._sleep(backoff.next_wait_s())

    async def _take_over(self) -> Term:
        url = f"store:{self.job}" if self._journal_name == _IN_STORE else self.settings.journal

        def open_and_load() -> tuple[Journal, int, ShardBook, int, dict[str, Any] | None]:
            if self._anew and self._journal_name != _IN_STORE:
                set_aside(url)
            self._anew = False
            journal = open_journal(url, store=self._store)
            try:
                number = journal.begin_term()
                snapshot, records = journal.load()
                book = ShardBook.restore(snapshot) if snapshot is not None else ShardBook()
                for record in records:
                    book.apply(messages.Command.FromString(record))
                book.events.clear()  # the master of that time has logged them
                last = None if self.settings.begin_anew else read_report(self._store, self.job)
                check_continued(last, number, self._journal_name)
                check_data(book, self._datasets)
            except BaseException:
                journal.close()
                raise
            return journal, number, book, len(records), last

        journal, number, book, replayed, last = await asyncio.wrap_future(start_call("edl-master-load", open_and_load))
        led_before = book.term > 0
        term = Term(number, book, journal, self._commits.observe, replayed=replayed)
        try:
            await term.submit(messages.Command(begin_term=messages.BeginTerm(term=number)))
            earlier = None if last is None else last.get("events")
            if isinstance(earlier, list):
                term.events.extend(event for event in earlier if isinstance(event, dict))
            if led_before:
                text = f"the master at {self.endpoint} leads, in term {number}"
                term.add_event("takeover", text, takeover_cause(last, self.endpoint))
            for name, spec in self._datasets.items():
                if name not in book.datasets:
                    command = messages.CreateDataset(dataset=name, spec=spec)
                    await term.submit(messages.Command(create_dataset=command))
            for name in list(book.datasets) if self.settings.retry_poisoned else ():
                await term.submit(messages.Command(retry_poisoned=messages.RetryPoisoned(dataset=name)))
        except BaseException as exc:
            await term.close(str(exc))
            if isinstance(exc, ClosedError) and term.failure is not None:
                raise term.failure from exc
            raise
        logger.info(
            "this master now leads job %r, at %s: term %d, data sets %s",
            *(self.job, self.endpoint, number, sorted(book.datasets)),
        )
        return term

    async def _lead(self, term: Term, election: Election) -> None:
        """Answer workers until this is stopped, the journal fails, or another master leads."""
        self._servicer.term = term
        self._changed.notify()
        looked_at = time.monotonic()
        why = "it ends"
        try:
            self._show(term)
            while not self._stop.is_set() and not term.ended:
                await self._sleep(TICK_S)
                await term.tick()
                now = time.monotonic()
                if now < looked_at + _RIVAL_S and self.done == _is_done(term):
                    continue
                looked_at = now
                self._show(term)
                leader = None if election.is_leader else await self._leader(election)
                if leader is not None and leader.get("endpoint") != self.endpoint:
                    why = "another master leads"
                    break
        except ClosedError:
            pass  # the journal has failed: `term.failure` says how
        finally:
            self._servicer.stand_by(why)
            self._show(term)
            await term.close(why)
            await self._flush_report()
            self._changed.notify()
        if why != "it ends":
            logger.warning("job %r: another master leads, and this one stands by", self.job)

    def _show(self, term: Term) -> None:
        report = self._status(term)
        self.done = _is_done(term)
        if self.done:
            self._changed.notify()
            report["state"] = "done"
        elif not self.is_leader:
            report["state"] = "stopped"
        self._shown = self._newest = report
        if self._writing is None or self._writing.done():
            self._writing = start_call("edl-master-report", self._write_reports)

    async def _flush_report(self) -> None:
        """Wait until the newest report is written, for a few seconds at most."""
        while self._writing is not None:
            done, _ = await asyncio.wait([asyncio.wrap_future(self._writing)], timeout=_FLUSH_S)
            if not done or self._newest is None:
                return
            self._writing = start_call("edl-master-report", self._write_reports)

    def _write_reports(self) -> None:
        """Write the newest report to the Store, in a thread; if the Store is unreachable, drop the report."""
        key = report_key(self.job)
        while (report := self._newest) is not None:
            self._newest = None
            try:
                entry = self._store.get(key)
                if entry is not None and _term(entry.value) > report["term"] and not self._overwrites:
                    continue  # another master has led since
                self._overwrites = False
                self._store.compare_and_set(key, encode_report(report), None if entry is None else entry.version)
                self._store_is_away = False
            except ClosedError:
                return
            except (EDLError, ValueError) as exc:
                if not self._store_is_away:
                    logger.warning("cannot write this master's report to the store; the job continues: %s", exc)
                self._store_is_away = True

    def _status(self, term: Term) -> dict[str, Any]:
        book = term.book
        statuses = [book.datasets[name].status() for name in sorted(book.datasets)]
        return {
            "job": self.job,
            "state": "leading",
            "endpoint": self.endpoint,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "journal": self._journal_name,
            "term": term.number,
            "time": round(time.time(), 3),
            "commands": book.version,
            "datasets": describe_datasets(statuses, self._rates, time.monotonic(), term.clock.silence_s),
            "events": list(term.events),
        }

    async def _leader(self, election: Election) -> dict[str, Any] | None:
        """Ask the Store which master leads; None if no master leads, or the Store is unreachable."""
        try:
            value = await asyncio.wrap_future(start_call("edl-master-rival", election.leader))
            found = json.loads(value or b"null")
        except (DiscoveryError, ClosedError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    def _check_rival(self, leader: Mapping[str, Any] | None) -> None:
        """Raise SettingsError if this master could not continue from the leader's journal."""
        if leader is None or leader.get("endpoint") == self.endpoint:
            return
        endpoint, host, journal = (str(leader.get(name, "")) for name in ("endpoint", "host", "journal"))
        if endpoint != self.rival:
            self.rival = endpoint
            then = ", and starts the job over when that master has ended" if self._anew else ""
            logger.info("job %r is led by the master at %s; this one stands by%s", self.job, endpoint, then)
        if journal != self._journal_name:
            raise SettingsError(
                f"job {self.job!r} is led by the master at {endpoint}, whose journal is {journal}: a master that "
                f"stands by needs the same journal, not {self._journal_name}"
            )
        if journal != _IN_STORE and host != socket.gethostname():
            raise SettingsError(
                f"job {self.job!r} is led by a master on {host}, whose journal is a file there: a master on another "
                "host can stand by only if both keep the journal in the Store (--journal store:)"
            )

    async def _sleep(self, seconds: float) -> bool:
        """Wait for some seconds, or until this master is stopped; return whether it is stopped."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._stop.wait(), seconds)
        return self._stop.is_set()


def _is_done(term: Term) -> bool:
    book = term.book
    return bool(book.datasets) and not book.sessions and all(dataset.is_done for dataset in book.datasets.values())


def shown_endpoint(host: str, port: int, store_url: str) -> str:
    """Return the address at which workers reach a master that listens on `host` and `port`."""
    if host in _ALL_ADDRESSES:
        host = outward_address(server for server, _ in servers_of(store_url))
    return ListenAddress(host, port).endpoint


def _term(value: bytes) -> int:
    try:
        return int(json.loads(value)["term"])
    except (ValueError, TypeError, KeyError):
        return 0


# --- What a master takes from its predecessor: `last` is that one's report. ---


def check_continued(last: Mapping[str, Any] | None, term: int, journal: str) -> None:
    """Raise SettingsError if the job was led with another journal, whose last term is not below `term`."""
    if last is None or not isinstance(last.get("term"), int) or last["term"] < term:
        return
    raise SettingsError(
        f"the progress of job {last.get('job')!r} is in a different journal, {last.get('journal')} on host "
        f"{last.get('host')}, not in {journal}: start the master with that journal, or pass --new to start the job over"
    )


def check_data(book: ShardBook, datasets: Mapping[str, messages.DatasetSpec]) -> None:
    """Raise ConflictError if `book` has different data under one of the names, or divides the data differently."""
    for name, asked in datasets.items():
        if name not in book.datasets:
            continue
        present, spec = book.datasets[name].describe().spec, check_spec(name, asked)
        if not same_data(present, spec):
            raise ConflictError(
                f"data set {name} of this job differs: {describe_difference(present, spec)}. To continue with it, start"
                " the master as before, or without data (--data); for other data, choose another name for the data set"
                " (--name) or for the job, or start over (--new), which discards all progress"
            )


def takeover_cause(last: Mapping[str, Any] | None, endpoint: str) -> str:
    """Return why the master at `endpoint` leads a job that was led before."""
    if last is None:
        return "the previous master left no report"
    if last.get("endpoint") == endpoint:
        return "another master took the journal of this master, or the journal was unreachable"
    ends = {"done": "had ended, with all data sets done", "stopped": "was stopped, or had lost its journal"}
    end = ends.get(str(last.get("state")), "ended without notice: killed, or cut off from the Store")
    return shown(f"the master at {last.get('endpoint')} on {last.get('host')} {end}")
