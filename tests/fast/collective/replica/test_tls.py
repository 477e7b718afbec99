"""Replicas between agents that speak TLS: what crosses the network, and who is refused, in which words."""

from __future__ import annotations

import contextlib
import hmac
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from edl.collective.checkpoint.memory.replica_slots import ReplicaFolder
from edl.collective.replica.client import send_states
from edl.collective.replica.server import ReplicaServer
from edl.errors import ProtocolError, SettingsError, TemporaryError
from edl.protocol.tls.peers import PeerTLS
from edl.settings import Credentials
from tests.certificates import Authority, Pair
from tests.fast.collective.replica.replicas import SECRET, keep, steps, until

CA = Authority()
GOOD = CA.issue("127.0.0.1")


def tls_of(folder: Path, pair: Pair = GOOD, ca: Authority = CA, **more: str) -> PeerTLS:
    folder.mkdir(exist_ok=True)
    return PeerTLS(Credentials(ca=ca.save(folder), **pair.save(folder), **more))


class Agents:
    """A receiver; `send` is what another agent does."""

    def __init__(self, folder: Path, tls: PeerTLS | None) -> None:
        self._folder = folder
        self.replicas = ReplicaFolder(folder / "replicas")
        self.replicas.path.mkdir()
        self.said: list[str] = []
        self.server = ReplicaServer(self.replicas, lambda: SECRET, self.said.append, tls=tls, operation_s=3.0)

    def send(self, tls: PeerTLS | None, step: int = 7, port: int = 0, nbytes: int = 3_000_000) -> None:
        state = keep(self._folder / "kept", step, nbytes)
        address = ("127.0.0.1", port or self.server.port)
        send_states(address, SECRET, "other", [state], tls=tls, operation_s=6.0)

    @property
    def steps(self) -> list[int]:
        return steps(self.replicas.slot_prefix("other", 0))


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Any]:
    with ExitStack() as stack:

        def start(tls: PeerTLS | None) -> Agents:
            made = Agents(tmp_path, tls)
            stack.callback(made.server.close)
            return made

        yield start


@pytest.mark.parametrize("private", [False, True], ids=["plain", "TLS"])
def test_threads_hash_what_tls_does_not(agents: Any, tmp_path: Path, private: bool, hashed: dict[str, int]) -> None:
    """Neither who sends nor who receives hashes what is sent: threads do, beside that, or TLS has done it already."""
    tls = tls_of(tmp_path / "tls") if private else None
    receiver = agents(tls)
    receiver.send(tls, nbytes=5_000_000)
    assert receiver.steps == [7]
    beside = sum(nbytes for thread, nbytes in hashed.items() if thread.startswith("edl-hash"))
    assert sum(hashed.values()) - beside < 10_000
    assert beside == (0 if private else 2 * (5_000_000 + len(b"m7"))), "once by each side"


class CountingHmac:
    """HMACs, and how many bytes the threads put into them."""

    def __init__(self) -> None:
        self.nbytes: dict[str, int] = {}
        self._new, self._lock = hmac.new, threading.Lock()

    def __call__(self, key: bytes, message: bytes, digestmod: str) -> Any:
        outer, mac = self, self._new(key, message, digestmod)

        class Counted:
            digest = staticmethod(mac.digest)

            @staticmethod
            def update(data: bytes) -> None:
                mac.update(data)
                with outer._lock:
                    name = threading.current_thread().name
                    outer.nbytes[name] = outer.nbytes.get(name, 0) + len(data)

        return Counted


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    counting = CountingHmac()
    monkeypatch.setattr(hmac, "new", counting)
    return counting.nbytes


@contextlib.contextmanager
def wiretap(port: int) -> Iterator[tuple[int, bytearray]]:
    """The port of a proxy, and what it has passed on."""
    heard = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def run() -> None:
            connection, _ = listening.accept()
            with connection, socket.create_connection(("127.0.0.1", port)) as target:
                back = threading.Thread(target=pump, args=(target, connection))
                back.start()
                pump(connection, target)
                back.join(20)

        def pump(source: socket.socket, target: socket.socket) -> None:
            with contextlib.suppress(OSError):
                while data := source.recv(1 << 16):
                    heard.extend(data)
                    target.sendall(data)
            with contextlib.suppress(OSError):
                target.shutdown(socket.SHUT_WR)

        thread = threading.Thread(target=run)
        thread.start()
        yield listening.getsockname()[1], heard
        thread.join(20)


