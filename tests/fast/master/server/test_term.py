"""Answers come after the journal, in groups, and without a journal there is none; and when sessions end."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import threading
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from edl.cli.master import _default_journal
from edl.datasets import ShardSettings, open_dataset
from edl.discovery.served.addresses import outward_address
from edl.errors import ClosedError, ConflictError, JournalError, LeaseLostError, SettingsError
from edl.master.journal import Journal
from edl.master.scaling.workers import UnitRates
from edl.master.server.master_server import check_continued, check_data, shown_endpoint
from edl.master.server.term import PAUSE_S, TICK_S, LeaseClock, Term, encode_report
from edl.master.shards import ShardBook
from edl.protocol import master as messages
from tests.waiting import DEADLINE_S, wait_until


class GatedJournal(Journal):
    """A journal in memory, which appends when the test lets it."""

    def __init__(self) -> None:
        super().__init__("in memory", DEADLINE_S)
        self.groups: list[list[str]] = []  # names of the commands
        self.snapshots: list[bytes] = []
        self.gate = threading.Semaphore(0)
        self.begun = 0
        self.failure: Exception | None = None

    @property
    def snapshot_due(self) -> bool:
        return len(self.groups) >= 5 and not self.snapshots

    def load(self) -> tuple[bytes | None, list[bytes]]:
        return None, []

    def begin_term(self) -> int:
        return 1

    def append(self, records: Sequence[bytes]) -> None:
        self.begun += 1
        assert self.gate.acquire(timeout=DEADLINE_S)
        if self.failure is not None:
            raise self.failure
        self.groups.append([messages.Command.FromString(record).end_dataset.dataset for record in records])

    def snapshot(self, state: bytes) -> None:
        self.snapshots.append(state)

    async def wait_begun(self, groups: int) -> None:
        await asyncio.to_thread(wait_until, lambda: self.begun >= groups, f"{groups} groups")


class Book:
    def __init__(self) -> None:
        self.version = 0
        self.applied: list[str] = []

    def apply(self, command: messages.Command) -> Any:
        name = command.end_dataset.dataset
        if name == "refused":
            raise ConflictError("refused")
        if name != "again":
            self.version += 1
            self.applied.append(name)
        return name

    def snapshot(self) -> bytes:
        return ",".join(self.applied).encode()


def command(name: str) -> messages.Command:
    return messages.Command(end_dataset=messages.EndDataset(dataset=name))


Scenario = Callable[[Term, Book, GatedJournal], Awaitable[None]]


def run(scenario: Scenario) -> None:
    async def main() -> None:
        journal, book = GatedJournal(), Book()
        term = Term(1, cast(Any, book), journal, lambda seconds: None)
        try:
            await asyncio.wait_for(scenario(term, book, journal), DEADLINE_S)
        finally:
            journal.gate.release(100)
            await term.close("the test is over")

    asyncio.run(main())


def test_answers_come_after_the_journal() -> None:
    """What comes while a commit is under way is the next group."""

    async def scenario(term: Term, book: Book, journal: GatedJournal) -> None:
        first = asyncio.ensure_future(term.submit(command("a")))
        await journal.wait_begun(1)
        assert book.applied == ["a"]
        rest = [asyncio.ensure_future(term.submit(command(f"b{number}"))) for number in range(20)]
        await asyncio.sleep(0)
        assert not first.done()
        journal.gate.release()
        assert await first == "a"
        assert journal.groups == [["a"]]
        await journal.wait_begun(2)
        assert not any(answer.done() for answer in rest)
        journal.gate.release()
        assert await asyncio.gather(*rest) == [f"b{number}" for number in range(20)]
        assert [len(group) for group in journal.groups] == [1, 20]

    run(scenario)


@pytest.mark.parametrize("name", ["refused", "again"])
def test_refusals_wait_for_what_they_rest_on(name: str) -> None:
    """A refusal, and the answer to a request that came again, may rest on a command that is not journalled yet."""

    async def scenario(term: Term, book: Book, journal: GatedJournal) -> None:
        first = asyncio.ensure_future(term.submit(command("a")))
        second = asyncio.ensure_future(term.submit(command(name)))
        await journal.wait_begun(1)
        assert not second.done()
        journal.gate.release()
        await first
        found = await asyncio.gather(second, return_exceptions=True)
        assert isinstance(found[0], ConflictError) if name == "refused" else found == ["again"]
        assert [len(group) for group in journal.groups] == [1]

    run(scenario)


def test_a_failed_journal_answers_nothing() -> None:
    async def scenario(term: Term, book: Book, journal: GatedJournal) -> None:
        answers = [asyncio.ensure_future(term.submit(command(name))) for name in "abc"]
        await journal.wait_begun(1)
        journal.failure = JournalError("the disk is full")
        journal.gate.release(3)
        for answer in answers:
            with pytest.raises(ClosedError, match="the disk is full"):
                await answer
        assert term.ended
        assert term.failure is journal.failure
        with pytest.raises(ClosedError, match="the disk is full"):
            await term.submit(command("d"))
        with pytest.raises(ClosedError, match="the disk is full"):
            await term.settled()
        assert "d" not in book.applied

    run(scenario)


def test_a_snapshot_has_its_place() -> None:
    """Of the state that the records before it make; the journal asks for it, and gets it once."""

    async def scenario(term: Term, book: Book, journal: GatedJournal) -> None:
        journal.gate.release(100)
        await term.submit(command("a"))
        term.take_snapshot()
        await term.submit(command("b"))
        assert journal.snapshots == [b"a"]
        assert journal.groups == [["a"], ["b"]]
        journal.snapshots.clear()
        for number in range(7):
            await term.submit(command(f"c{number}"))
        await asyncio.to_thread(wait_until, lambda: journal.snapshots, "a snapshot")
        await term.settled()
        assert len(journal.snapshots) == 1
        covered = journal.snapshots[0].decode().split(",")
        assert covered == book.applied[: len(covered)]
        assert len(covered) >= 5

    run(scenario)


def test_session_of_a_cancelled_call_ends() -> None:
    """A worker dies while its session is being journalled: the session must end like any other."""
    spec = messages.DatasetSpec(kind="range", units=100, shard_size=10, epochs=1, session_s=2.0, lease_s=2.0)

    async def scenario() -> None:
        journal, now = GatedJournal(), 0.0
        journal.gate.release(2)
        term = Term(1, ShardBook(), journal, lambda seconds: None, clock=lambda: now)
        await term.submit(messages.Command(begin_term=messages.BeginTerm(term=1)))
        await term.submit(messages.Command(create_dataset=messages.CreateDataset(dataset="d", spec=spec)))
        opening = asyncio.ensure_future(term.open_session(messages.OpenSession(dataset="d", session="s", holder="w")))
        await journal.wait_begun(3)
        opening.cancel()  # as gRPC does
        await asyncio.wait([opening])
        assert opening.cancelled()
        journal.gate.release(100)
        await term.tick()
        assert list(term.book.sessions) == ["s"]
        for _ in range(3):
            now += 1.0
            await term.tick()
        assert not term.book.sessions
        with pytest.raises(LeaseLostError, match="lease of w expired"):
            await term.turn(messages.Turn(session="s", request=1, want=1))
        await term.close("the test is over")

    asyncio.run(asyncio.wait_for(scenario(), DEADLINE_S))


@pytest.fixture
def clock() -> SimpleNamespace:
    return SimpleNamespace(now=1000.0)


def advance(clock: SimpleNamespace, leases: LeaseClock, seconds: float) -> tuple[list[str], list[str]]:
    """Look as often as the server does; return all that came due."""
    silent: list[str] = []
    over: list[str] = []
    for _ in range(round(seconds / TICK_S)):
        clock.now += TICK_S
        found = leases.due({} if over else {"a": (2.0, 5.0)})
        silent += found[0]
        over += found[1]
    return silent, over


def test_a_silent_session_ends(clock: SimpleNamespace) -> None:
    leases = LeaseClock(lambda: clock.now)
    leases.due({"a": (2.0, 5.0)})
    for _ in range(5):
        assert advance(clock, leases, 1.5) == ([], [])
        leases.hear("a")
    assert advance(clock, leases, 2.0) == ([], [])
    assert advance(clock, leases, 1.0) == (["a"], [])
    leases.hear("a")
    assert advance(clock, leases, 3.0) == (["a"], []), "its leases end again"
    assert advance(clock, leases, 1.5) == ([], [])
    assert advance(clock, leases, 10.0) == ([], ["a"])


def test_a_stopped_process_expires_nothing(clock: SimpleNamespace) -> None:
    """What workers sent while the process stood still was not read."""
    leases = LeaseClock(lambda: clock.now)
    limits = {"a": (PAUSE_S + 1, PAUSE_S + 1)}
    leases.due(limits)
    clock.now += 3600
    assert leases.due(limits) == ([], [])
    assert leases.silence_s("a") == PAUSE_S


def book_of(spec: messages.DatasetSpec) -> ShardBook:
    book = ShardBook()
    book.apply(messages.Command(create_dataset=messages.CreateDataset(dataset="data", spec=spec)))
    return book


def test_another_journal_is_refused() -> None:
    last = {"job": "j", "term": 3, "journal": "sqlite:///a", "host": "x"}
    check_continued(None, 1, "sqlite:///b")
    check_continued(last, 4, "sqlite:///a")
    with pytest.raises(SettingsError, match="is in a different journal, sqlite:///a on host x"):
        check_continued(last, 1, "sqlite:///b")


def test_the_same_data_go_on() -> None:
    book = book_of(open_dataset("range:100").spec)
    check_data(book, {"data": open_dataset("range:100").spec, "more": open_dataset("range:7").spec})
    plain = messages.DatasetSpec()
    plain.CopyFrom(open_dataset("range:100", ShardSettings(max_failures=3)).spec)
    plain.max_failures = 0
    check_data(book, {"data": plain})


@pytest.mark.parametrize(
    ("location", "settings", "difference"),
    [
        ("range:200", {}, "location is range:100 and not range:200"),
        ("range:100", {"shard_size": 7}, "and not 7"),
        ("range:100", {"shuffle": True}, "shuffle is False and not True"),
    ],
)
def test_other_data_are_refused(location: str, settings: dict[str, Any], difference: str) -> None:
    book = book_of(open_dataset("range:100").spec)
    with pytest.raises(ConflictError) as caught:
        check_data(book, {"data": open_dataset(location, ShardSettings(**settings)).spec})
    assert difference in str(caught.value)
    assert all(remedy in str(caught.value) for remedy in ("--name", "--new", "for the job"))


def test_changed_text_is_refused(tmp_path: Path) -> None:
    """A file of the same name and length, touched or not."""
    text = tmp_path / "text"
    text.write_text("a\nb\n" * 100)
    book = book_of(open_dataset(f"lines:{text}").spec)
    text.write_text("a\nb\n" * 100)
    check_data(book, {"data": open_dataset(f"lines:{text}").spec})
    text.write_text("a\nc\n" * 100)
    with pytest.raises(ConflictError, match="its files or their contents have changed"):
        check_data(book, {"data": open_dataset(f"lines:{text}").spec})


def test_addresses_and_places_are_shown() -> None:
    for slashes in ("/", "//"):
        assert _default_journal(f"sqlite://{slashes}x/store.sqlite", "a/b") == "sqlite:///x/a%252Fb.master.sqlite"
    for host, shown in (("127.0.0.1", "127.0.0.1:7"), ("::1", "[::1]:7"), ("node", "node:7")):
        assert shown_endpoint(host, 7, "sqlite:////tmp/store") == shown
    outside = ipaddress.ip_address(outward_address(["192.0.2.1"]))
    assert not outside.is_unspecified
    for servers in ([], ["127.0.0.1"]):
        assert ipaddress.ip_address(outward_address(servers)) == outside, "other hosts do not reach this one's loopback"


def status(done: int, holders: int = 0, poisoned: int = 0) -> dict[str, Any]:
    return {
        "name": "d",
        "units": 1000,
        "epochs": 2,
        "units_done": done,
        "holders": [{"holder": f"w{n}", "session": f"s{n}", "leases": 1, "units_done": n} for n in range(holders)],
        "poisoned": [{"shard": n, "failures": [{"reason": "x" * 500}] * 3} for n in range(poisoned)],
    }


def test_rates_are_of_the_last_seconds() -> None:
    rates = UnitRates(15.0)
    assert rates.look({("d", ""): 0.0, ("d", "s"): 0.0}, 0.0) == {("d", ""): 0.0, ("d", "s"): 0.0}
    for second in range(1, 101):
        (rate,) = rates.look({("d", ""): 10.0 * second if second < 50 else 490.0}, float(second)).values()
        if second == 49:
            assert rate == pytest.approx(10.0)
    assert rate == 0.0
    assert rates._looks.keys() == {("d", "")}, "what is kept of sessions grows with those that have ended"


def test_a_report_fits_into_a_store() -> None:
    datasets = [status(0, holders=200, poisoned=50) for _ in range(20)]
    data = encode_report({"job": "j", "datasets": datasets, "events": []})
    assert len(data) <= 200_000
    assert len(json.loads(data)["datasets"]) == 20
