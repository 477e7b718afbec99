"""Readers of a master in this process: shards, reports, leases, ends; and positions that are part of a checkpoint."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sqlite3
import threading
from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from edl.background import start_call
from edl.errors import (
    ClosedError,
    ConflictError,
    LeaseLostError,
    NoMasterError,
    NoTeacherError,
    PermanentError,
    PoisonedShardsError,
    SettingsError,
)
from edl.master import MasterClient, ShardingClient, ShardReader, ShardSettings, open_dataset
from edl.master.client import shard_reader
from edl.master.client.conversation import Conversation
from edl.master.client.master_client import MasterConnection
from edl.master.journal import open_journal
from edl.protocol import master as messages
from tests.fast.master.conftest import Create, Lead, Read, lapse, shards, taken
from tests.waiting import DEADLINE_S, wait_until


def samples(reader: ShardReader) -> list[int]:
    return [sample for shard in reader for sample in range(shard.start, shard.stop)]


@pytest.fixture
def busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have readers look after their shards, and renew them, much more often than their long leases make them."""
    monkeypatch.setattr(Conversation, "_renew_s", 0.05)


def forget(reader: ShardReader, *held: Any) -> None:
    """Let an age pass since the caller did something with its shards."""
    for shard in held:
        reader._conversation._session.open[shard.id].touched_at = -math.inf


def test_what_was_read_of_a_shard_counts(lead: Lead, client: MasterClient, read: Read, tmp_path: Path) -> None:
    lead()
    folder = tmp_path / "files"
    folder.mkdir()
    for number in range(10):
        (folder / f"{number}").write_text("x")
    client.create_dataset("d", open_dataset(f"files:{folder}", ShardSettings(shard_size=10, max_failures=1)))
    (folder / "4").unlink()
    reader = read(on_poisoned="warn")
    assert [sample.id for sample in reader.samples()] == ["0", "1", "2", "3"]
    found = client.status()["datasets"][0]
    assert (found["units_done"], found["shards"]["poisoned"]) == (4, 1)


BAD = 13


def draw(reader: ShardReader) -> None:
    for sample in reader.samples():
        if sample == BAD:
            raise ZeroDivisionError("a broken image")


def work(reader: ShardReader) -> None:
    for shard in reader:
        if shard.start <= BAD < shard.stop:
            raise ZeroDivisionError("a broken image")
        if reader._explicit:
            reader.report_done(shard)


class Broken(list[int]):
    """A sequence of the user's that raises what it likes."""

    def __getitem__(self, number: Any) -> Any:
        if number == BAD:
            raise ZeroDivisionError("a broken image")
        return super().__getitem__(number)


@pytest.mark.parametrize(
    ("use", "options", "commit", "left"),
    [
        (draw, {}, "report", 7),
        (draw, {"samples": Broken(range(40))}, "report", 7),
        (work, {}, "report", 10),
        (work, {"explicit": True}, "report", 10),
        (draw, {}, "checkpoint", 7),
    ],
)
def test_a_shard_that_raises_is_given_up(
    led: Lead, client: MasterClient, use: Any, options: Any, commit: str, left: int
) -> None:
    """Of workers that are started again and again; what was read of it before is not read again."""
    led(40, commit=commit, max_failures=3)
    for life in range(3):
        with pytest.raises(ZeroDivisionError), ShardReader(client, "d", holder=f"w{life}", **options) as reader:
            use(reader)
    with ShardReader(client, "d", on_poisoned="warn") as reader:
        samples(reader)
        if commit == "checkpoint":
            reader.state_dict()
    found = client.status()["datasets"][0]
    assert found["shards"] == {"todo": 0, "doing": 0, "done": 3, "poisoned": 1}
    assert found["poisoned"][0]["stop"] - found["poisoned"][0]["start"] == left
    assert {failure["reason"] for failure in found["poisoned"][0]["failures"]} == {"ZeroDivisionError: a broken image"}


