"""The stream of events: what a client gets, misses, and costs."""

from __future__ import annotations

import gc
import socket
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from urllib.parse import urlsplit

import pytest

from edl.dashboard.server import DashboardServer, DashboardSettings
from edl.dashboard.server.look_loop import Published
from edl.discovery import Store
from tests.fast.dashboard.server import TIMEOUT_S, EventClient, ask, put_job, put_master, samples, until


@pytest.fixture
def impatient(url: str, store: Store) -> Iterator[str]:
    """The URL of a page that lets slow clients go after seconds: it is to be asked meanwhile, on a busy machine too."""
    with DashboardServer(DashboardSettings(url, port=0), heartbeat_s=0.3, write_s=6.0) as server:
        yield server.url


@pytest.fixture
def patient(url: str, store: Store) -> Iterator[str]:
    """The URL of a page that lets no slow client go, however long a busy machine takes for some updates."""
    with DashboardServer(DashboardSettings(url, port=0), write_s=600.0) as server:
        yield server.url


def figure(page: str, name: str) -> float:
    return samples(ask(page, "/metrics").body.decode())[name]


def test_state_then_updates(page: str, store: Store) -> None:
    """The first event is the whole state; then come changes, whose histories hold what is new."""
    put_job(store, "resnet")
    with EventClient(page) as client:
        kind, first_id, state = client.next()
        assert (kind, client.retry_ms) == ("state", 2000)
        assert client.answer.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        assert len(state["jobs"][0]["history"]) >= 2
        put_job(store, "other")
        points = 0
        while True:
            kind, event_id, update = client.next()
            assert kind in ("update", "heartbeat")
            if kind == "update":
                assert event_id != first_id
                points += sum(len(job["history"]) for job in update["jobs"] if job["job"] == "resnet")
            if kind == "update" and points >= 2:
                break
        assert {job["job"] for job in update["jobs"]} == {"resnet", "other"}


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

    until(lambda: come_back({"Last-Event-ID": event_id}), "what was missed does not come")
    until(lambda: come_back(query=f"?last_event_id={event_id}"), "what was missed does not come")
    for unknown in ("garbage", "ffffffff-1", f"{event_id}000", f"{event_id[:9]}-1", "x" * 5000):
        with EventClient(page, {"Last-Event-ID": unknown}) as client:
            kind, _, state = client.next()
            assert kind == "state", unknown
            assert len(state["jobs"][0]["history"]) > len(new)


def test_heartbeats_have_no_id(url: str, store: Store) -> None:
    """A client that waits for a store that does not answer hears that the page lives."""
    with DashboardServer(DashboardSettings(url, port=0), heartbeat_s=0.2) as server, EventClient(server.url) as client:
        client.next("state")
        kind, event_id, data = client.next("heartbeat")
        assert (kind, event_id) == ("heartbeat", "")
        assert abs(data["time"] - time.time()) < 60


def test_many_clients_cost_one_look(page: str, url: str) -> None:
    """Twenty clients and a scraper: about a look a second, and none when they are gone."""
    with ExitStack() as stack, ThreadPoolExecutor(20) as pool:
        clients = [stack.enter_context(EventClient(page)) for _ in range(20)]
        for client in clients:
            client.next("state")
        began, before = time.monotonic(), figure(page, "edl_dashboard_looks_total")
        for _ in range(2):
            list(pool.map(lambda client: client.next("update"), clients))
            figure(page, "edl_dashboard_looks_total")
        looks, passed_s = figure(page, "edl_dashboard_looks_total") - before, time.monotonic() - began
        assert 1 <= looks <= passed_s + 2, (looks, passed_s)
        assert figure(page, "edl_dashboard_clients") == 20
    until(lambda: figure(page, "edl_dashboard_clients") == 0, "clients that went are still counted")
    before = figure(page, "edl_dashboard_looks_total")
    with DashboardServer(DashboardSettings(url, port=0)) as other, EventClient(other.url) as client:
        for _ in range(4):  # a page that has a client looks as often meanwhile
            client.next("update")
    # A look for this question, and a look for the question before where that came in the middle of a look.
    assert figure(page, "edl_dashboard_looks_total") <= before + 2, "the store is asked, and there is no client"


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


def test_slow_client_is_let_go(impatient: str, store: Store) -> None:
    put_much(store)
    with silent_client(impatient):
        until(lambda: figure(impatient, "edl_dashboard_clients") == 1, "it is not a client")
        until(lambda: figure(impatient, "edl_dashboard_clients") == 0, "it was not let go")
    with EventClient(impatient) as client:
        assert len(client.next("state")[2]["jobs"]) == 3, "another client gets everything"


def test_slow_reader_skips_to_the_newest(patient: str, store: Store) -> None:
    """However long a client reads nothing, it holds on to a state or two; then it gets the newest, not all."""
    put_much(store)
    with silent_client(patient) as late, EventClient(patient) as prompt:
        boot = prompt.next("state")[1].partition("-")[0]
        for _ in range(7):
            newest = int(prompt.next("update")[1].partition("-")[2])
        assert figure(patient, "edl_dashboard_clients") == 2
        gc.collect()
        kept = [found.look for found in gc.get_objects() if type(found) is Published and found.id.startswith(boot)]
        assert 1 <= len(kept) <= 4, f"states {kept} pile up for a client that is slow"
        late.settimeout(TIMEOUT_S)
        got = b""
        ids: list[int] = []
        while not ids or ids[-1] < newest:
            part = late.recv(1 << 20)
            assert part, "the stream ended"
            got += part
            ids = [int(line.partition(b"-")[2]) for line in got.split(b"\n") if line.startswith(b"id: ")]
        assert len(ids) <= 5, f"it got all events that it was too slow for: {ids}"
        assert ids == sorted(ids)


def test_close_ends_streams_at_once(url: str, store: Store) -> None:
    server = DashboardServer(DashboardSettings(url, port=0), heartbeat_s=600.0, write_s=600.0)
    with EventClient(server.url) as client:
        client.next("state")
        began = time.monotonic()
        server.close()
        assert time.monotonic() - began < TIMEOUT_S
        assert client.answer.read() == b"", "the stream goes on"
    server.close()
