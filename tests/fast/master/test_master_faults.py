"""Lost answers, full disks, stores that are away, two masters, other data, TLS and tokens: masters in this process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edl.dashboard.state.records import decode_master
from edl.discovery import open_store
from edl.errors import JournalError, NoMasterError, RejectedError, SettingsError
from edl.master import MasterClient, MasterServer, MasterSettings, ShardReader, ShardSettings, open_dataset
from edl.master.client.master_client import MasterConnection
from edl.master.journal import SqliteJournal, open_journal
from edl.master.naming import read_report
from edl.protocol import master as messages
from edl.settings import Credentials
from tests import certificates
from tests.fast.master.conftest import Lead, Read, shards, taken
from tests.waiting import DEADLINE_S, wait_until


def opened(connection: MasterConnection, session: str) -> tuple[MasterConnection, messages.NextReply]:
    request = messages.OpenSession(dataset="d", session=session, holder=session)
    return connection, connection.exchange(messages.NextRequest(open=request))


def turn(stream: MasterConnection, session: str, request: int, **fields: Any) -> messages.NextReply:
    return stream.exchange(messages.NextRequest(turn=messages.Turn(session=session, request=request, **fields)))


@pytest.fixture
def connect(stack: ExitStack) -> Callable[[MasterServer], MasterConnection]:
    def make(master: MasterServer) -> MasterConnection:
        connection = MasterConnection(master.endpoint, None)
        stack.callback(connection.close)
        return connection

    return make


def test_a_full_disk_ends_the_master(
    lead: Lead, led: Lead, url: str, client: MasterClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    master = led(100)

    def fail(self: SqliteJournal, records: object) -> None:
        raise JournalError("journal.sqlite cannot be written: database or disk is full")

    with MasterClient("job", url, timeout_s=3.0) as waiting, ShardReader(waiting, "d", explicit=True) as reader:
        shard = taken(reader)
        monkeypatch.setattr(SqliteJournal, "append", fail)
        with pytest.raises(NoMasterError):
            reader.report_done(shard)
    wait_until(lambda: master.failure is not None, "the master's end")
    assert "disk is full" in str(master.failure)
    assert not master.is_leader
    monkeypatch.undo()
    master.close()
    lead()
    assert shards(client)["done"] == 0


def test_a_store_that_is_away_stops_nobody(
    stack: ExitStack, tmp_path: Path, lead: Lead, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The journal is a file beside it; the master's place in the Store ends, and nobody else takes it."""
    here, broken, link = (tmp_path / name for name in ("here", "broken", "link"))
    here.mkdir()
    (broken / "store.sqlite").mkdir(parents=True)
    point(link, here)
    master = lead(store=f"sqlite:///{link}/store.sqlite", lease_s=0.5)
    client = stack.enter_context(MasterClient("job", f"sqlite:///{link}/store.sqlite", timeout_s=DEADLINE_S))
    client.create_dataset("d", open_dataset("range:1000", ShardSettings(shard_size=10, session_s=60.0)))
    reader = stack.enter_context(ShardReader(client, "d"))
    found = [next(reader).start]
    places_lost, look = threading.Event(), MasterServer._leader

    async def note_look(self: MasterServer, election: Any) -> Any:
        places_lost.set()
        return await look(self, election)

    point(link, broken)
    try:
        wait_until(lambda: master.is_leader, "a leader")
        monkeypatch.setattr(MasterServer, "_leader", note_look)
        assert places_lost.wait(DEADLINE_S)
        found += [next(reader).start for _ in range(50)]
        assert master.failure is None
    finally:
        point(link, here)
    found += [shard.start for shard in reader]
    assert sorted(found) == list(range(0, 1000, 10))
    assert master.wait_done(DEADLINE_S)


def point(link: Path, folder: Path) -> None:
    """Have a link lead to a folder, at once: files that are moved by name may be made anew in between."""
    new = link.with_suffix(".new")
    new.symlink_to(folder)
    new.replace(link)


