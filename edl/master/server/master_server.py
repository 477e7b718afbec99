"""A candidate for the place of a job's master: leads while it may, and stands by otherwise.

All candidates of a job compete in the Store. The one that is elected takes over the journal, which fences the master
before it, replays it, and answers workers until it is stopped, the journal fails, or another candidate leads. Its place
in the Store may end while the Store is away; it goes on, because no other can journal anything without fencing it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import os
import socket
import threading
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from prometheus_client import CollectorRegistry, Histogram

from edl.background import BackgroundLoop, start_call
from edl.backoff import Backoff
from edl.discovery import Store, open_store
from edl.discovery.served.addresses import ListenAddress, is_loopback, outward_address
from edl.discovery.store import Election
from edl.discovery.urls import servers_of
from edl.errors import ClosedError, DiscoveryError, EDLError, JournalError, LeaseLostError, SettingsError
from edl.master.journal import Journal, open_journal, set_aside
from edl.master.naming import candidacy
from edl.master.reports import read_report
from edl.master.server.report import (
    ReportWriter,
    UnitRates,
    check_continued,
    check_data,
    describe_dataset,
    earlier_events,
    takeover_cause,
)
from edl.master.server.servicer import MasterServicer
from edl.master.server.term import TICK_S, Term, load_book
from edl.master.shards import ShardBook
from edl.master.shards.dataset_shards import check_spec
from edl.notifier import Notifier
from edl.protocol import master as messages
from edl.protocol.channel import listen
from edl.protocol.tls.credentials import CredentialFiles
from edl.protocol.token_check import token_checks
from edl.protocol.transport import grpc
from edl.resource import Resource
from edl.settings import Credentials, DiscoverySettings

__all__ = ["MasterServer", "MasterSettings", "shown_endpoint"]

logger = logging.getLogger(__name__)

_START_S: Final = 10.0
"""How long it may take to listen: milliseconds, and seconds on a machine that swaps."""
_STOP_S: Final = 0.2
"""How long calls under way may take to end; clients ask the next master."""
_LOOK_S: Final = 0.05
"""How often a candidate looks whether it leads. A look does not ask the Store."""
_RIVAL_S: Final = 1.0
"""How often a candidate that does not lead asks the Store who does."""
_RETRY_S: Final = (0.5, 5.0)
"""The first and the longest wait before the journal in a Store that is away is loaded again."""
_FENCED_LEASES: Final = 20
"""A leader that loses its journal takes it back, but only once in this many leases: the master that took it may be
dead. A live master, in another Store, takes it again within two leases."""
_MESSAGE_NBYTES: Final = 64 << 20
"""The index of a data set of a million file names has some 15 MB."""
_IN_STORE: Final = "store"
_OPTIONS: Final[tuple[tuple[str, int], ...]] = (
    ("grpc.so_reuseport", 0),  # a second server at the same port would get half of the connections
    ("grpc.max_receive_message_length", _MESSAGE_NBYTES),
    ("grpc.max_send_message_length", _MESSAGE_NBYTES),
    ("grpc.keepalive_time_ms", 10_000),  # a host that vanished must not hold its stream
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 4_000),  # clients ping every 10 s
    ("grpc.http2.max_ping_strikes", 0),
)
_AGE_MS: Final = 3_600_000
"""With TLS or tokens, a connection of this age is replaced, so that new certificates and tokens count."""
_BUCKETS: Final = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
"""Seconds of a commit: a disk takes a millisecond, and a Store of several hosts up to its deadline of 5 s."""
_ALL_ADDRESSES: Final = ("0.0.0.0", "::", "*", "")


@dataclass(frozen=True)
class MasterSettings:
    """How a master runs.

    Attributes:
        store: URL of the Store in which masters of the job compete, and workers find the leader. Default: the one that
            the environment names.
        journal: Where the state is kept: `sqlite:///absolute/path`, or `store:` for the Store itself. Only with
            `store:` can a master on another host take over.
        host: Address to listen at; `::` or `0.0.0.0` for all addresses of this host.
        port: Port to listen at; 0 for any.
        lease_s: Seconds after which another master takes over from a leader that was lost.
        begin_anew: Start the job again, with an empty journal or another one than before. When this master begins to
            lead, it sets aside the file of a journal that is there.
        retry_poisoned: Put poisoned shards back when this master begins to lead.
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


