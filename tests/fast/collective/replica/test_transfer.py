"""Replicas on their way: a sender or a server that is killed, cut off, damaged or a stranger; and TLS."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edl.collective.checkpoint.memory.replica_slots import NO_VERSION, ReplicaFolder
from edl.collective.checkpoint.memory.slots import CompleteSlot, find_slots
from edl.collective.replica import protocol
from edl.collective.replica.client import ReplicaRefusedError, send_states
from edl.collective.replica.protocol import ReplicaAnnouncement
from edl.collective.replica.server import ReplicaServer
from edl.errors import ProtocolError, SettingsError, TemporaryError
from edl.protocol.tls.peers import PeerTLS
from edl.settings import Credentials
from tests.certificates import Authority, Pair
from tests.fast.collective.replica.replicas import SECRET, keep, steps
from tests.waiting import DEADLINE_S, wait_until


class Receiver:
    """A server of replicas."""

    def __init__(self, folder: Path, secret: Callable[[], bytes] = lambda: SECRET, **settings: Any) -> None:
        self.folder = ReplicaFolder(folder)
        self.folder.path.mkdir(exist_ok=True)
        self.said: list[str] = []
        self.server = ReplicaServer(self.folder, secret, self.said.append, **settings)

    def send(
        self, *states: CompleteSlot, secret: bytes = SECRET, node: str = "n", port: int = 0, **settings: Any
    ) -> None:
        """Send as another agent does."""
        send_states(("127.0.0.1", port or self.server.port), secret, node, states, **settings)

    def steps(self, node: str = "n") -> list[int]:
        return steps(self.folder.slot_prefix(node, 0))


@pytest.fixture
def receive(tmp_path: Path) -> Iterator[Callable[..., Receiver]]:
    with contextlib.ExitStack() as stack:

        def start(*arguments: Any, **settings: Any) -> Receiver:
            made = Receiver(tmp_path / "replicas", *arguments, **settings)
            stack.callback(made.server.close)
            return made

        yield start


@pytest.fixture
def receiver(receive: Callable[..., Receiver]) -> Receiver:
    return receive()


def test_last_two_states_of_each_worker(tmp_path: Path, receiver: Receiver) -> None:
    node = "other.host-1"
    for step in (1, 2, 3):
        states = [keep(tmp_path / f"kept-{rank}", step, 3_000_000 * rank, rank=rank) for rank in range(2)]
        receiver.send(*states, node=node)
    prefixes = [receiver.folder.slot_prefix(node, rank) for rank in range(2)]
    for rank, prefix in enumerate(prefixes):
        assert steps(prefix) == [3, 2]
        assert find_slots(prefix)[0].header == find_slots(tmp_path / f"kept-{rank}")[0].header
    assert receiver.folder.slot_prefixes() == prefixes
    receiver.send(states[0], node=node)
    assert receiver.steps(node) == [3, 2], "the same once more costs nothing"


def test_gone_nodes_states_stay_while_needed(tmp_path: Path, receiver: Receiver) -> None:
    receiver.send(keep(tmp_path / "gone", 1), node="gone")
    here = []
    for step in (2, 3):
        receiver.send(keep(tmp_path / "kept", step), node="there")
        here.append([prefix.name for prefix in receiver.folder.slot_prefixes()])
    assert here == [["gone-0", "there-0"], ["there-0"]]


def test_unknown_secret_is_refused(tmp_path: Path, receiver: Receiver) -> None:
    with pytest.raises((ProtocolError, TemporaryError)):
        receiver.send(keep(tmp_path / "kept", 1), secret=b"x" * 32)
    wait_until(lambda: receiver.said, "the server says why")
    assert "does not know the secret" in receiver.said[0]
    assert SECRET.decode() not in receiver.said[0]
    assert receiver.folder.slot_prefixes() == []


def test_without_secret_nothing_is_received(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        got = bytearray()

        def pretend() -> None:
            connection, _ = listening.accept()
            with connection, contextlib.suppress(OSError):
                connection.sendall(b"n" * 32)
                while len(got) < 64:
                    got.extend(connection.recv(64))
                connection.sendall(b"p" * 32)
                while more := connection.recv(1 << 16):
                    got.extend(more)

        thread = threading.Thread(target=pretend)
        thread.start()
        with pytest.raises(ProtocolError, match="secret"):
            send_states(listening.getsockname(), SECRET, "n", [keep(tmp_path / "kept", 1)])
        thread.join()
        assert len(got) == 64


def test_errors_and_nonsense_disturb_nobody(tmp_path: Path, receive: Callable[..., Receiver]) -> None:
    """An error that was not foreseen costs a connection, and the next sender is served."""
    faults = [LookupError("a fault of our own")]

    def secret() -> bytes:
        if faults:
            raise faults.pop()
        return SECRET

    receiver = receive(secret)
    with pytest.raises(TemporaryError):
        receiver.send(keep(tmp_path / "kept", 1))
    for noise in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\0" * 5000):
        with socket.create_connection(("127.0.0.1", receiver.server.port)) as connection:
            connection.sendall(noise)
    receiver.send(keep(tmp_path / "kept", 2))
    assert receiver.steps() == [2]


class Proxy:
    """Passes on what is sent to a server, but for the byte `at`: that one is changed, or the connection ends there."""

    def __init__(self, port: int, at: int = 1 << 62, cut: bool = False) -> None:
        self._target, self._at, self._cut = port, at, cut
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        self.heard = bytearray()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join()
        self._listening.close()

    def _run(self) -> None:
        connection, _ = self._listening.accept()
        with connection, socket.create_connection(("127.0.0.1", self._target)) as target:
            back = threading.Thread(target=self._pass_back, args=(target, connection))
            back.start()
            with contextlib.suppress(OSError):
                while data := bytearray(connection.recv(4096)):
                    place = self._at - len(self.heard)
                    self.heard += data
                    if 0 <= place < len(data):
                        data[place] ^= 0x10
                        target.sendall(data[:place] if self._cut else data)
                        if self._cut:
                            break
                    else:
                        target.sendall(data)
            with contextlib.suppress(OSError):
                target.shutdown(socket.SHUT_RDWR)
            back.join()

    def _pass_back(self, target: socket.socket, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := target.recv(4096):
                connection.sendall(data)
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)


def test_changed_transfer_keeps_old_state(tmp_path: Path, receive: Callable[..., Receiver]) -> None:
    """A proxy that damages one byte somewhere, or cuts the connection there."""
    receiver, rng = receive(operation_s=5.0), random.Random(3)
    receiver.send(keep(tmp_path / "kept", 1, 50_000))
    for attempt in range(12):
        state, at = keep(tmp_path / f"kept-{attempt}", 2, 50_000), rng.randrange(50_500)
        refused = contextlib.suppress(TemporaryError, ProtocolError, ReplicaRefusedError)
        with Proxy(receiver.server.port, at, cut=attempt % 2 == 0) as proxy, refused:
            receiver.send(state, port=proxy.port)
            assert len(proxy.heard) <= at, "it worked though it was damaged"
        assert receiver.steps() in ([1], [2, 1])
    receiver.send(keep(tmp_path / "last", 3, 50_000))
    assert receiver.steps()[0] == 3


def test_killed_sender_keeps_the_old_state(tmp_path: Path) -> None:
    state = keep(tmp_path / "kept", 2, 40_000_000)
    told, tell = os.pipe()
    child = os.fork()  # before the server has threads
    if child == 0:
        send_states(("127.0.0.1", int.from_bytes(os.read(told, 4), "little")), SECRET, "n", [state])
        os._exit(0)
    receiver = Receiver(tmp_path / "replicas")
    with contextlib.closing(receiver.server):
        receiver.send(keep(tmp_path / "other", 1, 1000))
        os.write(tell, receiver.server.port.to_bytes(4, "little"))
        slot = receiver.folder.slot_prefix("n", 0).with_suffix(".1")
        wait_until(lambda: slot.exists() and slot.stat().st_size > 1_000_000, "it has begun")
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        assert receiver.steps() in ([1], [2, 1])
        receiver.send(state)
        assert receiver.steps() == [2, 1]


def test_overwritten_state_does_not_arrive(tmp_path: Path, receiver: Receiver) -> None:
    state = keep(tmp_path / "kept", 1, 3_000_000)

    def overwrite() -> bool:
        for step in (2, 3):
            keep(tmp_path / "kept", step, 3_000_000)
        return False

    with pytest.raises(TemporaryError, match="overwritten"):
        receiver.send(state, stopping=overwrite)
    assert receiver.folder.find_replicas() == []


def test_too_much_is_refused(tmp_path: Path, receive: Callable[..., Receiver]) -> None:
    receiver = receive(share_of_free=1e-12)
    with pytest.raises(ReplicaRefusedError, match="free in memory"):
        receiver.send(keep(tmp_path / "kept", 1, 1000))
    assert receiver.folder.slot_prefixes() == []


@pytest.mark.parametrize(
    "wrong",
    [{"node": "../up"}, {"node": ""}, {"node": 3}, {"rank": 2}, {"data_nbytes": -1}, {"step": 1.5}],
)
def test_what_cannot_be_is_refused(wrong: dict[str, object]) -> None:
    right = ReplicaAnnouncement("n", 0, 0, 1, 2, 1, 100, 10, NO_VERSION)
    assert ReplicaAnnouncement.decode(right.encode()) == right
    with pytest.raises(ProtocolError):
        ReplicaAnnouncement.decode(replace(right, **wrong).encode())


CA = Authority()
GOOD = CA.issue("127.0.0.1")


def tls_of(folder: Path, pair: Pair = GOOD, **more: str) -> PeerTLS:
    folder.mkdir(exist_ok=True)
    return PeerTLS(Credentials(ca=CA.save(folder), **pair.save(folder), **more))


@pytest.mark.parametrize("encrypted", [False, True])
def test_state_on_the_network(tmp_path: Path, receive: Callable[..., Receiver], encrypted: bool) -> None:
    tls = tls_of(tmp_path / "tls") if encrypted else None
    receiver = receive(tls=tls)
    with Proxy(receiver.server.port) as proxy:
        receiver.send(keep(tmp_path / "kept", 7, 3_000_000), tls=tls, port=proxy.port)
    assert receiver.steps() == [7]
    assert len(proxy.heard) > 3_000_000
    assert (bytes([7]) * 1000 in proxy.heard) is not encrypted, "the state can be read on the network"
    assert (b'"generation"' in proxy.heard) is not encrypted, "so can what is said of it"


def test_receiver_for_another_name(tmp_path: Path, receive: Callable[..., Receiver]) -> None:
    receiver, state = receive(tls=tls_of(tmp_path / "tls", CA.issue("node-1.example"))), keep(tmp_path / "kept", 7)
    with pytest.raises(ProtocolError, match=r"its certificate is for another name, not for '127\.0\.0\.1'"):
        receiver.send(state, tls=tls_of(tmp_path / "sender"))
    receiver.send(state, tls=tls_of(tmp_path / "sender", server_name="node-1.example"))
    assert receiver.steps() == [7]


@pytest.mark.parametrize("plain", [False, True])
def test_foreign_or_plain_sender_is_refused(
    tmp_path: Path, receive: Callable[..., Receiver], monkeypatch: pytest.MonkeyPatch, plain: bool
) -> None:
    receiver, tls = receive(tls=tls_of(tmp_path / "tls")), None
    if plain:
        monkeypatch.setattr(protocol, "HANDSHAKE_S", 0.2)  # in which each side waits for the other's words
    else:
        tls = tls_of(tmp_path / "sender", Authority("other").issue("127.0.0.1"))
    with pytest.raises((ProtocolError, TemporaryError)):
        receiver.send(keep(tmp_path / "kept", 7), tls=tls)
    wait_until(lambda: receiver.said, "the receiver says why")
    assert ("set TLS on all nodes or on none" if plain else "signed by no CA in") in receiver.said[0]
    assert receiver.steps() == []


def test_only_the_sender_speaks_tls(tmp_path: Path, receiver: Receiver) -> None:
    with pytest.raises(ProtocolError, match="set TLS on all nodes or on none"):
        receiver.send(keep(tmp_path / "kept", 7), tls=tls_of(tmp_path / "sender"))
    assert receiver.steps() == []


def test_silent_caller_does_not_hold_up_close(tmp_path: Path, receive: Callable[..., Receiver]) -> None:
    receiver = receive(tls=tls_of(tmp_path / "tls"), operation_s=DEADLINE_S)
    with socket.create_connection(("127.0.0.1", receiver.server.port)):
        receiver.server.close()
    assert receiver.said == []


@pytest.mark.parametrize("missing", [("ca",), ("cert", "key")])
def test_all_three_files_are_wanted(tmp_path: Path, missing: tuple[str, ...]) -> None:
    told = {"ca": CA.save(tmp_path), **GOOD.save(tmp_path)}
    for name in missing:
        del told[name]
    with pytest.raises(SettingsError, match="takes all of --tls-ca, --tls-cert and --tls-key"):
        PeerTLS(Credentials(**told))
