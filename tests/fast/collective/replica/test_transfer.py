"""Replicas on their way: between a sender and a server, one of which is killed, cut off, damaged or a stranger."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edl.collective.checkpoint.memory.replica_slots import NO_VERSION, ReplicaFolder
from edl.collective.checkpoint.memory.slots import CompleteSlot, SlotPair, find_slots
from edl.collective.replica.client import ReplicaRefusedError, send_states
from edl.collective.replica.protocol import ReplicaAnnouncement
from edl.collective.replica.server import ReplicaServer
from edl.errors import ProtocolError, TemporaryError
from tests.fast.collective.replica.replicas import SECRET, WAIT_S, keep, steps, until


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def server(tmp_path: Path, said: list[str]) -> Iterator[ReplicaServer]:
    folder = ReplicaFolder(tmp_path / "replicas")
    folder.path.mkdir()
    server = ReplicaServer(folder, lambda: SECRET, said.append, operation_s=3.0)
    yield server
    server.close()


def send(server: ReplicaServer, *states: CompleteSlot, secret: bytes = SECRET, node: str = "other.host-1") -> None:
    send_states(("127.0.0.1", server.port), secret, node, states, operation_s=10.0)


def test_last_two_states_of_each_worker(tmp_path: Path, server: ReplicaServer) -> None:
    """The last two states of each worker are there."""
    for step in (1, 2, 3):
        send(server, *(keep(tmp_path / f"kept-{rank}", step, 3_000_000 * rank, rank=rank) for rank in range(2)))
    folder = ReplicaFolder(tmp_path / "replicas")
    for rank in range(2):
        prefix = folder.slot_prefix("other.host-1", rank)
        assert steps(prefix) == [3, 2]
        assert find_slots(prefix)[0].header == find_slots(tmp_path / f"kept-{rank}")[0].header
    assert folder.slot_prefixes() == [folder.slot_prefix("other.host-1", rank) for rank in range(2)]
    send(server, find_slots(tmp_path / "kept-0")[0])
    assert steps(folder.slot_prefix("other.host-1", 0)) == [3, 2], "the same once more costs nothing"


def test_own_fault_does_not_end_the_server(tmp_path: Path, said: list[str]) -> None:
    """An error that was not foreseen costs a connection, and the next sender is served."""
    folder = ReplicaFolder(tmp_path / "replicas")
    folder.path.mkdir()
    faults = [LookupError("a fault of our own")]

    def secret() -> bytes:
        if faults:
            raise faults.pop()
        return SECRET

    server = ReplicaServer(folder, secret, said.append, operation_s=3.0)
    with contextlib.closing(server):
        with pytest.raises(TemporaryError):
            send(server, keep(tmp_path / "kept", 1))
        send(server, keep(tmp_path / "kept", 2))
    assert steps(folder.slot_prefix("other.host-1", 0)) == [2]


def test_abandoned_state_goes_first(tmp_path: Path, server: ReplicaServer) -> None:
    """A state that was given up makes way before an older one."""
    kept = tmp_path / "kept"
    for step in (1, 2):
        send(server, keep(kept, step))
    pair = SlotPair(kept)
    pair.keep_only_slot(pair.find_complete()[1])
    send(server, keep(kept, 2, generation=1))
    found = find_slots(ReplicaFolder(tmp_path / "replicas").slot_prefix("other.host-1", 0))
    assert [one.header.version for one in found] == [(1, 2, 2), (0, 1, 2)]


def test_gone_nodes_states_stay_while_needed(tmp_path: Path, server: ReplicaServer) -> None:
    """States of nodes that are gone stay until they are not needed."""
    send(server, keep(tmp_path / "gone", 1), node="gone")
    folder, here = ReplicaFolder(tmp_path / "replicas"), []
    for step in (2, 3):
        send(server, keep(tmp_path / "kept", step), node="there")
        here.append([prefix.name for prefix in folder.slot_prefixes()])
    assert here == [["gone-0", "there-0"], ["there-0"]]


def test_unknown_secret_is_refused(tmp_path: Path, server: ReplicaServer, said: list[str]) -> None:
    """Who does not know the secret is refused."""
    with pytest.raises((ProtocolError, TemporaryError)):
        send(server, keep(tmp_path / "kept", 1), secret=b"x" * 32)
    until(lambda: said, "the server said why")
    assert "does not know the secret" in said[0]
    assert SECRET.decode() not in said[0]
    assert ReplicaFolder(tmp_path / "replicas").slot_prefixes() == []


def test_without_secret_nothing_is_received(tmp_path: Path) -> None:
    """A receiver that does not know the secret gets nothing."""
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
        thread.join(WAIT_S)
        assert len(got) == 64


@pytest.mark.parametrize("noise", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\0" * 5000])
def test_nonsense_disturbs_nobody(tmp_path: Path, server: ReplicaServer, noise: bytes) -> None:
    """Whoever says something else disturbs nobody."""
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(noise)
    send(server, keep(tmp_path / "kept", 1))
    assert steps(ReplicaFolder(tmp_path / "replicas").slot_prefix("other.host-1", 0)) == [1]


def test_changed_transfer_keeps_old_state(tmp_path: Path, server: ReplicaServer) -> None:
    """A proxy that damages one byte somewhere, or cuts the connection there."""
    rng, prefix = random.Random(3), ReplicaFolder(tmp_path / "replicas").slot_prefix("other.host-1", 0)
    send(server, keep(tmp_path / "kept", 1, 50_000))
    for attempt in range(30):
        state = keep(tmp_path / f"kept-{attempt}", 2, 50_000)
        refused = contextlib.suppress(TemporaryError, ProtocolError, ReplicaRefusedError)
        with Proxy(server.port, at=rng.randrange(50_500), cut=attempt % 2 == 0) as proxy, refused:
            send_states(("127.0.0.1", proxy.port), SECRET, "other.host-1", [state], operation_s=5.0)
            assert proxy.beyond, "it worked though it was damaged"
        assert steps(prefix) in ([1], [2, 1])
    send(server, keep(tmp_path / "last", 3, 50_000))
    assert steps(prefix)[0] == 3


class Proxy:
    """Passes on what is sent to a server, but for the byte `at`: that one is changed, or the connection ends there."""

    def __init__(self, port: int, at: int, cut: bool) -> None:
        self._target, self._at, self._cut = port, at, cut
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        self.beyond = False
        """Nothing was done, because less was sent."""
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join(WAIT_S)
        self._listening.close()

    def _run(self) -> None:
        connection, _ = self._listening.accept()
        with connection, socket.create_connection(("127.0.0.1", self._target)) as target:
            back = threading.Thread(target=self._back, args=(target, connection))
            back.start()
            passed = 0
            with contextlib.suppress(OSError):
                while data := bytearray(connection.recv(4096)):
                    place = self._at - passed
                    passed += len(data)
                    if 0 <= place < len(data):
                        data[place] ^= 0x10
                        target.sendall(data[:place] if self._cut else data)
                        if self._cut:
                            break
                    else:
                        target.sendall(data)
            self.beyond = passed <= self._at
            with contextlib.suppress(OSError):
                target.shutdown(socket.SHUT_RDWR)
            back.join(WAIT_S)

    def _back(self, target: socket.socket, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := target.recv(4096):
                connection.sendall(data)
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)


def test_killed_sender_keeps_the_old_state(tmp_path: Path, said: list[str]) -> None:
    """A sender killed half way leaves the state before."""
    state = keep(tmp_path / "kept", 2, 40_000_000)
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        send_states(("127.0.0.1", int.from_bytes(os.read(told, 4), "little")), SECRET, "n", [state])
        os._exit(0)
    folder = ReplicaFolder(tmp_path / "replicas")
    folder.path.mkdir()
    prefix = folder.slot_prefix("n", 0)
    server = ReplicaServer(folder, lambda: SECRET, said.append)
    try:
        send(server, keep(tmp_path / "other", 1, 1000), node="n")
        os.write(tell, server.port.to_bytes(4, "little"))
        slot = prefix.with_name(prefix.name + ".1")
        until(lambda: slot.stat().st_size > 1_000_000, "it has begun")
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        assert steps(prefix) in ([1], [2, 1])
        send(server, state, node="n")
        assert steps(prefix) == [2, 1]
    finally:
        server.close()
        os.close(told)
        os.close(tell)


def test_killed_receiver_keeps_the_old_state(tmp_path: Path) -> None:
    """A receiver killed half way has the state before."""
    folder = ReplicaFolder(tmp_path / "replicas")
    folder.path.mkdir()
    prefix = folder.slot_prefix("n", 0)
    for _ in range(5):
        ready, told = os.pipe()
        child = os.fork()
        if child == 0:
            server = ReplicaServer(folder, lambda: SECRET, lambda line: None)
            os.write(told, server.port.to_bytes(4, "little"))
            signal.pause()
        port = int.from_bytes(os.read(ready, 4), "little")
        send_states(("127.0.0.1", port), SECRET, "n", [keep(tmp_path / "kept", 1, 30_000_000)])
        big = keep(tmp_path / "kept", 2, 30_000_000)
        killer = threading.Timer(random.random() * 0.03, os.kill, (child, signal.SIGKILL))
        killer.start()
        with contextlib.suppress(TemporaryError):
            send_states(("127.0.0.1", port), SECRET, "n", [big])
        killer.join()
        os.waitpid(child, 0)
        os.close(ready)
        os.close(told)
        assert steps(prefix) in ([1], [2, 1])
        for path in (*tmp_path.glob("kept.*"), *folder.path.glob("*")):
            path.unlink()


def test_overwritten_state_does_not_arrive(tmp_path: Path, server: ReplicaServer) -> None:
    """A state that is overwritten while it is sent does not arrive."""
    state = keep(tmp_path / "kept", 1, 3_000_000)

    def overwrite() -> bool:
        for step in (2, 3):
            keep(tmp_path / "kept", step, 3_000_000)
        return False

    with pytest.raises(TemporaryError, match="overwritten"):
        send_states(("127.0.0.1", server.port), SECRET, "n", [state], stopping=overwrite)
    assert ReplicaFolder(tmp_path / "replicas").find_replicas() == []


def test_too_much_is_refused(tmp_path: Path, said: list[str]) -> None:
    """More than there is room for is refused."""
    folder = ReplicaFolder(tmp_path / "replicas")
    folder.path.mkdir()
    server = ReplicaServer(folder, lambda: SECRET, said.append, share_of_free=1e-12)
    with pytest.raises(ReplicaRefusedError, match="free in memory"):
        send(server, keep(tmp_path / "kept", 1, 1000))
    server.close()
    assert folder.slot_prefixes() == []


@given(st.binary(max_size=300))
def test_what_is_no_announcement_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        ReplicaAnnouncement.decode(data)


@pytest.mark.parametrize(
    "wrong",
    [
        {"node": "../up"},
        {"node": ""},
        {"node": 3},
        {"rank": 2},
        {"data_nbytes": -1},
        {"local_rank": "0"},
        {"step": 1.5},
    ],
)
def test_what_cannot_be_is_refused(wrong: dict[str, object]) -> None:
    right = ReplicaAnnouncement("n", 0, 0, 1, 2, 1, 100, 10, NO_VERSION)
    assert ReplicaAnnouncement.decode(right.encode()) == right
    with pytest.raises(ProtocolError):
        ReplicaAnnouncement.decode(replace(right, **wrong).encode())  # type: ignore[arg-type]
