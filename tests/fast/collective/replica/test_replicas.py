"""Replicas without workers: what is kept and sent when, and whatever befalls them on their way; and TLS."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from edl.collective.checkpoint.checkpointer import Checkpointer
from edl.collective.checkpoint.memory.replica_slots import NO_VERSION, ReplicaFolder, ReplicaSlots, newest_common_state
from edl.collective.checkpoint.memory.restore import choose_state
from edl.collective.checkpoint.memory.slots import (
    HEADER_NBYTES,
    CompleteSlot,
    SlotHeader,
    SlotPair,
    StateVersion,
    find_slots,
    kept_prefix,
)
from edl.collective.checkpoint.state.state import State
from edl.collective.job_records import JobState, Member, World
from edl.collective.replica import peers
from edl.collective.replica.peers import ReplicaAnnouncement, ReplicaRefusedError, ReplicaServer, send_states
from edl.collective.replica.replicator import ReplicaAction, ReplicationSchedule, Replicator, job_secret, replica_peer
from edl.discovery import Store
from edl.errors import ProtocolError, TemporaryError
from edl.protocol.tls import PeerTLS
from edl.settings import Credentials
from tests.certificates import Authority, Pair
from tests.tcp_proxy import TcpProxy
from tests.waiting import DEADLINE_S, wait_until

SECRET = b"s" * 32


def keep(prefix: Path, step: int, nbytes: int = 100, **header: int) -> CompleteSlot:
    """Save a state whose bytes are its step."""
    slots = SlotPair(prefix)
    found = save(slots, step, nbytes, **header)
    slots.close()
    return found


def save(
    slots: SlotPair, step: int, nbytes: int, *, generation: int = 0, rank: int = 0, world: int = 2
) -> CompleteSlot:
    """The same in slots that stay open."""
    meta = b"m%d" % step
    _, memory = slots.begin_write(nbytes, len(meta))
    memory[HEADER_NBYTES : HEADER_NBYTES + nbytes] = bytes([step]) * nbytes
    slots.commit_write(SlotHeader(generation, step, world, rank, sharded=True), nbytes, meta)
    return find_slots(slots.prefix)[0]


def is_whole(found: CompleteSlot) -> bool:
    copy = found.copy_contents()
    return copy is not None and set(copy.data) <= {found.header.step} and copy.meta == b"m%d" % found.header.step


def steps(prefix: Path) -> list[int]:
    assert all(is_whole(one) for one in find_slots(prefix))
    return [one.header.step for one in find_slots(prefix)]


def test_owners_states_come_first() -> None:
    first, second = ([SlotHeader(0, step, 2, rank, sharded=True) for rank in range(2)] for step in (1, 2))
    whole = choose_state([[first[0]], [first[1], second[1]]], [[], [second[1]]])
    assert (whole.step, whole.sources, whole.from_replicas) == (1, (0, 1), False), "newer, and not whole"
    newer = choose_state([[first[0]], [first[1], second[1]]], [[second[1]], [second[0]]])
    assert (newer.step, newer.sources, newer.holders, newer.from_replicas) == (2, (1, 1), (1, 1), True)
    replicated = SlotHeader(0, 2, 2, 0)
    assert choose_state([[], []], [[replicated], [first[0]]]) is None


def test_workers_keep_wanted_states(tmp_path: Path) -> None:
    folder = ReplicaFolder(tmp_path / "replicas")
    folder.path.mkdir()
    replica_slots = ReplicaSlots(tmp_path / "slots-0", folder)
    assert not replica_slots.is_state_requested()
    folder.request_newer_than(NO_VERSION)
    assert replica_slots.is_state_requested()
    keep(replica_slots.slots.prefix, 3)
    assert not replica_slots.is_state_requested()
    folder.request_newer_than((0, 3, 2))
    assert replica_slots.is_state_requested()
    keep(replica_slots.slots.prefix, 6)
    replica_slots.drop_newer_than((0, 5, 2))
    assert replica_slots.is_state_requested(), "step 6 was given up"
    assert steps(replica_slots.slots.prefix) == [3]
    folder.request_newer_than(None)
    assert not replica_slots.is_state_requested()
    replica_slots.close()


def test_later_slot_of_a_step_counts(tmp_path: Path) -> None:
    """An evaluation saves its step again, with the result."""
    keep(tmp_path / "slots", 4)
    later = keep(tmp_path / "slots", 4)
    assert newest_common_state([find_slots(tmp_path / "slots")]) == [later]


def memory_of(folder: Path) -> int:
    """The bytes that lie in memory, however many names they have."""
    return sum({path.stat().st_ino: path.stat().st_size for path in folder.glob("slots-0*")}.values())


@pytest.mark.parametrize(("between", "states"), [(0, 2), (3, 4)], ids=["each", "every fourth"])
def test_kept_states_share_memory(tmp_path: Path, between: int, states: int) -> None:
    """Where each save is kept for a replica, two slots are enough; elsewhere it takes two more at most."""
    replica_slots, slots = ReplicaSlots(tmp_path / "slots-0", ReplicaFolder(tmp_path)), SlotPair(tmp_path / "slots-0")
    most, inodes = 0, set()
    for step in range(24):
        kept = step % (between + 1) == 0
        before = [one.header.step for one in replica_slots.slots.find_complete()]
        if kept:
            replica_slots.free_oldest_slot()
        saved = save(slots, step, 300_000)
        if step >= 2 * (between + 1):
            assert set(before[:1]) <= {one.header.step for one in replica_slots.slots.find_complete()}, (
                "the newer one stays"
            )
        if kept:
            replica_slots.keep_slot(saved)
        most = max(most, memory_of(tmp_path))
        inodes |= {path.stat().st_ino for path in tmp_path.glob("slots-0*") if step > 12}
        assert steps(slots.prefix) == [step, step - 1][: step + 1]
        assert steps(replica_slots.slots.prefix) == [one for one in range(step, -1, -1) if one % (between + 1) == 0][:2]
    assert most < (states + 0.9) * 300_000 + states * 70_000
    assert len(inodes) <= 4, "the same pages are used again"
    slots.close()


def test_no_room_for_what_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training goes on without replicas, and with the last two saves."""
    folder = ReplicaFolder(tmp_path / "replicas")
    folder.path.mkdir()
    folder.request_newer_than(NO_VERSION)
    monkeypatch.setenv("EDL_REPLICAS", str(folder.path))
    slots = SlotPair(tmp_path / "slots-0")
    with Checkpointer(State(rng=False, w=torch.zeros(9)), interval_steps=1, slots=slots) as checkpointer:
        replica_slots = checkpointer._replica_slots
        assert replica_slots is not None
        for step in range(4):
            checkpointer.save(step)
            if step == 2:
                replica_slots.keep_slot(slots.find_complete()[0])
        full, allocate = [True], os.posix_fallocate

        def allocate_until_full(file: int, offset: int, length: int) -> None:
            if full and os.fstat(file).st_size < length and replica_slots.slots.find_complete():
                raise OSError(errno.ENOSPC, "full")
            allocate(file, offset, length)

        monkeypatch.setattr(os, "posix_fallocate", allocate_until_full)
        checkpointer.save(4)
        assert not replica_slots.is_state_requested()
        assert replica_slots.slots.find_complete() == []
        assert [one.header.step for one in slots.find_complete()] == [4, 3]
        replica_slots.keep_slot(slots.find_complete()[0])
        assert replica_slots.slots.find_complete() == [], "nor what was to be kept when there was no room"