@pytest.mark.parametrize("encrypted", [False, True])
def test_state_on_the_network(tmp_path: Path, agents: Any, encrypted: bool) -> None:
    tls = tls_of(tmp_path / "tls") if encrypted else None
    receiver = agents(tls)
    with wiretap(receiver.server.port) as (port, heard):
        receiver.send(tls, port=port)
    assert receiver.steps == [7]
    assert len(heard) > 3_000_000
    assert (bytes([7]) * 1000 in heard) is not encrypted, "the state can be read on the network"
    assert (b'"generation"' in heard) is not encrypted, "so can what is said of it"


def test_receiver_for_another_name(tmp_path: Path, agents: Any) -> None:
    receiver = agents(tls_of(tmp_path / "tls", CA.issue("node-1.example")))
    with pytest.raises(ProtocolError, match=r"its certificate is for another name, not for '127\.0\.0\.1'"):
        receiver.send(tls_of(tmp_path / "sender"))
    receiver.send(tls_of(tmp_path / "sender", server_name="node-1.example"))
    assert receiver.steps == [7]


def test_receiver_of_a_foreign_ca(tmp_path: Path, agents: Any) -> None:
    other = Authority("other")
    receiver = agents(tls_of(tmp_path / "tls", other.issue("127.0.0.1")))
    with pytest.raises(ProtocolError, match=r"signed by no CA in .*sender/ca\.pem"):
        receiver.send(tls_of(tmp_path / "sender"))
    assert receiver.steps == []


def test_sender_of_a_foreign_ca(tmp_path: Path, agents: Any) -> None:
    receiver = agents(tls_of(tmp_path / "tls"))
    with pytest.raises((ProtocolError, TemporaryError)) as caught:
        receiver.send(tls_of(tmp_path / "sender", Authority("other").issue("127.0.0.1")))
    assert "does not take this node's certificate" in str(caught.value) or "closed" in str(caught.value)
    until(lambda: receiver.said, "the receiver says nothing")
    assert "signed by no CA in" in receiver.said[0]
    assert receiver.steps == []


def test_only_the_receiver_speaks_tls(tmp_path: Path, agents: Any) -> None:
    receiver = agents(tls_of(tmp_path / "tls"))
    with pytest.raises((ProtocolError, TemporaryError)):
        receiver.send(None)
    until(lambda: receiver.said, "the receiver says nothing")
    assert "set TLS on all nodes or on none" in receiver.said[0]


def test_only_the_sender_speaks_tls(tmp_path: Path, agents: Any) -> None:
    receiver = agents(None)
    with pytest.raises(ProtocolError, match="set TLS on all nodes or on none"):
        receiver.send(tls_of(tmp_path / "sender"))
    assert receiver.steps == []


def test_new_files_for_new_connections(tmp_path: Path, agents: Any) -> None:
    tls, other = tls_of(tmp_path / "tls"), Authority("other")
    receiver = agents(tls)
    receiver.send(tls, step=1)
    other.save(tmp_path / "tls")
    other.issue("127.0.0.1").save(tmp_path / "tls")
    receiver.send(tls, step=2)
    assert receiver.steps == [2, 1]
    with pytest.raises((ProtocolError, TemporaryError)):
        receiver.send(tls_of(tmp_path / "stale"), step=3)
    assert receiver.steps == [2, 1]


@pytest.mark.filterwarnings("ignore:.*unclosed <ssl.SSLSocket")  # the standard library's own, of what it gives up
@pytest.mark.parametrize("sent", [b"", b"x"])
def test_callers_that_hang_up_at_once(tmp_path: Path, agents: Any, sent: bytes) -> None:
    """A port scanner, or a check of health, before the connection is even accepted."""
    receiver = agents(tls_of(tmp_path / "receiver"))
    for _ in range(20):
        with socket.create_connection(("127.0.0.1", receiver.server.port)) as connection:
            connection.sendall(sent)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closed by a reset
    receiver.send(tls_of(tmp_path / "sender"))
    assert receiver.steps == [7]


def test_close_in_the_middle(tmp_path: Path, agents: Any) -> None:
    """It does not wait for a sender that says nothing."""
    receiver = agents(tls_of(tmp_path / "tls"))
    with socket.create_connection(("127.0.0.1", receiver.server.port)):
        receiver.server.close()
    assert receiver.said == []


@pytest.mark.parametrize("missing", ["ca", "cert"])
def test_all_three_files_are_wanted(tmp_path: Path, missing: str) -> None:
    told = {"ca": CA.save(tmp_path), **GOOD.save(tmp_path)}
    for name in ("cert", "key") if missing == "cert" else ("ca",):
        del told[name]
    with pytest.raises(SettingsError, match="takes all of --tls-ca, --tls-cert and --tls-key"):
        PeerTLS(Credentials(**told))
