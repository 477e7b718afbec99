"""A master, clients and readers in this process, and nothing left open."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from edl.master import MasterClient, MasterServer, MasterSettings, ShardReader, ShardSettings, open_dataset
from tests.waiting import DEADLINE_S, wait_until

Lead = Callable[..., MasterServer]
Create = Callable[..., None]
Read = Callable[..., ShardReader]


@pytest.fixture(autouse=True)
def _no_thread_stays() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    wait_until(lambda: not [each for each in set(threading.enumerate()) - before if each.name.startswith("edl-")])


@pytest.fixture
def lead(stack: ExitStack, url: str, tmp_path: Path) -> Lead:
    """Start a master of job "job", and wait until it leads."""

    def start(wait: bool = True, **options: Any) -> MasterServer:
        settings = {"store": url, "journal": f"sqlite:///{tmp_path}/journal.sqlite", "lease_s": 20.0, **options}
        master = stack.enter_context(MasterServer("job", MasterSettings(**settings)))
        if wait:
            assert master.wait_leading(DEADLINE_S), master.failure
        return master

    return start


@pytest.fixture
def client(stack: ExitStack, url: str) -> MasterClient:
    return stack.enter_context(MasterClient("job", url, timeout_s=DEADLINE_S))


@pytest.fixture
def create(client: MasterClient) -> Create:
    def make(samples: int, **settings: Any) -> None:
        defaults: dict[str, Any] = {"shard_size": 10, "session_s": 60.0, "lease_s": 60.0}
        client.create_dataset("d", open_dataset(f"range:{samples}", ShardSettings(**{**defaults, **settings})))

    return make


@pytest.fixture
def led(lead: Lead, create: Create) -> Lead:
    """Start a master, and create data set "d" of so many samples."""

    def start(samples: int, **settings: Any) -> MasterServer:
        master = lead()
        create(samples, **settings)
        return master

    return start


@pytest.fixture
def read(stack: ExitStack, client: MasterClient) -> Read:
    def open_reader(holder: str = "w", **options: Any) -> ShardReader:
        return stack.enter_context(ShardReader(client, "d", holder=holder, **options))

    return open_reader


def taken(reader: ShardReader) -> Any:
    """The next shard, which there must be."""
    shard = reader.take(DEADLINE_S)
    assert shard is not None
    return shard


def lapse(master: MasterServer, holder: str) -> None:
    """Have the master take a reader for one that has been silent for longer than its session."""
    term = master._servicer.term
    sessions = [session for session, info in term.book.sessions.items() if info.holder == holder]

    def has_lapsed() -> bool:
        term.clock._heard.update(dict.fromkeys(sessions, -math.inf))
        return not term.book.sessions.keys() & sessions

    wait_until(has_lapsed, f"{holder} to lapse")


def shards(client: MasterClient) -> dict[str, int]:
    return client.status()["datasets"][0]["shards"]