def test_a_replaced_leader_is_silent(
    stack: ExitStack, url: str, connect: Callable[..., MasterConnection], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A leader that does not know yet that another leads can journal nothing, and so answers nothing.

    It goes on where the other one has died, and ends where another takes the journal again: that one has another Store.
    """
    sleep = MasterServer._sleep

    async def sleep_briefly(self: MasterServer, seconds: float, *also: Any) -> bool:
        if seconds == self.settings.lease_s:
            await asyncio.to_thread(gate.wait, DEADLINE_S)
        return await sleep(self, min(seconds, 0.25), *also)

    gate = threading.Event()
    monkeypatch.setattr(MasterServer, "_sleep", sleep_briefly)
    old = stack.enter_context(MasterServer("job", MasterSettings(store=url, journal="store:", lease_s=60.0)))
    assert old.wait_leading(DEADLINE_S)
    client = stack.enter_context(MasterClient("job", endpoint=old.endpoint, timeout_s=DEADLINE_S))
    client.create_dataset("d", open_dataset("range:100", ShardSettings(shard_size=10)))
    stream, _ = opened(connect(old), "s")
    store = stack.enter_context(open_store(url))
    records = take_journal(store)
    with pytest.raises(NoMasterError):
        turn(stream, "s", 1, want=1)
    stream.end_stream()
    assert take_journal(store) == records, "the turn was journalled"
    gate.set()
    client.create_dataset("e", open_dataset("range:100", ShardSettings(shard_size=10)))
    assert old.is_leader
    take_journal(store)
    with MasterClient("job", url, timeout_s=0.5) as late, pytest.raises(NoMasterError):
        late.create_dataset("f", open_dataset("range:100", ShardSettings(shard_size=10)))
    wait_until(lambda: old.failure is not None, "the end of the old one")
    assert "two masters of a job must have the same Store" in str(old.failure)


def take_journal(store: Any) -> list[bytes]:
    """Begin a term as a standby does, and die; return what was journalled."""
    with open_journal("store:job", store=store) as journal:
        journal.begin_term()
        return journal.load()[1]


def test_other_journals_end_it(lead: Lead, tmp_path: Path, client: MasterClient) -> None:
    """What is done is not done again in silence, because a file is not there."""
    elsewhere = f"sqlite:///{tmp_path}/other.sqlite"
    first = lead()
    standby = lead(wait=False, journal=elsewhere)
    wait_until(lambda: standby.failure is not None, "the end of one that stands by")
    assert "a master that stands by needs the same" in str(standby.failure)
    wait_until(lambda: bool(first.status()), "a report")
    first.close()
    other = lead(wait=False, journal=elsewhere)
    wait_until(lambda: other.failure is not None, "the end of one without the journal")
    assert "is in a different journal" in str(other.failure)
    other.close()
    assert lead(journal=elsewhere, begin_anew=True).failure is None
    assert client.status()["datasets"] == []


def test_new_waits_for_the_leader(lead: Lead, led: Lead, tmp_path: Path, client: MasterClient) -> None:
    """It sets the journal aside when it leads: of a master that lives it would take the file away."""
    first = led(20)
    second = lead(wait=False, begin_anew=True)
    wait_until(lambda: bool(second.rival), "one that stands by")
    assert shards(client)["todo"] == 2
    assert not list(tmp_path.glob("journal.sqlite.2*"))
    first.close()
    assert second.wait_leading(DEADLINE_S), second.failure
    assert client.status()["datasets"] == []
    assert list(tmp_path.glob("journal.sqlite.2*"))


def test_events_have_causes(
    lead: Lead, led: Lead, client: MasterClient, read: Read, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """As the page reads them, also those of the master before: a takeover, too, is an event."""
    first = led(20, max_failures=1)
    assert "without a token" not in caplog.text
    reader = read(explicit=True)
    shard = taken(reader)
    reader.report_failed(shard, "bad pixels")
    client.retry_poisoned("d")
    wait_until(lambda: {"poisoned", "retried"} <= {event["kind"] for event in first.status()["events"]}, "events")
    reader.close()
    first.close()
    second = lead(host="0.0.0.0")
    assert "listens on 0.0.0.0 without a token" in caplog.text
    with open_store(url) as store:
        wait_until(lambda: (read_report(store, "job") or {}).get("term") == 2, "a report of the second")
        entry = store.get("master_reports/job")
    events = {event.kind: event for event in decode_master(entry.value, "job", 0.0).events}
    assert {"poisoned", "retried", "session_ended", "takeover"} <= set(events)
    assert all(event.time > 0 and event.text and event.cause for event in events.values())
    assert [kind for kind, event in events.items() if event.decision] == ["poisoned", "retried", "takeover"]
    assert events["poisoned"].cause == "the last failure was at w: bad pixels"
    assert events["takeover"].text == f"the master at {second.endpoint} leads, in term 2"
    assert first.endpoint in events["takeover"].cause


def test_mutual_tls_and_tokens(lead: Lead, url: str, tmp_path: Path) -> None:
    """Strangers wait for a master that they can believe; a wrong token is refused at once."""
    authority, stranger = certificates.Authority(), certificates.Authority("another CA").issue(*certificates.HERE)
    right, wrong = (
        certificates.put(tmp_path / name, f"the-{name}-token-that-is-long-enough\n") for name in ("right", "wrong")
    )
    pair = authority.issue(*certificates.HERE).save(tmp_path)
    credentials = Credentials(ca=authority.save(tmp_path), token_file=right, **pair)
    lead(credentials=credentials)

    def client(told: Credentials, **options: Any) -> MasterClient:
        return MasterClient("job", **{"store": url, "timeout_s": DEADLINE_S, **options}, credentials=told)

    with client(credentials) as found, ShardReader(found, "d") as reader:
        found.create_dataset("d", open_dataset("range:100", ShardSettings(shard_size=10)))
        assert sum(len(shard) for shard in reader) == 100
    for told in (Credentials(), replace(credentials, **stranger.save(tmp_path, "stranger"))):
        with client(told, timeout_s=0.5) as found, pytest.raises(NoMasterError):
            found.status()
    for told in (replace(credentials, token_file=None), replace(credentials, token_file=wrong)):
        with client(told) as found:
            with pytest.raises(RejectedError, match="EDL_TOKEN_FILE"):
                found.status()
            with ShardReader(found, "d") as reader, pytest.raises(RejectedError, match="EDL_TOKEN_FILE"):
                next(reader)
    away = client(Credentials(token_file=right), store=None, endpoint="192.0.2.1:1")
    with away, pytest.raises(SettingsError, match="without TLS"):
        away.status()
