"""A reader whose tensor channel cannot be opened, or is cut, frozen or answered with garbage."""

from __future__ import annotations

import contextlib
import logging
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from edl.distill import Options, Policy
from edl.distill.transport.calls import ServerCalls
from tests.fast.distill.conftest import Serve
from tests.fast.distill.reading import check, reader_of, samples
from tests.tcp_proxy import TcpProxy
from tests.waiting import DEADLINE_S, wait_until

CHANNEL = {"tensor_channel": True}


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
        ({"proof": "00" * 32}, "not the server that issued the token"),
        ({"token": "00" * 32}, "did not issue this token"),
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


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this host has no IPv6")
def test_every_address_has_the_channel(serve: Serve) -> None:
    """gRPC listens for IPv6 as well where 0.0.0.0 is given."""
    teacher = serve("echo", CHANNEL | {"host": "0.0.0.0"})
    with reader_of(SimpleNamespace(endpoint=f"[::1]:{teacher.port}")).set_sample_generator(samples(40)) as reader:
        check(list(reader()), 40)
        assert teacher.metric("edl_teacher_streams") == 1


def test_cut_channels_lose_nothing(serve: Serve, monkeypatch: pytest.MonkeyPatch, stack: contextlib.ExitStack) -> None:
    """Their proxies cut all connections, or throw away what is sent, again and again."""
    monkeypatch.setattr("edl.distill.transport.channel._PING_S", 0.2)
    monkeypatch.setattr("edl.distill.transport.channel._LOST_S", 1.4)
    proxies: dict[int, TcpProxy] = {}

    def through(port: int) -> int:
        if port not in proxies:
            proxies[port] = stack.enter_context(contextlib.closing(TcpProxy("127.0.0.1", port)))
        return proxies[port].port

    offer(monkeypatch, port=through)
    teachers = [serve("echo", CHANNEL) for _ in range(3)]
    patient = Policy(aside_s=0.1, open_max_s=0.5, task_failures=1000, task_losses=1000)
    options = Options(shared_memory=False, teacher_timeout_s=DEADLINE_S, policy=patient)
    delivered: list[Any] = []
    with reader_of(*teachers, teacher_batch_size=8, options=options).set_sample_generator(samples(3000)) as reader:
        for row in reader():
            delivered.append(row)
            if len(delivered) % 300 == 0:
                proxy = list(proxies.values())[len(delivered) // 300 % len(proxies)]
                proxy.silent = len(delivered) % 900 == 0
                if not proxy.silent:
                    proxy.cut()
        check(delivered, 3000)
        assert reader.stats().rows_resent
    assert len(proxies) == 3
