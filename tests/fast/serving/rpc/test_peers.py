"""Who a client on this host is, by the kernel's word."""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from edl_serving.shared_memory.peers import PeerCredentials, is_local


@pytest.mark.parametrize(
    ("peer", "local"),
    [
        ("ipv4:127.0.0.1:50000", True),
        ("ipv4:127.8.9.1:50000", True),
        ("ipv6:[::1]:50000", True),
        ("ipv6:%5B::1%5D:50000", True),
        ("ipv6:[::ffff:127.0.0.1]:50000", True),
        ("unix:", True),
        ("unix:/run/edl.sock", True),
        ("unix-abstract:edl", True),
        ("ipv4:10.0.0.7:50000", False),
        ("ipv4:192.168.127.1:50000", False),
        ("ipv6:[fe80::1%25eth0]:50000", False),
        ("ipv6:[::ffff:10.0.0.7]:50000", False),
        ("ipv6:[2001:db8::1]:50000", False),
        ("vsock:2:50000", False),
        ("", False),
        ("ipv4:localhost:1", False),
    ],
)
def test_only_peers_on_this_host_are_local(peer: str, local: bool) -> None:
    assert is_local(peer) == local


@contextmanager
def connection(host: str = "127.0.0.1", family: socket.AddressFamily = socket.AF_INET) -> Iterator[tuple[int, str]]:
    """A server's port, and the name that gRPC would give the client there."""
    at = "::1" if host == "::1" else "127.0.0.1"
    with socket.create_server((at, 0), family=family if at == host else socket.AF_INET) as listener:
        port = listener.getsockname()[1]
        client = socket.create_connection((host, port))
        server, _ = listener.accept()
        with client, server:
            kind = "ipv6" if family == socket.AF_INET6 else "ipv4"
            found, own_port = client.getsockname()[:2]
            yield port, f"{kind}:[{found}]:{own_port}" if kind == "ipv6" else f"{kind}:{found}:{own_port}"


@pytest.mark.parametrize(
    ("host", "family"),
    [("127.0.0.1", socket.AF_INET), ("::1", socket.AF_INET6), ("::ffff:127.0.0.1", socket.AF_INET6)],
)
@pytest.mark.parametrize("listening", ["127.0.0.1", "[::1]", "0.0.0.0", "localhost"])
def test_the_kernel_knows_the_user(host: str, family: socket.AddressFamily, listening: str) -> None:
    with connection(host, family) as (port, peer):
        peers = PeerCredentials(lambda: (port,), listening)
        assert peers.user_of(peer) == os.geteuid()
        assert peers.is_connected(peer)
        assert PeerCredentials(lambda: (port + 1,), listening).user_of(peer) is None, (
            "it is connected to another server"
        )


def test_tables_replace_socket_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr("edl_serving.shared_memory.peers.user_of_socket", fail)
    with connection() as (port, peer):
        assert PeerCredentials(lambda: (port,), "127.0.0.1").user_of(peer) == os.geteuid()


@pytest.mark.parametrize("listening", ["127.0.0.1", "0.0.0.0"])
def test_a_connection_that_has_ended(listening: str) -> None:
    with connection() as (port, peer):
        peers = PeerCredentials(lambda: (port,), listening)
        assert peers.is_connected(peer)
    deadline = time.monotonic() + 20
    while peers.is_connected(peer):
        assert time.monotonic() < deadline, "an answer holds for a second"
        time.sleep(0.01)
    assert peers.user_of(peer) is None


@pytest.mark.parametrize("peer", ["ipv4:127.0.0.1:1", "ipv4:127.0.0.1", "ipv6:[::1]:x", "", "vsock:2:50000"])
def test_who_is_not_there_is_nobody(peer: str) -> None:
    assert PeerCredentials(lambda: (1,)).user_of(peer) is None


def test_a_unix_socket_is_for_its_owner() -> None:
    peers = PeerCredentials(lambda: ())
    assert peers.user_of("unix:") == os.geteuid()
    assert peers.is_connected("unix:")
