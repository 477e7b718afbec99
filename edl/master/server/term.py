"""A term of a leading master: the state and its journal, session clocks, workers' calls, and the report.

Commands are ordered by the event loop, which applies them to the book at once. A thread journals them in groups:
commands that arrive during a commit form the next group. No command is answered before it is in the journal. Refusals
also wait for the journal: the reason for a refusal may be a command that is not in the journal yet.

Clocks are kept here, not in the book, so an expiry becomes a command, too.

`master.proto` is the table of calls: if a method's request is a kind of `Command`, the request is applied to the book;
`Next` is a stream of such requests; every other method only reads.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

from edl.background import BackgroundLoop, start_call
from edl.errors import ClosedError, EDLError, LeaseLostError, SettingsError
from edl.master.journal import Journal
from edl.master.naming import FORMAT, REFUSALS, SERVICE, NotFoundError
from edl.master.scaling.workers import UnitRates
from edl.master.shards import ShardBook
from edl.protocol import master as messages
from edl.protocol.transport import grpc
from edl.quoting import did_you_mean

logger = logging.getLogger(__name__)

TICK_S: Final = 0.25  # how often a leader checks for expiries
PAUSE_S: Final = 1.0  # most that a late check counts for: the process was paused, and read no messages
_IDLE_S: Final = 3600.0  # the committing thread is always woken sooner
_GROUP: Final = 512  # commands per commit: with more, the first of them would wait too long
_SNAPSHOT_NBYTES: Final = 32 << 20  # of commands until a snapshot replaces them: replaying them takes seconds
_COMMAND_NBYTES: Final = 320
"""Bytes added to the size of each command: 100,000 small commands take as long to replay as 32 MB of large commands."""
_EVENTS: Final = 50
_NBYTES: Final = 200_000  # largest report: a value in the Store may take 256 KiB
_HOLDERS: Final = 200  # listed per data set, the busiest first


class LeaseClock:
    """Tracks which sessions have been silent for too long. The clock stops while the process is paused."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._seen = monotonic()
        self._now = 0.0
        self._heard: dict[str, float] = {}
        self._silent: set[str] = set()  # whose leases have ended since they were last heard

    def hear(self, session: str) -> None:
        """Note that a session has been heard from."""
        self._heard[session] = self._now
        self._silent.discard(session)

    def silence_s(self, session: str) -> float:
        """Return how long a session had been silent at the last check."""
        return self._now - self._heard.get(session, self._now)

    def due(self, limits: Mapping[str, tuple[float, float]]) -> tuple[list[str], list[str]]:
        """Advance the clock; return sessions whose leases ended since the last check, and sessions that have ended.

        `limits` maps each live session to two numbers of seconds: the silence after which its leases end, and the
        silence after which the session itself ends. A session counts as heard when it first appears here: gRPC
        cancels the call of a worker that died, so a session may be open although `open_session` did not return.
        """
        at = self._monotonic()
        self._now += min(at - self._seen, PAUSE_S)
        self._seen = at
        self._heard = {session: self._heard.get(session, self._now) for session in limits}
        self._silent.intersection_update(limits)
        silent: list[str] = []
        over: list[str] = []
        for session, (lease_s, session_s) in limits.items():
            silence_s = self.silence_s(session)
            if silence_s > session_s:
                over.append(session)
            elif silence_s > lease_s and session not in self._silent:
                silent.append(session)
        self._silent.update(silent)
        return silent, over


class _Entry(NamedTuple):
    """A task for the committing thread, and the future that waits for the task."""

    answered: asyncio.Future[None]
    record: bytes | None = None
    snapshot: bytes | None = None


