"""Lost answers, masters that die between journal and answer, disks that are full, stores that are away, two masters."""

from __future__ import annotations

import os
import signal
import sqlite3
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from edl.dashboard.state.masters import decode_master
from edl.discovery import open_store
from edl.errors import ConflictError, JournalError, LeaseLostError, NoMasterError, SettingsError
from edl.master import MasterClient, MasterServer, MasterSettings, ShardReader, ShardSettings, open_dataset
from edl.master.client.connection import MasterConnection
from edl.master.client.turn_stream import TurnStream
from edl.master.journal import open_journal
from edl.master.journal.sqlite import SqliteJournal
from edl.master.reports import read_report
from edl.protocol import master as messages
from tests.fast.master import processes
from tests.fast.master.ledgers import counted, read_ledgers
from tests.fast.master.processes import LEASE_S, running, until, work

Lead = Callable[..., MasterServer]
Create = Callable[..., None]
Read = Callable[..., ShardReader]


@pytest.fixture
def connect(stack: ExitStack) -> Callable[[MasterServer], MasterConnection]:
    def make(master: MasterServer) -> MasterConnection:
        connection = MasterConnection("job", master.endpoint, None)
        stack.callback(connection.close)
        return connection

    return make


def opened(connection: MasterConnection, session: str) -> tuple[TurnStream, messages.NextReply]:
    stream = TurnStream(connection)
    request = messages.OpenSession(dataset="d", session=session, holder=session)
    return stream, stream.exchange(messages.NextRequest(open=request))


def turn(stream: TurnStream, session: str, request: int, **fields: Any) -> messages.NextReply:
    return stream.exchange(messages.NextRequest(turn=messages.Turn(session=session, request=request, **fields)))


def done(client: MasterClient) -> dict[str, int]:
    found: dict[str, int] = client.status()["datasets"][0]["shards"]
    return found


def test_a_lost_answer_is_given_again(
    lead: Lead, create: Create, client: MasterClient, connect: Callable[..., MasterConnection]
) -> None:
    """Also by the next master, which has it from the journal."""
    master = lead()
    create(100)
    stream, _ = opened(connect(master), "s")
    first = turn(stream, "s", 1, want=2)
    reports = {"done": [lease.id for lease in first.leases], "done_terms": [lease.term for lease in first.leases]}
    second = turn(stream, "s", 2, want=1, **reports)
    stream.close()
    stream, again = opened(connect(master), "s")
    assert again.last_request == 2
    assert turn(stream, "s", 2, want=1, **reports) == second
    stream.close()
    assert done(client) == {"todo": 7, "doing": 1, "done": 2, "poisoned": 0}
    master.close()
    master = lead()
    stream, again = opened(connect(master), "s")
    assert turn(stream, "s", 2, want=1, **reports) == second
    stream.close()
    assert done(client) == {"todo": 7, "doing": 1, "done": 2, "poisoned": 0}


def test_anothers_lease_cannot_be_reported(
    lead: Lead, create: Create, client: MasterClient, connect: Callable[..., MasterConnection]
) -> None:
    master = lead()
    create(100)
    stream, _ = opened(connect(master), "a")
    lease = turn(stream, "a", 1, want=1).leases[0]
    stream.close()
    stream, _ = opened(connect(master), "b")
    for request, number, term in ((1, lease.id, lease.term), (2, lease.id, 99), (3, 12345, 1)):
        reply = turn(stream, "b", request, done=[number], done_terms=[term])
        assert [refusal.lease.id for refusal in reply.refused] == [number]
    stream.close()
    assert done(client) == {"todo": 9, "doing": 1, "done": 0, "poisoned": 0}


@pytest.mark.parametrize("request_fields", [{"want": -1}, {"want": 2**31 - 1}, {"done": [1, 2, 3]}])
def test_nonsense_is_refused(
    lead: Lead, create: Create, connect: Callable[..., MasterConnection], request_fields: dict[str, Any]
) -> None:
    master = lead()
    create(100)
    stream, _ = opened(connect(master), "s")
    with pytest.raises(SettingsError):
        turn(stream, "s", 1, **request_fields)
    stream.close()
    stream, _ = opened(connect(master), "t")
    assert len(turn(stream, "t", 1, want=1).leases) == 1
    stream.close()


