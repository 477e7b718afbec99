"""Readers of a master in this process: shards, reports, leases, ends."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edl.errors import (
    ClosedError,
    ConflictError,
    LeaseLostError,
    NoMasterError,
    PoisonedShardsError,
    ProtocolError,
    SettingsError,
)
from edl.master import MasterClient, MasterServer, ShardingClient, ShardReader, ShardSettings, open_dataset
from edl.master.client.connection import MasterConnection
from edl.master.client.turn_stream import TurnStream
from edl.protocol import master as messages
from tests.fast.master.processes import until

Lead = Callable[..., MasterServer]
Create = Callable[..., None]
Read = Callable[..., ShardReader]


def samples(reader: ShardReader) -> list[int]:
    return [sample for shard in reader for sample in range(shard.start, shard.stop)]


def shards(client: MasterClient) -> dict[str, int]:
    found: dict[str, int] = client.status()["datasets"][0]["shards"]
    return found


def test_readers_share_an_epoch(lead: Lead, create: Create, read: Read, client: MasterClient) -> None:
    master = lead()
    create(1000, epochs=2, shuffle=True, seed=1)
    found: list[list[int]] = [[], [], []]

    def run(number: int) -> None:
        found[number] += samples(read(f"w{number}"))

    threads = [threading.Thread(target=run, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert Counter(itertools.chain(*found)) == Counter(list(range(1000)) * 2)
    assert master.wait_done(20)
    assert client.status()["state"] == "leading"
    assert master.status()["state"] == "done"


def test_a_fast_worker_gets_more(lead: Lead, create: Create, read: Read) -> None:
    lead()
    create(600)
    counts = Counter[str]()
    fast_ended = threading.Event()

    def run_fast() -> None:
        with read("fast", prefetch=1) as reader:
            for _ in reader:
                counts["fast"] += 1
                if counts.total() > 50:  # else it would wait for what the slow one has
                    break
        fast_ended.set()

    def run_slow() -> None:
        until(lambda: counts["fast"])
        for _ in read("slow", prefetch=1):
            counts["slow"] += 1
            enough = counts["fast"] + 10
            until(lambda enough=enough: fast_ended.is_set() or counts["fast"] >= enough)

    threads = [threading.Thread(target=run_fast), threading.Thread(target=run_slow)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert counts["fast"] + counts["slow"] >= 60
    assert counts["fast"] > 2 * counts["slow"]


def test_samples_are_read_by_the_worker(lead: Lead, client: MasterClient, read: Read, tmp_path: Path) -> None:
    lead()
    (tmp_path / "text").write_text("".join(f"line {number}\n" for number in range(100)))
    client.create_dataset("d", open_dataset(f"lines:{tmp_path}/text", ShardSettings(shard_size=7), encoding="utf-8"))
    assert sorted(read().samples()) == sorted(f"line {number}" for number in range(100))


def test_unreadable_shards_are_poisoned(lead: Lead, client: MasterClient, read: Read, tmp_path: Path) -> None:
    master = lead()
    text = tmp_path / "text"
    text.write_text("".join(f"line {number}\n" for number in range(100)))
    client.create_dataset("d", open_dataset(f"lines:{text}", ShardSettings(shard_size=50, max_failures=2)))
    text.unlink()
    with pytest.raises(PoisonedShardsError, match="2 shards of d were given up"):
        list(read().samples())
    found = client.status()["datasets"][0]
    assert found["shards"]["poisoned"] == 2
    assert "text" in found["poisoned"][0]["failures"][0]["reason"]
    assert client.retry_poisoned("d") == 2
    text.write_text("".join(f"line {number}\n" for number in range(100)))
    os.utime(text)
    assert shards(client)["todo"] == 2
    until(lambda: not master.done)


def test_what_was_read_of_a_shard_counts(lead: Lead, client: MasterClient, read: Read, tmp_path: Path) -> None:
    """Of a shard that can be read in part each sample comes once."""
    lead()
    folder = tmp_path / "files"
    folder.mkdir()
    for number in range(10):
        (folder / f"{number}").write_text("x")
    client.create_dataset("d", open_dataset(f"files:{folder}", ShardSettings(shard_size=10)))
    (folder / "4").unlink()
    reader = read(on_poisoned="warn")
    assert [sample.id for sample in reader.samples()] == ["0", "1", "2", "3"]
    found = client.status()["datasets"][0]
    assert found["units_done"] == 4
    assert found["shards"]["poisoned"] == 1


def test_a_late_report_ends_no_other_task(lead: Lead, create: Create, read: Read, client: MasterClient) -> None:
    """In DLRover the late report of a worker that was taken for lost ends the task of the worker that has it now."""
    lead()
    create(10, session_s=3.0, lease_s=3.0)
    late = read("late", explicit=True, prefetch=0)
    shard = late.take(20)
    assert shard is not None
    _stop_renewing(late)
    until(lambda: shards(client)["todo"] == 1)
    new = read("new", explicit=True, prefetch=0)
    again = new.take(20)
    assert again is not None
    assert (again.start, again.stop) == (shard.start, shard.stop)
    with pytest.raises(LeaseLostError):
        late.report_done(shard)
    assert shards(client) == {"todo": 0, "doing": 1, "done": 0, "poisoned": 0}
    new.report_done(again)
    assert shards(client)["done"] == 1


def _stop_renewing(reader: ShardReader) -> None:
    """Have a reader be as silent as a process that is stopped."""
    spec = reader._thread.spec
    spec.lease_s = spec.session_s = 10_000.0


def test_leases_are_renewed_meanwhile(lead: Lead, create: Create, read: Read, client: MasterClient) -> None:
    lead()
    create(20, session_s=4.0, lease_s=4.0)
    reader = read(prefetch=0, explicit=True)
    shard = reader.take(20)
    assert shard is not None
    taken_at = time.monotonic()
    until(lambda: reader._thread._heard_at > taken_at + 6.0)
    reader.report_done(shard)
    assert shards(client)["done"] == 1
    assert reader.refused == 0


def test_closing_gives_shards_back(lead: Lead, create: Create, read: Read, client: MasterClient) -> None:
    lead()
    create(100)
    reader = read(explicit=True, prefetch=3)
    shard = reader.take(20)
    assert shard is not None
    until(lambda: shards(client)["doing"] == 3)
    reader.close()
    assert shards(client) == {"todo": 10, "doing": 0, "done": 0, "poisoned": 0}
    with pytest.raises(ClosedError):
        reader.take()


def test_closing_wakes_who_waits(lead: Lead, create: Create, read: Read) -> None:
    lead()
    create(10)
    holder = read("first", explicit=True)
    assert holder.take(20) is not None
    waiting = read("second", explicit=True)
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(waiting.take(60)))
    thread.start()
    until(lambda: waiting._thread._hungry)
    waiting.close()
    thread.join(10)
    assert found == [None]


def test_returned_shards_count_no_failure(lead: Lead, create: Create, read: Read, client: MasterClient) -> None:
    lead()
    create(10, max_failures=1)
    reader = read(explicit=True, prefetch=0)
    for _ in range(3):
        shard = reader.take(20)
        assert shard is not None
        reader.give_back(shard)
    assert shards(client) == {"todo": 1, "doing": 0, "done": 0, "poisoned": 0}


def test_reports_may_come_in_any_order(lead: Lead, create: Create, read: Read, client: MasterClient) -> None:
    lead()
    create(50)
    reader = read(explicit=True, prefetch=5)
    taken = [reader.take(20) for _ in range(5)]
    for shard in reversed(taken):
        assert shard is not None
        reader.report_done(shard)
    assert shards(client)["done"] == 5
    with pytest.raises(LeaseLostError):
        reader.report_done(taken[0])  # type: ignore[arg-type]
    assert reader.take(30) is None
    assert reader.finished


def test_creating_again_is_no_error(lead: Lead, create: Create, client: MasterClient) -> None:
    lead()
    create(100)
    create(100)
    with pytest.raises(ConflictError):
        create(200)
    assert client.describe_dataset("other") is None
    spec = client.describe_dataset("d")
    assert spec is not None
    assert spec.units == 100


def test_a_reader_waits_for_its_data_set(lead: Lead, create: Create, read: Read) -> None:
    lead()
    reader = read()
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.extend(samples(reader)))
    thread.start()
    until(lambda: reader.away_s > 0)
    create(30)
    thread.join(30)
    assert sorted(found) == list(range(30))


def test_without_a_master_calls_end_in_time(url: str) -> None:
    with MasterClient("job", url, timeout_s=0.5) as client:
        begun = time.monotonic()
        with pytest.raises(NoMasterError, match="edl master job"):
            client.status()
        assert time.monotonic() - begun < 10
        with ShardReader(client, "d") as reader, pytest.raises(NoMasterError, match="edl master job"):
            next(reader)


def test_another_jobs_master_is_none(lead: Lead) -> None:
    master = lead()
    other = MasterClient("other", endpoint=master.endpoint, timeout_s=0.5)
    with other, pytest.raises(NoMasterError, match="'job''s, not 'other''s"):
        other.status()


def test_progress_goes_out_and_in(lead: Lead, create: Create, read: Read, client: MasterClient) -> None:
    lead()
    create(100)
    reader = read(explicit=True, prefetch=1)
    shard = reader.take(20)
    assert shard is not None
    reader.report_done(shard)
    progress = client.progress("d")
    while (other := reader.take(30)) is not None:
        reader.report_done(other)
    assert shards(client)["done"] == 10
    client.restore_progress("d", progress)
    assert shards(client) == {"todo": 9, "doing": 0, "done": 1, "poisoned": 0}
    with pytest.raises(ProtocolError):
        client.restore_progress("d", b"nonsense")


def test_the_calls_of_dlrover(lead: Lead, client: MasterClient) -> None:
    lead()
    with ShardingClient(client, "train", 10, 1, 95, num_minibatches_per_shard=2) as sharding:
        first = sharding.fetch_shard()
        assert first is not None
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


def test_a_refusal_keeps_no_report_back(lead: Lead, client: MasterClient) -> None:
    lead()
    with ShardingClient(client, "train", 10, 1, 60, num_minibatches_per_shard=2) as sharding:
        first, _ = sharding.fetch_shard(), sharding.fetch_shard()
        assert first is not None
        sharding._reader.give_back(sharding._pending[0])
        with pytest.raises(LeaseLostError):
            sharding.report_batch_done(40)
        assert client.status()["datasets"][0]["units_done"] == 20
        sharding.fetch_shard()
        sharding.fetch_shard()
        sharding._reader.give_back(sharding._pending[0])
        with pytest.raises(LeaseLostError):
            sharding.report_all_task_error("broken")
        assert sharding._reader.take(20) is not None
        assert sharding._reader.take(20) is not None, "both came back"


def test_a_failed_close_is_tried_again(lead: Lead, create: Create, read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that is kept would renew its session for ever, and the master would not end."""
    calls: list[str] = []
    call = MasterConnection.call

    def fail_first(self: MasterConnection, method: str, *args: Any, **options: Any) -> Any:
        calls.append(method)
        if method == "CloseSession" and calls.count(method) == 1:
            raise NoMasterError("no answer")
        return call(self, method, *args, **options)

    monkeypatch.setattr(MasterConnection, "call", fail_first)
    master = lead()
    create(20)
    reader = read()
    assert len(list(reader)) == 2
    assert master.wait_done(20)
    assert calls.count("CloseSession") == 2


