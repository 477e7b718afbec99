"""A master, clients and readers in this process, and nothing left open."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from edl.master import MasterClient, MasterServer, MasterSettings, ShardReader, ShardSettings, open_dataset
from tests.fast.master.processes import LEASE_S, until


@pytest.fixture(autouse=True)
def _no_thread_stays() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    until(lambda: not [thread for thread in set(threading.enumerate()) - before if thread.name.startswith("edl-")])


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/store.sqlite"


@pytest.fixture
def lead(stack: ExitStack, url: str, tmp_path: Path) -> Callable[..., MasterServer]:
    """Start a master of job "job", and wait until it leads."""

    def start(wait: bool = True, **options: Any) -> MasterServer:
        settings = {"store": url, "journal": f"sqlite:///{tmp_path}/journal.sqlite", "lease_s": LEASE_S, **options}
        master = stack.enter_context(MasterServer("job", MasterSettings(**settings)))
        if wait:
            assert master.wait_leading(20), master.failure
        return master

    return start


@pytest.fixture
def client(stack: ExitStack, url: str) -> MasterClient:
    return stack.enter_context(MasterClient("job", url, timeout_s=30))


@pytest.fixture
def create(client: MasterClient) -> Callable[..., None]:
    """Create data set "d" of so many samples."""

    def make(samples: int, **settings: Any) -> None:
        defaults: dict[str, Any] = {"shard_size": 10, "session_s": 20.0}
        client.create_dataset("d", open_dataset(f"range:{samples}", ShardSettings(**{**defaults, **settings})))

    return make


@pytest.fixture
def read(stack: ExitStack, client: MasterClient) -> Callable[..., ShardReader]:
    def open_reader(holder: str = "w", **options: Any) -> ShardReader:
        return stack.enter_context(ShardReader(client, "d", holder=holder, **options))

    return open_reader