def test_a_break_loses_no_sample(led: Lead, read: Read) -> None:
    """Reading goes on in the middle of the shard."""
    led(30)
    reader, found = read(), list[int]()
    for stop in (3, 10, 11, 99):
        for sample in reader.samples():
            found.append(sample)
            if len(found) == stop:
                break
    assert found == list(range(30))


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(1), NoTeacherError("none"), SettingsError("a typo")])
def test_leaving_is_no_failure(led: Lead, client: MasterClient, error: BaseException) -> None:
    led(40, max_failures=1)
    with contextlib.suppress(type(error)), ShardReader(client, "d") as reader:
        next(reader)
        raise error
    assert shards(client) == {"todo": 4, "doing": 0, "done": 0, "poisoned": 0}


def test_leases_are_renewed_meanwhile(led: Lead, read: Read, busy: None) -> None:
    led(20)
    reader = read(prefetch=0, explicit=True)
    shard = taken(reader)
    heard = {reader._conversation._heard_at}

    def is_renewed() -> bool:
        heard.add(reader._conversation._heard_at)
        return len(heard) > 3

    wait_until(is_renewed, "renewals")
    reader.report_done(shard)
    assert reader.refused == 0


def test_a_hanging_process_loses_its_shards(
    led: Lead, read: Read, client: MasterClient, busy: None, caplog: pytest.LogCaptureFixture
) -> None:
    """The thread that renews leases would keep what its caller does nothing with for ever."""
    led(20)
    reader = read(prefetch=0, explicit=True)
    forgotten, other = taken(reader), taken(reader)
    forget(reader, forgotten)
    wait_until(lambda: shards(client)["doing"] == 1, "the lease to end")
    reader.report_done(other)
    again = taken(reader)
    assert (again.start, again.stop) == (forgotten.start, forgotten.stop)
    assert f"shard {forgotten.shard} of d was not reported" in caplog.text
    with pytest.raises(LeaseLostError):
        reader.report_done(forgotten)
    reader.report_done(again)
    assert shards(client)["done"] == 2


def test_a_shard_in_work_is_kept(led: Lead, read: Read, client: MasterClient, busy: None) -> None:
    """What is at hand beside it goes back, and counts no failure."""
    led(40, max_failures=1)
    reader = read(prefetch=3, explicit=True)
    shard = taken(reader)
    wait_until(lambda: len(reader._conversation._inbox) > 1, "shards at hand")
    forget(reader, *(held for _, held in reader._conversation._inbox))
    reader.consume(shard, 1)
    wait_until(lambda: shards(client)["doing"] == 1, "the others to go back")
    reader.report_done(shard)
    assert shards(client) == {"todo": 3, "doing": 0, "done": 1, "poisoned": 0}
    assert reader.take(DEADLINE_S) is not None, "it goes on when it asks"


def test_a_forgotten_one_ends_a_checkpoint(led: Lead, read: Read, client: MasterClient, busy: None) -> None:
    """The reader's state may hold samples of it: all since the last mark goes back."""
    master = led(20, commit="checkpoint")
    reader = read(prefetch=0, explicit=True)
    forgotten, other = taken(reader), taken(reader)
    reader.report_done(other)
    forget(reader, forgotten)
    with pytest.raises(LeaseLostError, match="stuck_s"):
        reader.take(DEADLINE_S)
    lapse(master, "w")
    assert shards(client)["todo"] == 2


def test_closing_gives_shards_back(led: Lead, read: Read, client: MasterClient) -> None:
    led(100, max_failures=1)
    reader = read(explicit=True, prefetch=3)
    shard = taken(reader)
    reader.give_back(shard)
    wait_until(lambda: shards(client)["doing"] >= 2, "shards at hand")
    reader.close()
    assert shards(client) == {"todo": 10, "doing": 0, "done": 0, "poisoned": 0}
    with pytest.raises(ClosedError):
        reader.take()