class Term:
    """Accepts commands as long as the journal does. Use it only in the thread of the event loop that created it.

    `journal` assigned the term's `number`, and `close` closes the journal; `book` is the state in the journal. If a
    write to the journal fails, `failure` says why, `ended` is set, and no command is answered from then on. `observe`
    is called with the seconds that each commit took, in the committing thread. `replayed` is how many commands in the
    journal are not in a snapshot yet.
    """

    def __init__(
        self,
        number: int,
        book: ShardBook,
        journal: Journal,
        observe: Callable[[float], object],
        *,
        replayed: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.number: Final = number
        self.book: Final = book
        self.failure: BaseException | None = None
        self.ended = False
        self.events: deque[dict[str, Any]] = deque(maxlen=_EVENTS)
        self.clock: Final = LeaseClock(clock)
        self._journal = journal
        self._observe = observe
        self._loop = asyncio.get_running_loop()
        self._pending: deque[_Entry] = deque()
        self._why_closed: BaseException | None = None
        self._since_snapshot = replayed * _COMMAND_NBYTES
        self._snapshot_coming = False
        self._thread = BackgroundLoop("edl-master-commit", self._commit)

    async def submit(self, command: messages.Command) -> Any:
        """Apply a command; return the book's answer once the journal has the command.

        An EDLError from the book is a refusal, which has changed nothing. After a ClosedError, it is unknown whether
        the command took effect.
        """
        self._check()
        command.time_ms = round(time.time() * 1000)
        before = self.book.version
        try:
            answer = self.book.apply(command)
        except EDLError:
            await self.settled()  # the reason may be a command that the journal does not have yet
            raise
        if self.book.version == before:  # a repeated request
            await self.settled()
            return answer
        record = command.SerializeToString()
        journalled = self._append(record=record)
        self._since_snapshot += _COMMAND_NBYTES + len(record)
        if self._since_snapshot >= _SNAPSHOT_NBYTES:
            self.take_snapshot()
        await journalled
        return answer

    async def settled(self) -> None:
        """Wait until the journal has every command applied so far; ClosedError as for `submit`."""
        self._check()
        await self._append()

    def take_snapshot(self) -> None:
        """Replace the records so far with a snapshot of the present state."""
        self._since_snapshot = 0
        self._snapshot_coming = True
        self._append(snapshot=self.book.snapshot())

    async def open_session(self, request: messages.OpenSession) -> messages.NextReply:
        """Open or resume a session; return the number of its last request, and its leases."""
        reply: messages.NextReply = await self.submit(messages.Command(open_session=request))
        self.clock.hear(request.session)
        return reply

    async def turn(self, turn: messages.Turn) -> messages.NextReply:
        """Apply a session's reports; return its shards. The reply must not be changed. Turn 0 is only a heartbeat."""
        self.clock.hear(turn.session)
        if turn.request == 0:
            if turn.session not in self.book.sessions:
                raise LeaseLostError(f"session {turn.session!r} has ended: it was silent for too long")
            return messages.NextReply()
        reply: messages.NextReply = await self.submit(messages.Command(turn=turn))
        return reply

    async def tick(self) -> None:
        """Expire leases and sessions that were not renewed, and record the book's events."""
        specs = {session: info.dataset.spec for session, info in self.book.sessions.items()}
        silent, over = self.clock.due({session: (spec.lease_s, spec.session_s) for session, spec in specs.items()})
        leases = [lease for session in silent for lease in self.book.sessions[session].leases]
        if leases or over:
            await self.submit(messages.Command(expire=messages.Expire(leases=leases, sessions=over)))
        while self.book.events:
            kind, dataset, text, cause = self.book.events.popleft()
            self.add_event(kind, f"{dataset}: {text}", cause)

    def add_event(self, kind: str, text: str, cause: str) -> None:
        """Log an event and keep it for the report. Kinds are those of `ShardBook.events`, and `takeover`."""
        logger.info("%s: %s: %s", kind, text, cause)
        self.events.append({"time": round(time.time(), 3), "kind": kind, "text": text, "cause": cause})

    async def close(self, why: str) -> None:
        """Stop answering, and close the journal. Pending commands get a ClosedError."""
        self._end(ClosedError(why))

        def close() -> None:
            self._thread.close()
            self._journal.close()

        await asyncio.wrap_future(start_call("edl-master-close", close))

    def _check(self) -> None:
        if self._why_closed is not None:
            raise ClosedError(f"this master ends: {self._why_closed}")

    def _append(self, *, record: bytes | None = None, snapshot: bytes | None = None) -> asyncio.Future[None]:
        entry = _Entry(self._loop.create_future(), record, snapshot)
        self._pending.append(entry)
        self._thread.wake()
        return entry.answered

    def _end(self, why: BaseException) -> None:
        self._why_closed = self._why_closed or why
        pending, self._pending = self._pending, deque()
        _refuse(list(pending), why)
        self._thread.wake()
        self.ended = True

    def _fail(self, exc: BaseException, group: list[_Entry]) -> None:
        _refuse(group, exc)
        if self._why_closed is None:
            self.failure = exc
            self._end(exc)

    def _release(self, group: list[_Entry]) -> None:
        for entry in group:
            if not entry.answered.done():
                entry.answered.set_result(None)
            if entry.snapshot is not None:
                self._snapshot_coming = False
        if self._journal.snapshot_due and not self._snapshot_coming and self._why_closed is None:
            self.take_snapshot()

    # --- In the committing thread. ---

    def _commit(self) -> float | None:
        while self._why_closed is None:
            group: list[_Entry] = []
            with contextlib.suppress(IndexError):  # nothing more waits
                while len(group) < _GROUP and not (group and group[-1].snapshot is not None):
                    group.append(self._pending.popleft())
            if not group:
                return _IDLE_S
            try:
                self._write(group)
            except Exception as exc:  # noqa: BLE001 - whatever it is: what is not journalled must not be answered
                self._loop.call_soon_threadsafe(self._fail, exc, group)
                return None
            self._loop.call_soon_threadsafe(self._release, group)
        return None

    def _write(self, group: list[_Entry]) -> None:
        records = [entry.record for entry in group if entry.record is not None]
        if records:
            begun = time.perf_counter()
            self._journal.append(records)
            self._observe(time.perf_counter() - begun)
        snapshot = group[-1].snapshot
        if snapshot is not None:
            self._journal.snapshot(snapshot)


def _refuse(group: list[_Entry], why: BaseException) -> None:
    for entry in group:
        if not entry.answered.done():
            entry.answered.set_exception(ClosedError(f"this master ends: {why}"))
            entry.answered.exception()  # a cancelled call never retrieves it


# --- Calls of workers. ---

_COMMAND: Final[Any] = messages.Command.DESCRIPTOR
_FIELDS: Final[dict[str, str]] = {
    field.message_type.name: field.name for field in _COMMAND.oneofs_by_name["kind"].fields
}
"""The field of a `Command` that holds a request, by the request's type."""


class MasterServicer:
    """Answers calls while `term` is set. While it is None, this master stands by, and refuses with UNAVAILABLE."""

    def __init__(self, job: str, status: Callable[[Term], dict[str, Any]]) -> None:
        self._job = job
        self._status = status
        self.term: Term | None = None
        self._why = "it has just been started"
        self._streams: dict[asyncio.Task[Any], str] = {}  # and the session that each opened last

    def stand_by(self, why: str) -> None:
        """Refuse calls from now on, and end streams, so that workers look for the next master at once."""
        self.term = None
        self._why = why
        for stream in self._streams:
            stream.cancel()

    def handler(self) -> grpc.GenericRpcHandler:
        """Return the method handlers for gRPC's server."""
        handlers: dict[str, Any] = {}
        for method in _COMMAND.file.services_by_name[SERVICE.rpartition(".")[2]].methods:
            request, reply = (getattr(messages, kind.name) for kind in (method.input_type, method.output_type))
            if method.name == "Next":
                handler = grpc.stream_stream_rpc_method_handler(self._next, request.FromString, reply.SerializeToString)
            else:
                answer = partial(self._answer, method.name, reply)
                handler = grpc.unary_unary_rpc_method_handler(answer, request.FromString, reply.SerializeToString)
            handlers[method.name] = handler
        return grpc.method_handlers_generic_handler(SERVICE, handlers)

    def _leading(self) -> Term:
        if self.term is None:
            raise ClosedError(f"this master of job {self._job!r} stands by: {self._why}")
        return self.term

    async def _answer(self, method: str, reply: Callable[[], Any], request: Any, context: Any) -> Any:
        with _refusing(context):
            term = self._leading()
            field = _FIELDS.get(request.DESCRIPTOR.name)
            if field is None:
                answer = self._read(method, term, request)
                await term.settled()  # the state may be ahead of the journal
            else:
                if field in ("mark", "resume"):
                    term.clock.hear(request.session)
                answer = await term.submit(messages.Command(**{field: request}))
            if field == "restore_progress":
                # So that readers whose sessions were ended drop their prefetched shards at once.
                for stream, session in self._streams.items():
                    if session and session not in term.book.sessions:
                        stream.cancel()
            return reply() if answer is None else answer
        return reply()

    def _read(self, method: str, term: Term, request: Any) -> Any:
        if method == "Hello":
            return messages.HelloReply(format=FORMAT, job=self._job, term=term.number)
        if method == "GetStatus":
            return messages.GetStatusReply(json=json.dumps(self._status(term)))
        dataset = term.book.datasets.get(request.dataset)
        if dataset is None:
            there = sorted(term.book.datasets)
            hint = did_you_mean(request.dataset, there)
            raise NotFoundError(f"data set {request.dataset!r} does not exist; existing data sets: {there}{hint}")
        if method == "DescribeDataset":
            return dataset.describe()
        assert method == "GetProgress", method
        return messages.Progress(progress=dataset.progress())

    async def _next(self, requests: AsyncIterator[messages.NextRequest], context: Any) -> None:
        """Answer the turns of a session, in order. A stream may carry several sessions, one after the other."""
        stream = asyncio.current_task()
        assert stream is not None
        self._streams[stream] = ""
        try:
            with _refusing(context):
                while (request := await context.read()) is not grpc.aio.EOF:
                    term = self._leading()
                    if request.HasField("turn"):
                        reply = await term.turn(request.turn)
                    elif request.HasField("open"):
                        reply = await term.open_session(request.open)
                        self._streams[stream] = request.open.session
                    else:
                        raise SettingsError("a message of the stream neither opens a session nor is a turn")
                    await context.write(reply)
        except asyncio.CancelledError:
            session = self._streams[stream]
            if self.term is not None and (not session or session in self.term.book.sessions):
                raise  # by the worker
            with _refusing(context):
                self._leading()
                raise LeaseLostError(f"session {session!r} has ended") from None
        finally:
            del self._streams[stream]


@contextlib.contextmanager
def _refusing(context: Any) -> Iterator[None]:
    """Translate errors to gRPC's without `context.abort`, whose exception keeps the server alive until collected."""
    try:
        yield
    except EDLError as exc:
        code = next((name for name, kind in REFUSALS.items() if isinstance(exc, kind)), "UNAVAILABLE")
        context.set_code(grpc.StatusCode[code])
        context.set_details(str(exc))


# --- What is reported. ---


def describe_datasets(
    statuses: Sequence[dict[str, Any]], rates: UnitRates, now_s: float, silence_s: Callable[[str], float]
) -> list[dict[str, Any]]:
    """Return the report of data sets: `DatasetShards.status` with rates, and each holder's seconds of silence."""
    totals = {(status["name"], ""): status["units_done"] for status in statuses}
    totals |= {
        (status["name"], holder["session"]): holder["units_done"] for status in statuses for holder in status["holders"]
    }
    per_s = {key: round(rate, 3) for key, rate in rates.look(totals, now_s).items()}
    described: list[dict[str, Any]] = []
    for status in statuses:
        name, rate = status["name"], per_s[status["name"], ""]
        holders = [
            {
                **holder,
                "units_per_s": per_s[name, holder["session"]],
                "seen_s": round(silence_s(holder["session"]), 3),
            }
            for holder in status["holders"]
        ]
        holders.sort(key=lambda holder: -holder["units_done"])
        left = max(0, status["units"] * status["epochs"] - status["units_done"])  # 0 if the data set is endless
        eta_s = round(left / rate, 1) if left and rate else None
        described.append({**status, "units_per_s": rate, "eta_s": eta_s, "holders": holders})
    return described


def encode_report(report: dict[str, Any]) -> bytes:
    """Return the report as JSON for the Store, without its longest parts if it is too large."""
    for holders, poisoned in ((_HOLDERS, None), (20, 10), (0, 0)):
        for dataset in report["datasets"]:
            dataset.update(holders=dataset["holders"][:holders], poisoned=dataset["poisoned"][:poisoned])
        data = json.dumps(report, allow_nan=False).encode()
        if len(data) <= _NBYTES:
            return data
    return json.dumps({**report, "datasets": report["datasets"][:100], "events": []}, allow_nan=False).encode()
