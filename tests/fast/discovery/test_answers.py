"""What a broken Consul agent or etcd, or neither, may answer: an error in time, never an empty list or a hang."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from edl.discovery import open_registry, open_store
from edl.errors import DiscoveryError
from tests.fast.discovery.conformance.backends import teacher
from tests.waiting import DEADLINE_S

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nX-Consul-Index: %s\r\n"


def body(text: bytes, head: bytes = HEAD % b"1", length: int | None = None) -> bytes:
    return head + b"Content-Length: %d\r\n\r\n" % (len(text) if length is None else length) + text


@contextlib.contextmanager
def serving(answer: bytes, drips: bytes = b"", hangs: bool = False) -> Iterator[int]:
    """A server that says one thing to everybody, and then goes on with drops, says no more, or closes."""
    ended = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer_one(connection: socket.socket) -> None:
            with connection, contextlib.suppress(OSError):
                connection.settimeout(1)
                connection.recv(65536)
                connection.sendall(answer)
                while drips and not ended.wait(0.05):
                    connection.sendall(drips)
                if hangs:
                    ended.wait(DEADLINE_S)

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    threads.append(threading.Thread(target=answer_one, args=(listener.accept()[0],)))
                    threads[-1].start()

        threads = [threading.Thread(target=accept)]
        threads[0].start()
        try:
            yield listener.getsockname()[1]
        finally:
            ended.set()
            listener.shutdown(socket.SHUT_RDWR)
            for thread in threads:
                thread.join(DEADLINE_S)


def check_refused(url: str, words: str = ".") -> None:
    """Every question is an error with printable words, and so is a watch."""
    with (
        open_registry(url, timeout_s=0.2) as registry,
        open_store(url, timeout_s=0.2) as store,
        registry.watch("s") as watch,
        store.watch("a") as entries,
    ):
        for call in (
            lambda: registry.snapshot("s"),
            registry.services,
            lambda: registry.register(teacher("s")),
            lambda: store.get("a"),
            lambda: store.list("a"),
            lambda: store.put("a", b""),
            store.lease,
        ):
            with pytest.raises(DiscoveryError, match=words) as caught:
                call()
            assert str(caught.value).isprintable()
            assert len(str(caught.value)) < 1500
        for snapshot in (watch.get(DEADLINE_S), entries.get(DEADLINE_S)):
            assert snapshot is not None
            assert snapshot.stale
            assert snapshot.stale.isprintable()


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(body(b"[]", length=100), id="half"),
        pytest.param(body(b"[" * 200_000), id="deep"),
        pytest.param(body(b"\x1b[2J<p>" * 50_000, b"HTTP/1.1 500 Oh\x1b[2J\r\n"), id="error"),
        pytest.param(body(b"elsewhere", b"HTTP/1.1 302 Found\r\n"), id="redirect"),
        pytest.param(body(b'{"not": "a list"}', HEAD % b"no number"), id="object"),
        pytest.param(body(b'[{"Service": 7, "Node": []}]'), id="fields"),
        pytest.param(body(b'["text"]'), id="text"),
        pytest.param(body(b"\xff\xfe\0"), id="bytes"),
        pytest.param(body(b""), id="empty"),
    ],
)
def test_bad_consul_answer_is_an_error(answer: bytes) -> None:
    with serving(answer) as port:
        check_refused(f"consul://127.0.0.1:{port}")


@pytest.mark.parametrize(
    ("answer", "drips"),
    [
        pytest.param(body(b"", length=1_000_000), b" ", id="body"),
        pytest.param(HEAD % b"1", b"X-More: 1\r\n", id="headers"),
        pytest.param(HEAD % b"1" + b"\r\n", b"[" * 10_000_000, id="endless"),
        pytest.param(HEAD[:30], b"", id="silence"),
    ],
)
def test_consul_that_drips_is_an_error(answer: bytes, drips: bytes) -> None:
    with serving(answer, drips, hangs=True) as port:
        with open_registry(f"consul://127.0.0.1:{port}", timeout_s=0.2) as registry, pytest.raises(DiscoveryError):
            registry.snapshot("s")
        with open_store(f"consul://127.0.0.1:{port}", timeout_s=0.2) as store, pytest.raises(DiscoveryError):
            store.get("a")


@pytest.mark.parametrize(
    "answer",
    [b"", b"HTTP/1.1 400 Bad Request\r\nContent-Length: 4\r\n\r\n\x1b[2J", b"\0\0\0\4\0\0\0\0\0" * 9, b"x" * 70000],
    ids=["silent", "http", "settings", "noise"],
)
def test_bad_etcd_answer_is_an_error(answer: bytes) -> None:
    with serving(answer, hangs=True) as port:
        check_refused(f"etcd://127.0.0.1:{port}")


def test_filtered_by_acls_is_an_error() -> None:
    """Consul 1.11 and newer say so in a header where the token may not read; older ones leave it out."""
    answer = body(b"[]", HEAD % b"7" + b"X-Consul-Results-Filtered-By-ACLs: true\r\n")
    with (
        serving(answer) as port,
        open_registry(f"consul://127.0.0.1:{port}") as registry,
        pytest.raises(DiscoveryError, match="the token may not read them"),
    ):
        registry.snapshot("s")