ONE, TWO = (0, 1, 2), (0, 2, 2)


def test_state_is_sent_once_an_interval() -> None:
    course = ReplicationSchedule(interval_s=10, share=0.1, retry_s=5)
    course.start_world(same_peer=False)
    assert course.next_action(0, NO_VERSION, NO_VERSION) is ReplicaAction.WANT
    assert course.next_action(1, ONE, ONE) is ReplicaAction.SEND
    course.record_failure(2)
    assert [course.next_action(now, ONE, ONE) for now in (3, 7)] == [ReplicaAction.WAIT, ReplicaAction.SEND]
    course.record_sent(ONE, 7, 9)
    assert [course.next_action(now, ONE, ONE) for now in (9, 26.9, 27)] == [
        ReplicaAction.WAIT,
        ReplicaAction.WAIT,
        ReplicaAction.WANT,
    ]
    course.start_world(same_peer=True)
    assert course.next_action(10, ONE, ONE) is ReplicaAction.WANT, "the first state of a new world is kept at once"
    course.start_world(same_peer=False)
    assert course.next_action(10, ONE, ONE) is ReplicaAction.SEND, "a new peer has none"


def test_unkept_state_is_passed_over() -> None:
    course = ReplicationSchedule(patience_s=30)
    course.record_sent(ONE, 0, 0)
    assert [course.next_action(now, ONE, TWO) for now in (20, 49)] == [ReplicaAction.WAIT, ReplicaAction.WAIT]
    assert course.next_action(49, TWO, TWO) is ReplicaAction.SEND
    assert course.next_action(50, ONE, TWO) is ReplicaAction.WANT


