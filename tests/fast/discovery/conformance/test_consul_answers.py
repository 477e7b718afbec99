"""What a broken Consul agent, or what is none at all, may answer: an error in time, never an empty list or a hang."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from edl.discovery import open_registry, open_store
from edl.errors import DiscoveryError

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nX-Consul-Index: 1\r\n"
Answer = Callable[[socket.socket, threading.Event], None]


def drips_body(connection: socket.socket, ended: threading.Event) -> None:
    connection.sendall(HEAD + b"Content-Length: 1000000\r\n\r\n")
    while not ended.wait(0.05):
        connection.sendall(b" ")


def drips_headers(connection: socket.socket, ended: threading.Event) -> None:
    connection.sendall(HEAD)
    while not ended.wait(0.05):
        connection.sendall(b"X-More: 1\r\n"[: 1 + int(time.monotonic() * 20) % 5])


def never_ends(connection: socket.socket, ended: threading.Event) -> None:
    connection.sendall(HEAD + b"\r\n")
    while not ended.is_set():
        connection.sendall(b"[" * 65536)


def half_open(connection: socket.socket, ended: threading.Event) -> None:
    connection.sendall(HEAD[:30])
    ended.wait(30)


def breaks_off(connection: socket.socket, _: threading.Event) -> None:
    connection.sendall(HEAD + b"Content-Length: 100\r\n\r\n[]")


def says_nothing(_: socket.socket, __: threading.Event) -> None:
    return


def is_deep(connection: socket.socket, _: threading.Event) -> None:
    connection.sendall(HEAD + b"Content-Length: 200000\r\n\r\n" + b"[" * 200_000)


def fails(connection: socket.socket, _: threading.Event) -> None:
    page = b"No cluster leader\r\n\x1b[2J\x1b]0;x\x07" + b"<p>" * 100_000
    connection.sendall(b"HTTP/1.1 500 Oh\x1b[2J\r\nContent-Length: %d\r\n\r\n" % len(page) + page)


@contextlib.contextmanager
def serving(answer: Answer) -> Iterator[str]:
    ended = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def one(connection: socket.socket) -> None:
            with connection, contextlib.suppress(OSError):
                connection.settimeout(1)
                connection.recv(65536)
                answer(connection, ended)

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    thread = threading.Thread(target=one, args=(listener.accept()[0],))
                    thread.start()
                    threads.append(thread)

        threads = [threading.Thread(target=accept)]
        threads[0].start()
        try:
            yield f"consul://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            ended.set()
            listener.shutdown(socket.SHUT_RDWR)
            for thread in threads:
                thread.join(30)


@pytest.mark.parametrize(
    "answer", [drips_body, drips_headers, never_ends, half_open, breaks_off, says_nothing, is_deep, fails]
)
def test_a_bad_answer_is_an_error_in_time(answer: Answer) -> None:
    with (
        serving(answer) as url,
        open_registry(url, timeout_s=0.3) as registry,
        open_store(url, timeout_s=0.3) as store,
        registry.watch("s") as watch,
    ):
        for call in (lambda: registry.snapshot("s"), registry.services, lambda: store.get("a")):
            begun = time.monotonic()
            with pytest.raises(DiscoveryError) as caught:
                call()
            assert time.monotonic() - begun < 15, f"{answer.__name__}: a deadline of 0.3 s"
            words = str(caught.value)
            assert words.isprintable()
            assert len(words) < 1500
        if answer not in (drips_body, drips_headers, never_ends, half_open):  # those let it wait for 10 s and more
            snapshot = watch.get(20)
            assert snapshot is not None
            assert snapshot.stale
            assert snapshot.stale.isprintable()
