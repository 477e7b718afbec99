"""Connecting to a generation's store, which may be over before a worker comes to it."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch.distributed import TCPStore

from edl.collective.checkpoint.checkpointer import Checkpointer
from edl.collective.checkpoint.state.state import State
from edl.collective.inprocess.process_group import AbortableProcessGroup
from edl.collective.inprocess.run_in_process import run_in_process
from edl.collective.worker_status import WorkerStatusPage
from edl.errors import EDLError


class Interrupted(Exception):
    """The next generation is known."""


def port_of(listener: socket.socket) -> int:
    return int(listener.getsockname()[1])


@pytest.fixture
def held() -> Iterator[socket.socket]:
    """A socket whose port nobody else gets: it refuses connections until it listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        yield listener


def serve_store(held: socket.socket) -> TCPStore:
    """Serve a store at a socket's port, without a moment in which another process could take it."""
    held.listen(8)
    port = port_of(held)
    return TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=held.detach())


def group_at(monkeypatch: pytest.MonkeyPatch, port: int, timeout_s: float) -> AbortableProcessGroup:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    return AbortableProcessGroup(0, 1, "gloo", timeout_s)


@pytest.fixture(params=["gone", "silent"])
def port(request: pytest.FixtureRequest, held: socket.socket) -> Iterator[int]:
    """Of a store whose generation is over, and of one that stands still: the kernel accepts, and nothing answers."""
    if request.param == "silent":
        held.listen(8)
    yield port_of(held)
    # The thread that was left behind would try that port for as long as it may, whoever has it by then.
    store = serve_store(held)
    deadline = time.monotonic() + 60
    while any(thread.name == "edl-store-connect" for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    del store


def test_connecting_can_be_interrupted(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    """The store is not waited for once the next generation is known."""
    asked = []

    def interrupt() -> None:
        asked.append(None)
        if len(asked) == 20:
            raise Interrupted

    with pytest.raises(Interrupted):
        group_at(monkeypatch, port, 60.0).connect_store(interrupt)


def test_store_that_comes_later_is_reached(monkeypatch: pytest.MonkeyPatch, held: socket.socket) -> None:
    asked = threading.Event()
    stores: list[TCPStore] = []

    def serve() -> None:
        asked.wait(60)
        stores.append(serve_store(held))

    server = threading.Thread(target=serve)
    server.start()
    group = group_at(monkeypatch, port_of(held), 60.0)
    group.connect_store(asked.set)
    server.join()
    group.wait_for_ranks("came", 60.0, lambda: None)
    assert stores[0].check(["came/0"])
    assert group._store is not None
    assert group._store.timeout == timedelta(seconds=60.0), "collectives have the time that the user gave"


def test_worker_has_come_before_it_connects(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, held: socket.socket
) -> None:
    """An agent does not replace a worker for which only the store is late."""
    status_page = WorkerStatusPage.create(tmp_path / "status")
    os.mkfifo(tmp_path / "control")
    environ = {"RANK": "0", "WORLD_SIZE": "2", "EDL_GENERATION": "7"}
    environ |= {"EDL_BOARD": str(tmp_path / "status"), "EDL_CONTROL": str(tmp_path / "control")}
    environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port_of(held))}
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    state = State(model=torch.nn.Linear(1, 1))
    with pytest.raises(EDLError, match="no store answers"):
        run_in_process(lambda place: None, state=state, checkpointer=Checkpointer(state), timeout_s=0.1, patience_s=0.1)
    assert status_page.read_status().generation == 7


def test_connecting_has_a_deadline(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    with pytest.raises(EDLError, match=rf"no store answers at 127.0.0.1:{port} within 0.2 s"):
        group_at(monkeypatch, port, 0.2).connect_store(lambda: None)