def test_peer_is_the_next_taker() -> None:
    members = [Member(name, "h", 1, 1, rank, port) for rank, (name, port) in enumerate([("a", 5), ("b", 0), ("c", 7)])]
    world = World(0, JobState.RUNNING, tuple(members))
    assert [getattr(replica_peer(world, name), "id", None) for name in "abcd"] == ["c", "c", "a", None]
    assert replica_peer(World(0, JobState.RUNNING, tuple(members[:2])), "a") is None


@pytest.fixture
def said() -> list[str]:
    return []


def world_of(generation: int, agents: dict[str, Replicator]) -> World:
    members = [Member(name, "127.0.0.1", 0, 1, rank, one.port) for rank, (name, one) in enumerate(agents.items())]
    return World(generation, JobState.RUNNING, tuple(members))


@pytest.fixture
def agents(stack: contextlib.ExitStack, tmp_path: Path, said: list[str]) -> dict[str, Replicator]:
    """What three agents do for replicas, over TLS."""
    how = {"secret": lambda: SECRET, "say": said.append, "tls": tls_of(tmp_path / "tls")}
    made = {
        name: Replicator(name, tmp_path / name, [tmp_path / f"slots-{name}"], schedule=ReplicationSchedule(0), **how)
        for name in "abc"
    }
    for one in made.values():
        stack.callback(one.close)
    return made


def replica(tmp_path: Path, of: str, at: str) -> list[StateVersion]:
    return [one.header.version for one in find_slots(ReplicaFolder(tmp_path / at).slot_prefix(of, 0)) if is_whole(one)]


def test_agents_send_to_successors(tmp_path: Path, agents: dict[str, Replicator], said: list[str]) -> None:
    keep(kept_prefix(tmp_path / "slots-a"), 1)
    for one in agents.values():
        one.change_world(world_of(0, agents))
    wait_until(lambda: replica(tmp_path, "a", "b") == [(0, 1, 2)], "b has it")
    wait_until(lambda: agents["a"].replicated_us > 1_700_000_000_000_000, "its age is known")
    assert agents["b"].replicated_us == 0
    wait_until(lambda: ReplicaFolder(tmp_path / "a").requested_version() == (0, 1, 2), "the next one is wanted")
    keep(kept_prefix(tmp_path / "slots-a"), 2)
    wait_until(lambda: replica(tmp_path, "a", "b") == [(0, 2, 2), (0, 1, 2)], "b has the next one")
    wait_until(lambda: ReplicaFolder(tmp_path / "a").requested_version() == (0, 2, 2), "a knows that")
    agents.pop("b").close()
    agents["a"].change_world(world_of(1, agents))
    wait_until(lambda: replica(tmp_path, "a", "c") == [(0, 2, 2)], "c has it")
    agents["a"].change_world(World(2, JobState.RUNNING, world_of(1, agents).nodes[:1]))
    assert ReplicaFolder(tmp_path / "a").requested_version() is None, "nobody is there to send anything to"
    assert said == []


