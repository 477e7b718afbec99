"""The stream of events: what a client gets, misses, and costs."""

from __future__ import annotations

import socket
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any
from urllib.parse import urlsplit

import pytest

from edl.dashboard.server import DashboardServer, DashboardSettings, look_loop
from edl.dashboard.server.event_stream import EventStreams
from edl.discovery import Store
from tests.fast.dashboard.server import EventClient, ask, put_job, put_master, samples
from tests.waiting import DEADLINE_S, wait_until


def figure(page: str, name: str) -> float:
    return samples(ask(page, "/metrics").body.decode())[name]


def test_reconnect_with_last_event_id(page: str, store: Store) -> None:
    """What was missed comes as an update; an unknown id gets the whole state."""
    put_job(store, "resnet")
    with EventClient(page) as client:
        _, event_id, state = client.next()
        known = [point["t"] for point in state["jobs"][0]["history"]]
    new: list[float] = []

    def come_back(headers: Mapping[str, str] | None = None, query: str = "") -> bool:
        """Take the first event; return whether there is something new in it, which takes the page some seconds."""
        nonlocal new
        with EventClient(page, headers, query) as client:
            kind, _, update = client.next()
        assert kind == "update"
        new = [point["t"] for point in update["jobs"][0]["history"]]
        assert not set(new) & set(known), "points that the client has are sent again"
        return bool(new)

    wait_until(lambda: come_back({"Last-Event-ID": event_id}), "what was missed does not come")
    wait_until(lambda: come_back(query=f"?last_event_id={event_id}"), "what was missed does not come")
    for unknown in ("garbage", "ffffffff-1", f"{event_id}000", f"{event_id[:9]}-1", "x" * 5000):
        with EventClient(page, {"Last-Event-ID": unknown}) as client:
            kind, _, state = client.next()
            assert kind == "state", unknown
            assert len(state["jobs"][0]["history"]) > len(new)


def silent_client(page: str) -> socket.socket:
    """A client that asks for events and reads none."""
    parts = urlsplit(page)
    silent = socket.socket()
    silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    silent.connect((parts.hostname, parts.port))
    silent.sendall(b"GET /api/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
    return silent


def put_much(store: Store) -> None:
    """Records that are cheap to read, and make a state of 600 kB: more than a socket's buffers take."""
    failures = [{"holder": "h", "reason": "cannot be read " * 30, "time": 1.0}] * 10
    poisoned = [{"shard": number, "start": 0, "stop": 1, "failures": failures} for number in range(40)]
    for job in "abc":
        put_master(store, job, datasets=[{"name": "train", "poisoned": poisoned}])


def test_slow_client_is_let_go(url: str, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    put_much(store)
    write, late = EventStreams._write, threading.Event()

    async def note_late(self: EventStreams, *arguments: Any) -> bool:
        taken = await write(self, *arguments)
        if not taken:
            late.set()
        return taken

    monkeypatch.setattr(EventStreams, "_write", note_late)
    with DashboardServer(DashboardSettings(url, port=0), write_s=0.5) as server, silent_client(server.url):
        assert late.wait(DEADLINE_S)
        wait_until(lambda: figure(server.url, "edl_dashboard_clients") == 0, "it is still counted")


def test_close_ends_streams_at_once(url: str, store: Store) -> None:
    server = DashboardServer(DashboardSettings(url, port=0), heartbeat_s=600.0, write_s=600.0)
    with EventClient(server.url) as client:
        client.next("state")
        server.close()
        assert client.answer.read() == b"", "the stream goes on"
    server.close()


def test_clients_share_looks(url: str, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five clients cost one look a pause, and there is none when they are gone; heartbeats have no id."""
    monkeypatch.setattr(look_loop, "INTERVAL_S", 600.0)
    with DashboardServer(DashboardSettings(url, port=0), heartbeat_s=0.02) as server, ExitStack() as stack:
        clients = [stack.enter_context(EventClient(server.url)) for _ in range(5)]
        assert len({client.next("state")[1] for client in clients}) == 1
        assert figure(server.url, "edl_dashboard_clients") == 5
        kind, event_id, data = clients[0].next("heartbeat")
        assert (kind, event_id) == ("heartbeat", "")
        assert data["time"] > 1e9
        assert figure(server.url, "edl_dashboard_looks_total") == 1
    monkeypatch.setattr(look_loop, "INTERVAL_S", 0.05)
    with DashboardServer(DashboardSettings(url, port=0)) as server:
        with EventClient(server.url) as client:
            client.next("update")
        wait_until(lambda: figure(server.url, "edl_dashboard_clients") == 0, "clients that went are still counted")
        before = figure(server.url, "edl_dashboard_looks_total")
        with DashboardServer(DashboardSettings(url, port=0)) as other, EventClient(other.url) as client:
            for _ in range(5):  # a page that has a client looks as often meanwhile
                client.next("update")
        # A look for this question, and a look for the question before where that came in the middle of a look.
        assert figure(server.url, "edl_dashboard_looks_total") <= before + 2, "the store is asked for no client"
