"""Shards that a process which lives has taken and never reports: its thread would renew their leases for ever."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

import pytest

from edl.errors import LeaseLostError
from edl.master import MasterClient, MasterServer, ShardReader
from tests.fast.master.processes import until

Lead = Callable[..., MasterServer]
Create = Callable[..., None]
Read = Callable[..., ShardReader]


def shards(client: MasterClient) -> dict[str, int]:
    found: dict[str, int] = client.status()["datasets"][0]["shards"]
    return found


def test_a_hanging_process_loses_its_shards(lead: Lead, create: Create, read: Read, client: MasterClient) -> None:
    """The thread that renews leases would keep them for ever."""
    lead()
    create(20, session_s=5.0, lease_s=5.0)
    reader = read(prefetch=0, explicit=True, stuck_s=0.5)
    shard = reader.take(20)
    assert shard is not None
    until(lambda: shards(client)["todo"] == 2)
    with pytest.raises(LeaseLostError):
        reader.report_done(shard)
    while not reader.finished:
        if (shard := reader.take(5)) is not None:
            with contextlib.suppress(LeaseLostError):  # this process was hanging again, for half a second
                reader.report_done(shard)
    assert shards(client)["done"] == 2


def test_a_forgotten_shard_comes_back(
    lead: Lead, create: Create, read: Read, client: MasterClient, caplog: pytest.LogCaptureFixture
) -> None:
    """Its process goes on: it asks for shards, and reports others."""
    lead()
    create(20, session_s=5.0, lease_s=5.0)
    reader = read(prefetch=0, explicit=True, stuck_s=3.0)
    forgotten = reader.take(20)
    other = reader.take(20)
    assert forgotten is not None
    assert other is not None
    reader.report_done(other)
    again = reader.take(20)
    assert again is not None
    assert (again.start, again.stop) == (forgotten.start, forgotten.stop)
    assert f"shard {forgotten.shard} of d was not reported" in caplog.text
    with pytest.raises(LeaseLostError):
        reader.report_done(forgotten)
    reader.report_done(again)
    assert shards(client)["done"] == 2


def test_who_waits_is_told_what_it_holds(
    lead: Lead,
    create: Create,
    read: Read,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("edl.master.client.session_thread._QUIET_S", 0.3)
    lead()
    create(10, session_s=5.0, lease_s=5.0)
    reader = read(prefetch=0, explicit=True)
    shard = reader.take(20)
    assert shard is not None

    def waits() -> bool:
        return reader.take(0.2) is None and "has not reported 1 that it has (0)" in caplog.text

    until(waits)
    reader.report_done(shard)


def test_a_shard_in_work_is_kept(lead: Lead, create: Create, read: Read, client: MasterClient) -> None:
    """What is at hand beside it goes back, and counts no failure."""
    lead()
    create(40, session_s=5.0, lease_s=5.0, max_failures=1)
    reader = read(prefetch=3, explicit=True, stuck_s=5.0)
    shard = reader.take(20)
    assert shard is not None
    taken_at = time.monotonic()
    until(lambda: shards(client)["doing"] > 1)

    def works() -> bool:
        reader.consume(shard, 1)
        return time.monotonic() > taken_at + 8.0 and shards(client)["doing"] == 1

    until(works)
    reader.report_done(shard)
    assert shards(client) == {"todo": 3, "doing": 0, "done": 1, "poisoned": 0}
    assert reader.take(20) is not None, "it goes on when it asks"


def test_a_forgotten_one_ends_a_checkpoint(lead: Lead, create: Create, read: Read, client: MasterClient) -> None:
    """The reader's state may hold samples of it: all since the last mark goes back."""
    lead()
    create(20, session_s=5.0, lease_s=5.0, commit="checkpoint")
    reader = read(prefetch=0, explicit=True, stuck_s=3.0)
    assert reader.take(20) is not None
    other = reader.take(20)
    assert other is not None
    reader.report_done(other)
    with pytest.raises(LeaseLostError, match="stuck_s"):
        reader.take(20)
    until(lambda: shards(client)["todo"] == 2)