def test_silent_peer_costs_a_line(tmp_path: Path, agents: dict[str, Replicator], said: list[str]) -> None:
    world = world_of(0, agents)
    agents.pop("b").close()
    keep(kept_prefix(tmp_path / "slots-a"), 1)
    agents["a"].change_world(world)
    wait_until(lambda: said, "it is said")
    assert "b did not accept a replica" in said[0]
    assert ReplicaFolder(tmp_path / "a").requested_version() is None


def test_leaver_gives_its_state_away(tmp_path: Path, agents: dict[str, Replicator]) -> None:
    for one in agents.values():
        one.change_world(world_of(0, agents))
    keep(kept_prefix(tmp_path / "slots-a"), 1)
    keep(tmp_path / "slots-a", 4)
    wait_until(agents["a"].hand_over_state, "it was handed over")
    assert replica(tmp_path, "a", "b")[0] == (0, 4, 2)
    wait_until(agents["c"].hand_over_state, "who has nothing may go at once")


def test_all_agents_of_a_job_know_one_secret(store: Store) -> None:
    assert len({job_secret(store, "job")() for _ in range(3)}) == 1
    assert len(job_secret(store, "job")()) == 32
    assert job_secret(store, "other")() != job_secret(store, "job")()


class Receiver:
    def __init__(self, folder: Path, secret: Callable[[], bytes] = lambda: SECRET, **settings: Any) -> None:
        self.folder = ReplicaFolder(folder)
        self.folder.path.mkdir(exist_ok=True)
        self.said: list[str] = []
        self.server = ReplicaServer(self.folder, secret, self.said.append, **settings)

    def send(
        self, *states: CompleteSlot, secret: bytes = SECRET, node: str = "n", port: int = 0, **settings: Any
    ) -> None:
        send_states(("127.0.0.1", port or self.server.port), secret, node, states, **settings)

    def steps(self, node: str = "n") -> list[int]:
        return steps(self.folder.slot_prefix(node, 0))


@pytest.fixture
def receive(stack: contextlib.ExitStack, tmp_path: Path) -> Callable[..., Receiver]:
    def start(*arguments: Any, **settings: Any) -> Receiver:
        made = Receiver(tmp_path / "replicas", *arguments, **settings)
        stack.callback(made.server.close)
        return made

    return start


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


def test_nonsense_disturbs_nobody(tmp_path: Path, receiver: Receiver) -> None:
    for noise in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\0" * 5000):
        with socket.create_connection(("127.0.0.1", receiver.server.port)) as connection:
            connection.sendall(noise)
    receiver.send(keep(tmp_path / "kept", 2))
    assert receiver.steps() == [2]