def test_a_reader_waits_for_its_data_set(
    lead: Lead, create: Create, read: Read, client: MasterClient, stack: ExitStack, url: str
) -> None:
    """Creating it again is no error; creating another of its name is."""
    lead()
    reader = read()
    call = start_call("edl-test", lambda: samples(reader))
    wait_until(lambda: reader.away_s > 0, "a reader that waits")
    create(30)
    assert sorted(call.result(DEADLINE_S)) == list(range(30))
    create(30)
    with pytest.raises(ConflictError):
        create(200)
    assert client.describe_dataset("other") is None
    hasty = stack.enter_context(MasterClient("job", url, timeout_s=0.2))
    with (
        ShardReader(hasty, "D") as mistyped,
        pytest.raises(NoMasterError, match=r"not created .*did you mean 'd'"),
    ):
        next(mistyped)
    spec = client.describe_dataset("d")
    assert spec.units == 30


def test_lost_progress_ends_a_reader(led: Lead, lead: Lead, read: Read) -> None:
    """As when the store with the journal was started again with an empty file."""
    first = led(30)
    reader = read()
    next(reader)
    first.close()
    lead(begin_anew=True)
    with pytest.raises(PermanentError, match="lost the job's progress"):
        list(reader)


def test_no_master_is_an_error_in_time(lead: Lead, url: str) -> None:
    with MasterClient("job", url, timeout_s=0.2) as client:
        with pytest.raises(NoMasterError, match="edl master job"):
            client.status()
        with ShardReader(client, "d") as reader, pytest.raises(NoMasterError, match="edl master job"):
            next(reader)
        client._store.put("elections/masters/job-7051cb99", b"")
        with pytest.raises(NoMasterError, match="no master leads; did you mean 'job-7051cb99'"):
            client.connect()
    other = MasterClient("other", endpoint=lead().endpoint, timeout_s=4.0)  # in which it must hear from that one
    with other, pytest.raises(NoMasterError, match="belongs to job 'job', not to 'other'"):
        other.status()


def test_the_calls_of_dlrover(lead: Lead, client: MasterClient) -> None:
    lead()
    with ShardingClient(client, "train", 10, 1, 95, num_minibatches_per_shard=2) as sharding:
        first = sharding.fetch_shard()
        assert (first.name, first.end - first.start) == ("train", 20)
        assert sharding.report_batch_done() is False
        assert sharding.report_batch_done() is True
        saved = sharding.get_shard_checkpoint()
        found = set()
        while (index := sharding.fetch_sample_index()) is not None:
            found.add(index)
            sharding.report_batch_done(1)
        assert found == set(range(95)) - set(range(first.start, first.end))
        assert sharding.get_current_epoch() == 0
        sharding.restore_shard_from_checkpoint(saved)
        assert client.status()["datasets"][0]["units_done"] == 20
        with pytest.raises(SettingsError):
            sharding.restore_shard_from_checkpoint("{}")
    with contextlib.suppress(ZeroDivisionError), ShardingClient(client, "more", 10, 1, 40) as sharding:
        sharding.fetch_shard()
        raise ZeroDivisionError
    assert client.status()["datasets"][0]["shards"]["todo"] == 1


@pytest.mark.parametrize("own", [True, False])
def test_restored_progress_is_read_once(led: Lead, client: MasterClient, read: Read, url: str, own: bool) -> None:
    """A reader drops what it had at hand before: at once if its own client restores, else as soon as it hears of it."""
    led(40)
    saved = client.progress("d")
    reader = read(explicit=True, prefetch=3)
    taken(reader)
    wait_until(lambda: len(reader._conversation._inbox) > 1, "shards at hand")
    if own:
        client.restore_progress("d", saved)
    else:
        before = reader._conversation._session
        with MasterClient("job", url, timeout_s=DEADLINE_S) as other:
            other.restore_progress("d", saved)
        wait_until(lambda: reader._conversation._session is not before, "a new session")
    found = []
    while (shard := reader.take(DEADLINE_S)) is not None:
        reader.report_done(shard)
        found.append(shard.start)
    assert sorted(found) == [0, 10, 20, 30]
    assert reader.refused == 0


def test_a_newer_session_is_given_back(led: Lead, client: MasterClient, read: Read) -> None:
    """Its reader heard of the restored progress before the client that restored it: no shard waits for its end."""
    led(20, session_s=3600.0, lease_s=3600.0)
    reader = read(explicit=True, prefetch=3)
    taken(reader)
    client.restored["d"] += 1
    assert sorted(taken(reader).start for _ in range(2)) == [0, 10]