def test_a_forked_child_is_refused(lead: Lead, create: Create, read: Read, client: MasterClient) -> None:
    lead()
    create(10)
    reader = read()
    child = os.fork()
    if child == 0:
        refusals = 0
        for call in (client.status, reader.take, lambda: next(reader)):
            try:
                call()  # type: ignore[operator]
            except ClosedError:
                refusals += 1
        os._exit(refusals)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    assert len(samples(reader)) == 10


def test_a_late_worker_finds_all_done(
    lead: Lead, create: Create, read: Read, monkeypatch: pytest.MonkeyPatch, client: MasterClient
) -> None:
    """The master has ended: nothing is left to wait for."""
    monkeypatch.setattr("edl.master.client.session_thread._DONE_S", 0.5)
    master = lead()
    create(20, max_failures=1)
    reader = read(explicit=True)
    reader.report_failed(next(reader), "bad")
    reader.report_done(next(reader))
    reader.take(5)
    reader.close()
    assert master.wait_done(20)
    master.close()
    with pytest.raises(PoisonedShardsError):
        next(read())
    late = read(on_poisoned="warn")
    assert list(late) == []
    assert late.finished


def test_failure_in_any_words(lead: Lead, create: Create, read: Read, client: MasterClient) -> None:
    """A reason with what no message could carry, such as the name of a file that is not UTF-8."""
    lead()
    create(40, max_failures=1)
    reader = read("w", explicit=True, on_poisoned="warn")
    first = next(reader)
    reader.report_failed(first, "cannot decode \0 a\udcff.jpg")
    for shard in reader:
        reader.report_done(shard)
    (poisoned,) = client.status()["datasets"][0]["poisoned"]
    assert poisoned["failures"][0]["reason"].endswith("a\\udcff.jpg")