class MasterServer(Resource):
    """A candidate in threads of its own: never blocks its caller, and goes on until it is closed or has failed.

    Args:
        job: Name of the job.
        settings: Settings of this candidate.
        datasets: Specifications by name, which the leader creates; equal ones may be there. If one of the same name is
            other data, `failure` is a ConflictError that says what differs.
        metrics: Where the master registers its own metrics. Default: a new registry.

    Raises:
        SettingsError: The address, the credentials, the Store's URL or a specification cannot be used.
        DiscoveryError: Another program listens there, or the Store's file cannot be opened.
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
        self.metrics: Final = CollectorRegistry() if metrics is None else metrics
        """Of Prometheus: what only the master itself knows."""
        self._commits = Histogram(
            "edl_master_journal_commit_seconds",
            "How long it took to journal a group of commands.",
            registry=self.metrics,
            buckets=_BUCKETS,
        )
        self._datasets = {name: check_spec(name, spec) for name, spec in (datasets or {}).items()}
        self._files = CredentialFiles.of(settings.credentials, serving=True)
        self._changed = Notifier()
        self._started = threading.Event()
        self._failure: BaseException | None = None
        self._leading: Term | None = None
        self._done = False
        self._anew = settings.begin_anew  # until this master leads
        self._rates = UnitRates()
        self._shown: dict[str, Any] = {}
        self._rival = ""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._address = ListenAddress(settings.host, settings.port)
        self._address.check_free()
        self._url = DiscoverySettings.of(settings.store).url
        self._store: Store = self._own(open_store(self._url, credentials=settings.credentials))
        self._reports = ReportWriter(self._store, job, anew=settings.begin_anew)
        self._thread = self._own(BackgroundLoop("edl-master", self._run, self._interrupt))
        if not self._started.wait(_START_S):
            self._failure = DiscoveryError(f"the master at {self._address.endpoint} did not start in {_START_S:g} s")
        if self._failure is not None:
            self.close()
            raise self._failure
        if not is_loopback(settings.host) and not settings.credentials.token_file:
            logger.warning(
                "the master listens on %s without a token: anyone who reaches this port can read where the job's data "
                "are, and take or report its shards; set --token-file (docs/security.md)",
                settings.host,
            )

    @property
    def is_leader(self) -> bool:
        """Whether this candidate answers."""
        return self._leading is not None

    @property
    def failure(self) -> BaseException | None:
        """Why this candidate has ended though it was not closed."""
        return self._failure

    @property
    def done(self) -> bool:
        """Whether all data sets are, no shard being left but poisoned ones, and no reader has a session."""
        return self._done

    @property
    def rival(self) -> str:
        """Where the leader is, as far as known, while this candidate stands by."""
        return self._rival

    def wait_leading(self, timeout_s: float) -> bool:
        """Wait until this candidate leads, has failed or is closed.

        Args:
            timeout_s: Seconds to wait.

        Returns:
            Whether it leads.
        """
        self._changed.wait_for(lambda: self.is_leader or self._failure is not None or self._closed, timeout_s)
        return self.is_leader

    def wait_done(self, timeout_s: float) -> bool:
        """Wait until all data sets are done, or this candidate has failed or is closed.

        Args:
            timeout_s: Seconds to wait.

        Returns:
            Whether they are done.
        """
        self._changed.wait_for(lambda: self._done or self._failure is not None or self._closed, timeout_s)
        return self._done

    def status(self) -> dict[str, Any]:
        """Return what was shown last, as `master_reports/JOB` has it; empty before this candidate has led."""
        return self._shown

    def __enter__(self) -> MasterServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _halt(self) -> None:
        self._changed.notify()

    def _interrupt(self) -> None:
        loop, stop = self._loop, self._stop
        if loop is not None and stop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(stop.set)

    # --- In the event loop's thread. ---

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except EDLError as exc:
            self._failure = exc
        except Exception as exc:
            logger.exception("the master of job %r ended", self.job)
            self._failure = exc
        finally:
            self._leading = None
            self._started.set()
            self._changed.notify()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        if self._closed:  # before there was anything to stop
            return
        age = [("grpc.max_connection_age_ms", _AGE_MS)] if self._files is not None else []
        server = grpc.aio.server(options=[*_OPTIONS, *age], interceptors=token_checks(self._files))
        servicer = MasterServicer(self.job, self._status)
        server.add_generic_rpc_handlers((servicer.handler(),))
        try:
            port = listen(server, self._address.endpoint, self._files)
        except RuntimeError as exc:
            raise SettingsError(f"a master cannot listen at {self._address.endpoint}: {exc}") from exc
        await server.start()
        try:
            self.endpoint = shown_endpoint(self.settings.host, port, self._url)
            value = {"endpoint": self.endpoint, "host": socket.gethostname(), "journal": self._journal_name}
            election = self._store.elect(candidacy(self.job), json.dumps(value).encode(), self.settings.lease_s)
            self._started.set()
            try:
                await self._campaign(election, servicer)
            finally:
                # A process that goes on without its master, as a labelling worker does, must let others lead.
                await asyncio.wrap_future(start_call("edl-master-step-down", election.close))
        finally:
            self._leading = None
            servicer.stand_by("it ends")
            await server.stop(_STOP_S)

    @property
    def _journal_name(self) -> str:
        return _IN_STORE if self.settings.journal.startswith("store:") else self.settings.journal

    async def _campaign(self, election: Election, servicer: MasterServicer) -> None:
        """Lead whenever this candidate may, until it is stopped."""
        assert self._stop is not None
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
            self._rival = ""
            failure: BaseException | None
            try:
                term = await self._take_over()
                backoff.reset()
                await self._lead(term, election, servicer)
                failure = term.failure
            except (DiscoveryError, JournalError, LeaseLostError) as exc:
                failure = exc
            if self._stop.is_set() or failure is None:
                continue
            servicer.stand_by(str(failure))
            if isinstance(failure, LeaseLostError):
                # A master that took over sees to the journal a moment after this one's place in the Store has ended.
                if election.is_leader and not await self._sleep(self.settings.lease_s) and election.is_leader:
                    before, fenced_at = fenced_at, time.monotonic()
                    if fenced_at - before < _FENCED_LEASES * self.settings.lease_s:
                        raise SettingsError(
                            f"another master has taken the journal {self._journal_name} while this one leads in the "
                            "Store: two masters of a job must have the same Store"
                        ) from failure
                    logger.warning(
                        "another master began to lead job %r and stopped; this one goes on: %s", self.job, failure
                    )
                continue
            # A master that stands still in the middle of a commit holds its file until it goes on, or is killed.
            busy = isinstance(failure, JournalError) and failure.busy
            if not isinstance(failure, DiscoveryError) and not busy and self._journal_name != _IN_STORE:
                raise failure
            logger.warning("this master stands by until it can read and write the journal: %s", failure)
            await self._sleep(backoff.next_wait_s())

    async def _take_over(self) -> Term:
        """Load the state."""
        url = f"store:{self.job}" if self._journal_name == _IN_STORE else self.settings.journal

        def open_empty_or_kept() -> Journal:
            if self._anew and self._journal_name != _IN_STORE:
                set_aside(url)
            self._anew = False
            return open_journal(url, store=self._store)

        def load() -> tuple[int, ShardBook, int, dict[str, Any] | None]:
            number, book, replayed = load_book(journal)
            last = None if self.settings.begin_anew else read_report(self._store, self.job)
            check_continued(last, number, self._journal_name)
            check_data(book, self._datasets)
            return number, book, replayed, last

        journal = await asyncio.wrap_future(start_call("edl-master-open", open_empty_or_kept))
        try:
            number, book, replayed, last = await asyncio.wrap_future(start_call("edl-master-load", load))
            led_before = book.term > 0
            term = Term(number, book, journal, self._commits.observe)
        except BaseException:
            journal.close()
            raise
        known = set(book.datasets())
        try:
            await term.begin(replayed)
            term.events.extend(earlier_events(last))
            if led_before:
                text = f"the master at {self.endpoint} leads, in term {number}"
                term.add_event("takeover", text, takeover_cause(last, self.endpoint))
            for name, spec in self._datasets.items():
                if name not in book.datasets():
                    command = messages.CreateDataset(dataset=name, spec=spec)
                    await term.submit(messages.Command(create_dataset=command))
            for name in book.datasets() if self.settings.retry_poisoned else ():
                await term.submit(messages.Command(retry_poisoned=messages.RetryPoisoned(dataset=name)))
        except ClosedError as exc:
            await term.close(str(exc))
            raise term.failure or exc from exc
        except BaseException as exc:
            await term.close(str(exc))
            raise
        logger.info(
            "this master leads job %r from now on, at %s: term %d, %s",
            *(self.job, self.endpoint, number, _told(book, known)),
        )
        return term

    async def _lead(self, term: Term, election: Election, servicer: MasterServicer) -> None:
        """Answer workers until this is stopped, the journal fails, or another master leads."""
        assert self._stop is not None
        servicer.lead(term)
        self._leading = term
        self._changed.notify()
        looked_at = time.monotonic()
        why = "it ends"
        try:
            self._show(term)
            while not self._stop.is_set() and not term.ended.is_set():
                await self._sleep(TICK_S, term.ended)
                await term.tick()
                now = time.monotonic()
                if now < looked_at + _RIVAL_S and self._done == _is_done(term):
                    continue
                looked_at = now
                self._show(term)
                if not election.is_leader and (leader := await self._leader(election)) and not self._is_own(leader):
                    why = "another master leads"
                    break
        except ClosedError:
            pass  # the journal has failed: `term.failure` says how
        finally:
            self._leading = None
            servicer.stand_by(why)
            self._show(term)
            await term.close(why)
            await self._reports.flush()
            self._changed.notify()
        if why != "it ends":
            logger.warning("job %r: another master leads, and this one stands by", self.job)

    def _show(self, term: Term) -> None:
        """Bring the report up to date."""
        report = self._status(term)
        self._done = _is_done(term)
        if self._done:
            self._changed.notify()
            report["state"] = "done"
        elif self._leading is None:
            report["state"] = "stopped"
        self._shown = report
        self._reports.write(report)

    def _status(self, term: Term) -> dict[str, Any]:
        book, now = term.book, time.monotonic()
        datasets = [
            describe_dataset(book.status(name), self._rates, now, term.clock.silence_s)
            for name in sorted(book.datasets())
        ]
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
            "datasets": datasets,
            "events": list(term.events),
        }

    async def _leader(self, election: Election) -> dict[str, Any] | None:
        """Ask the Store which master leads; None if none does, or the Store is away."""
        try:
            value = await asyncio.wrap_future(start_call("edl-master-rival", election.leader))
        except (DiscoveryError, ClosedError):
            return None
        try:
            found = json.loads(value or b"null")
        except ValueError:
            return None
        return found if isinstance(found, dict) else None

    def _is_own(self, leader: Mapping[str, Any]) -> bool:
        return leader.get("endpoint") == self.endpoint

    def _check_rival(self, leader: Mapping[str, Any] | None) -> None:
        """Raise SettingsError if this master could not go on with what the leader has journalled."""
        if leader is None or self._is_own(leader):
            return
        endpoint, host, journal = (str(leader.get(name, "")) for name in ("endpoint", "host", "journal"))
        if endpoint != self._rival:
            self._rival = endpoint
            then = ", and starts the job again when that one has ended" if self._anew else ""
            logger.info("job %r is led by the master at %s; this one stands by%s", self.job, endpoint, then)
        if journal != self._journal_name:
            raise SettingsError(
                f"job {self.job!r} is led by the master at {endpoint}, whose journal is {journal}: a master that "
                f"stands by needs the same, not {self._journal_name}"
            )
        if journal != _IN_STORE and host != socket.gethostname():
            raise SettingsError(
                f"job {self.job!r} is led by a master on {host}, whose journal is a file there: a master of another "
                "host can stand by where both keep the journal in the Store (--journal store:)"
            )

    async def _sleep(self, seconds: float, also: asyncio.Event | None = None) -> bool:
        """Wait, until this is stopped or `also` is set; return whether it is stopped."""
        assert self._stop is not None
        waits = [asyncio.ensure_future(event.wait()) for event in (self._stop, also) if event is not None]
        try:
            await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        return self._stop.is_set()


def _is_done(term: Term) -> bool:
    names = term.book.datasets()
    return bool(names) and not term.book.sessions() and all(term.book.is_finished(name) for name in names)


def _told(book: ShardBook, known: Collection[str]) -> str:
    goes_on = {name: "goes on" if name in known else "begins" for name in sorted(book.datasets())}
    states = [f"{name} {'is done' if book.is_finished(name) else state}" for name, state in goes_on.items()]
    return ", ".join(states) or "no data set yet"


def shown_endpoint(host: str, port: int, store_url: str) -> str:
    """Return where workers reach a master that listens at `host` and `port`."""
    shown = outward_address(server for server, _ in servers_of(store_url)) if host in _ALL_ADDRESSES else host
    return f"[{shown}]:{port}" if ":" in shown else f"{shown}:{port}"