class Proxy(TcpProxy):
    """Changes the byte `at` of what is sent to a server, or ends the connection there."""

    def __init__(self, port: int, at: int = 1 << 62, ends: bool = False) -> None:
        self._at, self._ends, self.heard = at, ends, bytearray()
        super().__init__("127.0.0.1", port)

    def _copy(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while sink.getpeername() == self._server and (data := bytearray(source.recv(65536))):
                place = self._at - len(self.heard)
                self.heard += data
                if 0 <= place < len(data):
                    data[place] ^= 0x10
                    if self._ends:
                        sink.sendall(data[:place])
                        self.cut()
                        break
                sink.sendall(data)
        super()._copy(source, sink)


def test_changed_transfer_keeps_old_state(tmp_path: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "_SENDER_S", 5.0)
    rng = random.Random(3)
    receiver.send(keep(tmp_path / "kept", 1, 50_000))
    for attempt in range(12):
        state, at = keep(tmp_path / f"kept-{attempt}", 2, 50_000), rng.randrange(50_500)
        refused = contextlib.suppress(TemporaryError, ProtocolError, ReplicaRefusedError)
        with contextlib.closing(Proxy(receiver.server.port, at, ends=attempt % 2 == 0)) as proxy, refused:
            receiver.send(state, port=proxy.port)
            assert len(proxy.heard) <= at, "it worked though it was damaged"
        assert receiver.steps() in ([1], [2, 1])
    receiver.send(keep(tmp_path / "last", 3, 50_000))
    assert receiver.steps()[0] == 3


def test_overwritten_state_does_not_arrive(tmp_path: Path, receiver: Receiver) -> None:
    state = keep(tmp_path / "kept", 1, 3_000_000)

    def overwrite() -> bool:
        for step in (2, 3):
            keep(tmp_path / "kept", step, 3_000_000)
        return False

    with pytest.raises(TemporaryError, match="overwritten"):
        receiver.send(state, stopping=overwrite)
    assert receiver.folder.find_replicas() == []


def test_too_much_is_refused(tmp_path: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "_SHARE_OF_FREE", 1e-12)
    with pytest.raises(ReplicaRefusedError, match="bytes of free memory"):
        receiver.send(keep(tmp_path / "kept", 1, 1000))
    assert receiver.folder.slot_prefixes() == []


@pytest.mark.parametrize(
    "wrong", [{"node": "../up"}, {"node": ""}, {"node": 3}, {"rank": 2}, {"data_nbytes": -1}, {"step": 1.5}]
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
    with contextlib.closing(Proxy(receiver.server.port)) as proxy:
        receiver.send(keep(tmp_path / "kept", 7, 3_000_000), tls=tls, port=proxy.port)
    assert receiver.steps() == [7]
    assert len(proxy.heard) > 3_000_000
    assert (bytes([7]) * 1000 in proxy.heard) is not encrypted, "the state can be read on the network"
    assert (b'"generation"' in proxy.heard) is not encrypted, "so can what is said of it"


def test_receiver_for_another_name(tmp_path: Path, receive: Callable[..., Receiver]) -> None:
    receiver, state = receive(tls=tls_of(tmp_path / "tls", CA.issue("node-1.example"))), keep(tmp_path / "kept", 7)
    with pytest.raises(ProtocolError, match=r"its certificate is for a different name, not for '127\.0\.0\.1'"):
        receiver.send(state, tls=tls_of(tmp_path / "sender"))
    receiver.send(state, tls=tls_of(tmp_path / "sender", server_name="node-1.example"))
    assert receiver.steps() == [7]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("secret", "does not know the secret"),
        ("CA", "not signed by a CA in"),
        ("plain", "set TLS on all nodes or on none"),
    ],
)
def test_stranger_is_refused(
    tmp_path: Path, receive: Callable[..., Receiver], monkeypatch: pytest.MonkeyPatch, wrong: str, words: str
) -> None:
    receiver, tls = receive(tls=None if wrong == "secret" else tls_of(tmp_path / "tls")), None
    if wrong == "plain":
        monkeypatch.setattr(peers, "HANDSHAKE_S", 0.2)  # in which each side waits for the other's words
    elif wrong == "CA":
        tls = tls_of(tmp_path / "sender", Authority("other").issue("127.0.0.1"))
    with pytest.raises((ProtocolError, TemporaryError)):
        receiver.send(keep(tmp_path / "kept", 7), tls=tls, secret=b"x" * 32 if wrong == "secret" else SECRET)
    wait_until(lambda: receiver.said, "the receiver says why")
    assert words in receiver.said[0]
    assert SECRET.decode() not in receiver.said[0]
    assert receiver.folder.slot_prefixes() == []


def test_silent_caller_does_not_delay_close(
    tmp_path: Path, receive: Callable[..., Receiver], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "_SENDER_S", DEADLINE_S)
    receiver = receive(tls=tls_of(tmp_path / "tls"))
    with socket.create_connection(("127.0.0.1", receiver.server.port)):
        receiver.server.close()
    assert receiver.said == []