def test_a_failed_close_is_tried_again(led: Lead, read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that is kept would renew its session for ever, and the master would not end."""
    calls: list[str] = []
    call = MasterConnection.call

    def fail_first(self: MasterConnection, method: str, *args: Any, **options: Any) -> Any:
        calls.append(method)
        if method == "CloseSession" and calls.count(method) == 1:
            raise NoMasterError("no answer")
        return call(self, method, *args, **options)

    monkeypatch.setattr(MasterConnection, "call", fail_first)
    master = led(20)
    reader = read()
    assert len(list(reader)) == 2
    assert master.wait_done(DEADLINE_S)
    assert calls.count("CloseSession") == 2


def test_a_forked_child_is_refused(led: Lead, read: Read, client: MasterClient) -> None:
    led(10)
    reader = read()
    child = os.fork()
    if child == 0:
        refusals = 0
        calls: list[Callable[[], Any]] = [client.status, reader.take, lambda: next(reader)]
        for call in calls:
            try:
                call()
            except ClosedError:
                refusals += 1
        os._exit(refusals)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    assert len(samples(reader)) == 10


def test_a_late_worker_finds_all_done(
    led: Lead, read: Read, monkeypatch: pytest.MonkeyPatch, client: MasterClient
) -> None:
    """The master has ended: nothing is left to wait for. A reason may have what no message could carry."""
    monkeypatch.setattr("edl.master.client.conversation._DONE_S", 0.1)
    master = led(20, max_failures=1)
    reader = read(explicit=True)
    reader.report_failed(next(reader), "cannot decode \0 a\udcff.jpg")
    (poisoned,) = client.status()["datasets"][0]["poisoned"]
    assert poisoned["failures"][0]["reason"].endswith("a\\udcff.jpg")
    reader.report_done(next(reader))
    reader.take(DEADLINE_S)
    reader.close()
    assert master.wait_done(DEADLINE_S)
    master.close()
    with pytest.raises(PoisonedShardsError):
        next(read())
    late = read(on_poisoned="warn")
    assert list(late) == []
    assert late.finished


def test_a_late_answer_keeps_a_reader(led: Lead, read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not leave while it may be given shards: siblings would each leave all to the other."""
    monkeypatch.setattr(shard_reader, "_ASK_S", 0.01)
    exchange, gate, rests = MasterConnection.exchange, threading.Event(), list[bool]()
    rest = Conversation.rest

    def answer_late(self: MasterConnection, request: messages.NextRequest) -> messages.NextReply:
        reply = exchange(self, request)
        if request.turn.want and reply.leases:
            gate.wait(DEADLINE_S)
        return reply

    def note_rest(self: Conversation, timeout_s: float) -> bool:
        rests.append(rest(self, timeout_s))
        return rests[-1]

    monkeypatch.setattr(MasterConnection, "exchange", answer_late)
    monkeypatch.setattr(Conversation, "rest", note_rest)
    led(30)
    call = start_call("edl-test", lambda: samples(read(may_leave=lambda: True)))
    wait_until(lambda: len(rests) > 3, "a reader that asks whether it may leave")
    assert not any(rests)
    gate.set()
    assert sorted(call.result(DEADLINE_S)) == list(range(30))


def test_busy_journal_is_waited_for(
    led: Lead, client: MasterClient, read: Read, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process holds its file: the master stands by, and workers wait, until it is free."""
    monkeypatch.setattr("edl.master.server.master_server.open_journal", partial(open_journal, timeout_s=0.3))
    master = led(100)
    reader = read()
    found = [next(reader)]
    with closing(sqlite3.connect(tmp_path / "journal.sqlite", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        reader.report_done(found[0], wait=False)
        wait_until(lambda: not master.is_leader or master.failure, "a master that stands by")
        assert master.failure is None, "it stands by"
    assert master.wait_leading(DEADLINE_S), master.failure
    found += reader
    assert sorted(shard.start for shard in found) == list(range(0, 100, 10))
    assert client.status()["datasets"][0]["units_done"] == 100


def test_a_position_within_a_shard(led: Lead, read: Read) -> None:
    led(30, commit="checkpoint")
    first = read("a", prefetch=1)
    samples = first.samples()
    before = [next(samples) for _ in range(13)]
    state = json.loads(json.dumps(first.state_dict()))
    lost = [next(samples) for _ in range(9)]
    first.load_state_dict(state)
    again = list(first.samples())
    assert set(lost) <= set(again)
    assert sorted(before + again) == list(range(30))
    first.state_dict()


def test_a_mark_needs_such_a_data_set(led: Lead, read: Read) -> None:
    led(100)
    reader = read()
    next(reader)
    with pytest.raises(SettingsError, match='commit="checkpoint"'):
        reader.state_dict()
    with pytest.raises(SettingsError):
        reader.load_state_dict({"format": 1, "job": "job", "dataset": "other", "session": "x", "mark": 1})
    with pytest.raises(SettingsError):
        reader.load_state_dict({})


def test_the_end_counts_no_unmarked_shard(led: Lead, read: Read, caplog: pytest.LogCaptureFixture) -> None:
    """A process that is killed after its reader's end, and before its last checkpoint, goes back to the one before."""
    master = led(100, commit="checkpoint")
    with read("a") as first:
        samples = first.samples()
        before = [next(samples) for _ in range(35)]
        state = first.state_dict()
        assert len(before + list(samples)) == 100
    assert "7 shards of d were done after the last state_dict()" in caplog.text
    assert not master.done
    with read("a") as second:
        second.load_state_dict(state)
        assert sorted(before + list(second.samples())) == list(range(100))
        second.state_dict()
    assert master.wait_done(DEADLINE_S)


def test_a_second_resumer_waits(led: Lead, read: Read, caplog: pytest.LogCaptureFixture) -> None:
    """A reader that lives holds the position, until it is closed."""
    led(40, commit="checkpoint")
    first = read("a")
    before = next(first.samples())
    state = first.state_dict()
    second, third = read("b"), read("c")
    second.load_state_dict(state)
    call = start_call("edl-test", lambda: third.load_state_dict(state))
    wait_until(lambda: "another reader may hold the position" in caplog.text, "a reader that waits")
    assert not call.done()
    second.close()
    call.result(DEADLINE_S)
    assert sorted([before, *third.samples()]) == list(range(40))


@pytest.mark.parametrize("anew", [True, False])
def test_going_back_waits_for_a_master(lead: Lead, led: Lead, read: Read, anew: bool) -> None:
    master = led(40, commit="checkpoint")
    reader = read("a")
    samples = reader.samples()
    before = [next(samples) for _ in range(15)]
    state = reader.state_dict()
    next(samples)
    master.close()
    call = start_call("edl-test", reader.start_over if anew else lambda: reader.load_state_dict(state))
    wait_until(lambda: reader.away_s > 0, "an attempt that fails")
    lead()
    call.result(DEADLINE_S)
    assert sorted([*reader.samples(), *([] if anew else before)]) == list(range(40))


@pytest.mark.parametrize("commit", [True, False])
def test_closing_counts_or_gives_back(led: Lead, read: Read, client: MasterClient, commit: bool) -> None:
    led(50, commit="checkpoint")
    reader = read()
    for _ in range(5):
        next(reader)
    reader.close(commit=commit)
    assert shards(client)["done" if commit else "todo"] >= 4


@pytest.mark.parametrize("state", [None, 5, "x", [], {"mark": None}, {"mark": 1.5}, {"mark": -1}, {"mark": 10**20}])
def test_garbage_is_no_position(led: Lead, read: Read, state: Any) -> None:
    led(40, commit="checkpoint")
    reader = read("w")
    next(reader)
    saved = reader.state_dict()
    garbage = saved | state if isinstance(state, dict) else state
    with pytest.raises(SettingsError, match="is not a position of a ShardReader"):
        reader.load_state_dict(garbage)
    with pytest.raises(SettingsError, match="no history of"):
        reader.load_state_dict(saved | {"session": "another"})
    reader.load_state_dict(saved)
