"""A reader whose tensor channel cannot be opened, or is cut, frozen or answered with garbage."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from edl.distill import Options, Policy
from edl.distill.transport.calls import ServerCalls
from tests.fast.distill.conftest import Serve
from tests.fast.distill.reading import check, reader_of, samples
from tests.waiting import DEADLINE_S, wait_until

CHANNEL = {"tensor_channel": True}
EPOCHS = int(os.environ.get("EDL_TEST_MEDDLED_EPOCHS", "2"))
"""200 take ten minutes: `EDL_TEST_MEDDLED_EPOCHS=200`."""


def offer(monkeypatch: pytest.MonkeyPatch, **changed: Any) -> None:
    """Have every server offer a channel with something else than it has."""
    original = ServerCalls.open_channel

    async def open_channel(*given: Any) -> dict[str, Any]:
        found = await original(*given)
        return found | {name: value(found[name]) if callable(value) else value for name, value in changed.items()}

    monkeypatch.setattr(ServerCalls, "open_channel", open_channel)


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"port": lambda _: closed_port()}, "Connect call failed"),
        ({"proof": "00" * 32}, "not the server that gave out the token"),
        ({"token": "00" * 32}, "no such token"),
        ({"certificate": "00" * 32}, "closed|reset|WRONG_VERSION|wrong version"),
        ({"port": "x"}, "invalid literal"),
    ],
)
def test_no_channel_means_grpc(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, changed: Any, words: str
) -> None:
    """With one line in the log."""
    caplog.set_level(logging.INFO, "edl.distill")
    offer(monkeypatch, **changed)
    with reader_of(serve("echo", CHANNEL)).set_sample_generator(samples(40)) as reader:
        check(list(reader()), 40)
    told = [record.getMessage() for record in caplog.records if "tensor channel cannot be used" in record.getMessage()]
    assert len(told) == 1
    assert any(word in told[0] for word in words.split("|")), told


def test_channel_that_always_ends_means_grpc(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "edl_serving.channel._ServerChannel._take", lambda channel, *_: channel._socket.close("cut by a firewall")
    )
    with reader_of(serve("echo", CHANNEL)).set_sample_generator(samples(40)) as reader:
        check(list(reader()), 40)


def test_a_channel_is_tried_again(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """What kept it from opening may pass."""
    monkeypatch.setattr("edl.distill.transport.client._TRY_AGAIN_S", 0.01)
    ports = iter([closed_port()])
    offer(monkeypatch, port=lambda port: next(ports, port))
    teacher = serve("echo", CHANNEL)
    with reader_of(teacher).set_sample_generator(samples(40)) as reader:
        check(list(reader()), 40)
        wait_until(lambda: teacher.metric("edl_teacher_streams") == 1)
        check(list(reader()), 40)


class Meddler:
    """A proxy before a server's tensor channel, which cuts, freezes or garbles connections at random."""

    def __init__(self, port: int, seed: int) -> None:
        self._target = port
        self._rng = random.Random(seed)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._ended = threading.Event()
        self.meddled = dict.fromkeys(("cut", "frozen", "garbled"), 0)
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def close(self) -> None:
        self._ended.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(DEADLINE_S)

    def _accept(self) -> None:
        while not self._ended.is_set():
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", self._target))
            for one, other in ((near, far), (far, near)):
                self._threads.append(threading.Thread(target=self._pass_on, args=(one, other)))
                self._threads[-1].start()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        with source, sink:
            source.settimeout(0.1)
            passed = 0
            while not self._ended.is_set():
                try:
                    data = source.recv(1 << 16)
                    if not data:
                        break
                    passed += len(data)
                    fate = self._rng.random() if passed > 100 else 1.0  # the handshake is another test
                    if fate < 0.01:
                        self.meddled["garbled"] += 1
                        sink.sendall(self._rng.randbytes(200))
                        break
                    if fate < 0.02:
                        self.meddled["cut"] += 1
                        sink.sendall(data[: self._rng.randrange(len(data))])
                        break
                    if fate < 0.022:
                        self.meddled["frozen"] += 1
                        self._ended.wait(DEADLINE_S)
                        break
                    sink.sendall(data)
                except TimeoutError:
                    continue
                except OSError:
                    break
            for sock in (source, sink):
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def meddlers(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[int, Meddler]]:
    found: dict[int, Meddler] = {}

    def through(port: int) -> int:
        if port not in found:
            found[port] = Meddler(port, len(found))
        return found[port].port

    offer(monkeypatch, port=through)
    yield found
    for meddler in found.values():
        meddler.close()


@pytest.mark.timeout(110 + 10 * EPOCHS)  # each wait has a deadline of its own: this bounds the work
def test_meddled_channels_lose_nothing(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, meddlers: dict[int, Meddler]
) -> None:
    monkeypatch.setattr("edl.distill.transport.channel._PING_S", 0.2)
    monkeypatch.setattr("edl.distill.transport.channel._LOST_S", 1.4)
    teachers = [serve("echo", CHANNEL) for _ in range(3)]
    patient = Policy(aside_s=0.1, open_max_s=0.5, task_failures=1000, task_losses=1000)
    options = Options(shared_memory=False, teacher_timeout_s=DEADLINE_S, policy=patient)
    with reader_of(*teachers, teacher_batch_size=8, options=options).set_sample_generator(samples(3000)) as reader:
        for _ in range(EPOCHS):
            check(list(reader()), 3000)
    assert len(meddlers) == 3
    assert sum(meddler.meddled["cut"] + meddler.meddled["garbled"] for meddler in meddlers.values())