@pytest.mark.parametrize(
    "state", [None, 5, "x", [], {}, {"mark": None}, {"mark": "1"}, {"mark": 1.5}, {"mark": -1}, {"mark": 10**20}]
)
def test_garbage_is_no_position(lead: Lead, create: Create, read: Read, state: Any) -> None:
    lead()
    create(40, commit="checkpoint")
    reader = read("w")
    next(reader)
    saved = reader.state_dict()
    garbage = saved | state if isinstance(state, dict) and state else state
    with pytest.raises(SettingsError, match="no position of a ShardReader"):
        reader.load_state_dict(garbage)
    reader.load_state_dict(saved)


def test_lost_position_is_no_wait(lead: Lead, create: Create, read: Read) -> None:
    """A position that is not kept will never be: nothing is gained by asking again."""
    lead()
    create(40, commit="checkpoint")
    reader = read("w")
    next(reader)
    saved = reader.state_dict()
    begin = time.monotonic()
    with pytest.raises(SettingsError, match="nothing is kept of"):
        reader.load_state_dict(saved | {"session": "another"})
    assert time.monotonic() - begin < 15.0, "as long as a session that might end"


def test_siblings_do_not_both_leave(
    lead: Lead, create: Create, read: Read, client: MasterClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each would see the other's shards at the master, whose answers are late, and leave all to it."""
    exchange = TurnStream.exchange

    def answer_late(self: TurnStream, request: messages.NextRequest) -> messages.NextReply:
        reply = exchange(self, request)
        if request.turn.want and reply.leases:
            time.sleep(1.5)
        return reply

    monkeypatch.setattr(TurnStream, "exchange", answer_late)
    lead()
    create(100)
    found: list[list[int]] = [[], []]

    def has_sibling_shards(number: int) -> bool:
        holders = client.status()["datasets"][0]["holders"]
        return any(holder["leases"] and holder["holder"] != f"w{number}" for holder in holders)

    def run(number: int) -> None:
        found[number] += samples(read(f"w{number}", may_leave=lambda: has_sibling_shards(number)))

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    assert sorted(itertools.chain(*found)) == list(range(100))