@pytest.mark.parametrize("appends", [1, 3, 6, 9])
def test_a_master_dies_before_its_answer(tmp_path: Path, url: str, create: Create, appends: int) -> None:
    """What it has journalled and did not answer is neither lost nor done twice."""
    folder = str(tmp_path)
    with running(processes.lead_and_die, folder, appends + 2) as master:
        create(100, shard_size=5, session_s=60.0, max_failures=100)
        with running(work, folder, "w") as worker:
            master.join(60)
            assert master.exitcode == -9
            with running(processes.lead, folder) as following:
                worker.join(60)
                assert worker.exitcode == 0
                following.join(60)
                assert following.exitcode == 0
    counts = counted(read_ledgers(tmp_path))
    assert set(counts.values()) == {1}
    assert len(counts) == 100


def test_a_full_disk_ends_the_master(
    lead: Lead, create: Create, url: str, client: MasterClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    master = lead()
    create(100)

    def fail(self: SqliteJournal, records: object) -> None:
        raise JournalError("journal.sqlite cannot be written: database or disk is full")

    with MasterClient("job", url, timeout_s=5.0) as waiting, ShardReader(waiting, "d", explicit=True) as reader:
        shard = reader.take(20)
        assert shard is not None
        monkeypatch.setattr(SqliteJournal, "append", fail)
        with pytest.raises(NoMasterError):
            reader.report_done(shard)
    until(lambda: master.failure is not None)
    assert "disk is full" in str(master.failure)
    assert not master.is_leader
    monkeypatch.undo()
    master.close()
    lead()
    assert done(client)["done"] == 0


def test_a_store_that_is_away_stops_nobody(stack: ExitStack, tmp_path: Path, lead: Lead) -> None:
    """The journal is a file beside it; the master's place in the Store ends, and nobody else takes it."""
    here, broken, link = (tmp_path / name for name in ("here", "broken", "link"))
    here.mkdir()
    (broken / "store.sqlite").mkdir(parents=True)
    point(link, here)
    master = lead(store=f"sqlite:///{link}/store.sqlite")
    client = stack.enter_context(MasterClient("job", f"sqlite:///{link}/store.sqlite", timeout_s=30))
    client.create_dataset("d", open_dataset("range:1000", ShardSettings(shard_size=10, session_s=20.0)))
    reader = stack.enter_context(ShardReader(client, "d"))
    found = [next(reader).start]
    point(link, broken)
    try:
        until(lambda: master.is_leader, 60)
        time.sleep(3 * LEASE_S)
        found += [next(reader).start for _ in range(50)]
        assert master.failure is None
    finally:
        point(link, here)
    found += [shard.start for shard in reader]
    assert sorted(found) == list(range(0, 1000, 10))
    assert master.wait_done(30)


def point(link: Path, folder: Path) -> None:
    """Have a link lead to a folder, at once: files that are moved by name may be made anew in between."""
    new = link.with_suffix(".new")
    new.symlink_to(folder)
    new.replace(link)


@pytest.mark.timeout(300)  # on a starved machine, places of half a second are lost again and again
def test_another_master_takes_over(tmp_path: Path, url: str, create: Create) -> None:
    """Both keep the journal in the Store, as on two hosts. The leader is killed, workers go on."""
    folder = str(tmp_path)
    with (
        running(processes.lead, folder, "store:") as first,
        open_store(url) as store,
    ):
        create(2000, shard_size=10, session_s=60.0, max_failures=100)
        with running(processes.lead, folder, "store:") as second, running(work, folder, "w", "d", 0.01) as worker:
            until(lambda: done_units(store) > 200)
            term, leader = find_leader(store)
            os.kill(leader, signal.SIGKILL)
            until(lambda: find_leader(store)[0] > term)
            worker.join(120)
            assert worker.exitcode == 0
            for master in (first, second):
                master.join(60)
                assert master.exitcode == (-signal.SIGKILL if master.pid == leader else 0)
    counts = counted(read_ledgers(tmp_path))
    assert set(counts.values()) == {1}
    assert len(counts) == 2000


def find_leader(store: Any) -> tuple[int, int]:
    """Return the term and the process of the master that leads: on a busy machine it may be the second one."""
    report = read_report(store, "job") or {}
    return report.get("term", 0), report.get("pid", 0)


def done_units(store: Any) -> int:
    report = read_report(store, "job")
    return 0 if report is None or not report["datasets"] else int(report["datasets"][0]["units_done"])


def test_a_replaced_leader_is_silent(
    stack: ExitStack, tmp_path: Path, url: str, connect: Callable[..., MasterConnection]
) -> None:
    """A leader that does not know yet that another leads can journal nothing, and so answers nothing."""
    settings = {"journal": "store:", "lease_s": 5.0}  # after which it would take the journal back
    old = stack.enter_context(MasterServer("job", MasterSettings(store=url, **settings)))  # type: ignore[arg-type]
    assert old.wait_leading(20)
    client = stack.enter_context(MasterClient("job", endpoint=old.endpoint, timeout_s=30.0))
    client.create_dataset("d", open_dataset("range:100", ShardSettings(shard_size=10)))
    stream, _ = opened(connect(old), "s")
    with open_store(url) as store:
        journal = open_journal("store:job", store=store)
        journal.begin_term()  # as another master does, whose place in the Store the old one has not heard of
        with pytest.raises(NoMasterError):
            turn(stream, "s", 1, want=1)
        _, records = journal.load()
        journal.close()
    stream.close()
    kinds = [messages.Command.FromString(record).WhichOneof("kind") for record in records]
    assert "turn" not in kinds
    until(lambda: not old.is_leader or old.failure is not None)


def test_a_fenced_leader_goes_on(stack: ExitStack, url: str, client: MasterClient) -> None:
    """Who took its journal died; who takes it again and again has another Store."""
    # Long enough for no place in the Store to be lost on a busy machine: a new one is given the journal again.
    settings = MasterSettings(store=url, journal="store:", lease_s=4.0)
    master = stack.enter_context(MasterServer("job", settings))
    assert master.wait_leading(20)
    store = stack.enter_context(open_store(url))
    take_journal(store)
    client.create_dataset("d", open_dataset("range:100", ShardSettings(shard_size=10)))
    assert master.failure is None
    assert master.is_leader
    take_journal(store)
    with MasterClient("job", url, timeout_s=1.5) as late, pytest.raises(NoMasterError):
        late.create_dataset("e", open_dataset("range:100", ShardSettings(shard_size=10)))
    until(lambda: master.failure is not None)
    assert "two masters of a job must have the same Store" in str(master.failure)


def take_journal(store: Any) -> None:
    """Begin a term as a standby does, and die."""
    with open_journal("store:job", store=store) as journal:
        journal.begin_term()


def test_other_data_end_the_master(lead: Lead, stack: ExitStack, url: str, tmp_path: Path) -> None:
    settings = MasterSettings(store=url, journal=f"sqlite:///{tmp_path}/journal.sqlite", lease_s=LEASE_S)
    for location, refused in (("range:100", False), ("range:200", True)):
        with MasterServer("job", settings, {"data": open_dataset(location).spec}) as master:
            until(lambda master=master: master.is_leader or master.failure is not None)  # type: ignore[misc]
            assert isinstance(master.failure, ConflictError) == refused
            assert "range:100, and not range:200" in str(master.failure) or not refused


def test_a_standby_needs_the_same_journal(lead: Lead, tmp_path: Path) -> None:
    lead(lease_s=20.0)  # else the other one may lead where both stood still
    other = lead(wait=False, journal=f"sqlite:///{tmp_path}/other.sqlite")
    until(lambda: other.failure is not None)
    assert "a master that stands by needs the same" in str(other.failure)


def test_a_lost_journal_does_not_begin_anew(lead: Lead, create: Create, tmp_path: Path, client: MasterClient) -> None:
    """What is done is not done again in silence, because a file is not there."""
    master = lead()
    create(100)
    until(lambda: bool(master.status()))
    master.close()
    other = lead(wait=False, journal=f"sqlite:///{tmp_path}/other.sqlite")
    until(lambda: other.failure is not None)
    assert "stands in another journal" in str(other.failure)
    other.close()
    anew = lead(journal=f"sqlite:///{tmp_path}/other.sqlite", begin_anew=True)
    assert client.status()["datasets"] == []
    assert anew.failure is None


def test_a_lost_session_of_reports_goes_on(lead: Lead, create: Create, read: Read, client: MasterClient) -> None:
    lead()
    create(100, session_s=3.0, lease_s=3.0)
    reader = read(prefetch=1, explicit=True)
    shard = reader.take(20)
    assert shard is not None
    reader._thread.spec.session_s = reader._thread.spec.lease_s = 10_000.0
    reader._thread._ask_at = time.monotonic() + 6.0
    until(lambda: done(client)["doing"] == 0)
    with pytest.raises(LeaseLostError):
        reader.report_done(shard)
    count = 0
    while not reader.finished:
        if (shard := reader.take(10)) is not None:
            reader.report_done(shard)
            count += 1
    assert count == 10


@pytest.mark.timeout(300)  # on a starved machine, places of half a second are lost again and again
@pytest.mark.parametrize("journal", [None, "store:"])
def test_a_stopped_leader_comes_back(tmp_path: Path, url: str, create: Create, journal: str | None) -> None:
    """It was stopped for longer than its lease, another leads, and it goes on as if nothing had been."""
    folder = str(tmp_path)
    with running(processes.lead, folder, journal) as first, open_store(url) as store:
        create(2000, shard_size=10, session_s=60.0, max_failures=100)
        with running(processes.lead, folder, journal) as second, running(work, folder, "w", "d", 0.01) as worker:
            until(lambda: done_units(store) > 100)
            term, leader = find_leader(store)
            try:
                stop_between_writes(leader, [*tmp_path.glob("journal.sqlite"), tmp_path / "store.sqlite"])
                until(lambda: find_leader(store)[0] > term, 60.0)
            finally:
                os.kill(leader, signal.SIGCONT)
            worker.join(120)
            assert worker.exitcode == 0
            for master in (first, second):
                master.join(60)
                assert master.exitcode == 0
    counts = counted(read_ledgers(tmp_path))
    assert set(counts.values()) == {1}
    assert len(counts) == 2000


def stop_between_writes(pid: int, files: list[Path]) -> None:
    """Stop a process: in the middle of a write it would hold a file's lock, and nobody else could write."""
    with ExitStack() as stack:
        for file in files:
            locking = stack.enter_context(closing(sqlite3.connect(file, timeout=60, isolation_level=None)))
            locking.execute("BEGIN IMMEDIATE")
        os.kill(pid, signal.SIGSTOP)
        until(lambda: all(is_stopped(thread) for thread in Path(f"/proc/{pid}/task").iterdir()))


def is_stopped(thread: Path) -> bool:
    return (thread / "stat").read_text().rpartition(")")[2].split()[0] == "T"


def test_events_have_causes(lead: Lead, create: Create, client: MasterClient, read: Read, url: str) -> None:
    """As the page reads them, also those of the master before: a takeover, too, is an event."""
    first = lead()
    create(20, max_failures=1)
    reader = read(explicit=True)
    shard = reader.take(20)
    assert shard is not None
    reader.report_failed(shard, "bad pixels")
    client.retry_poisoned("d")
    until(lambda: {"poisoned", "retried"} <= {event["kind"] for event in first.status()["events"]})
    reader.close()
    first.close()
    second = lead()
    with open_store(url) as store:
        until(lambda: (read_report(store, "job") or {}).get("term") == 2)
        entry = store.get("master_reports/job")
    assert entry is not None
    events = {event.kind: event for event in decode_master(entry.value, "job", time.time()).events}
    assert {"poisoned", "retried", "session_ended", "takeover"} <= set(events)
    assert all(event.time > 0 and event.text and event.cause for event in events.values())
    assert [kind for kind, event in events.items() if event.decision] == ["poisoned", "retried", "takeover"]
    assert events["poisoned"].cause == "the last of w: bad pixels"
    assert events["takeover"].text == f"the master at {second.endpoint} leads, in term 2"
    assert first.endpoint in events["takeover"].cause


@pytest.mark.parametrize(("host", "warns"), [("127.0.0.1", False), ("0.0.0.0", True)])
def test_open_port_is_warned_of(lead: Lead, caplog: pytest.LogCaptureFixture, host: str, warns: bool) -> None:
    lead(host=host)
    assert (f"listens on {host} without a token" in caplog.text) == warns
