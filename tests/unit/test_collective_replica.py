"""Replicas without workers: what is kept and sent when, and transfers between real agents' threads that go wrong."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edl.collective.agent.world import Member, State, World
from edl.collective.checkpoint.choice import choose
from edl.collective.checkpoint.keeping import (
    NOTHING,
    Keeping,
    ReplicaFolder,
    Stamp,
    kept_prefix,
    newest_common,
    stamp_of,
)
from edl.collective.checkpoint.slots import HEADER_NBYTES, Found, Label, SlotPair, find
from edl.collective.replica.client import Refused, send_states
from edl.collective.replica.course import Act, Course, ReplicaPace
from edl.collective.replica.protocol import Announcement
from edl.collective.replica.replication import JobSecret, Replication, peer_of
from edl.collective.replica.server import ReplicaServer
from edl.discovery import open_store
from edl.errors import ProtocolError, SettingsError, TemporaryError

SECRET = b"s" * 32
WAIT_S = 20.0


def keep(prefix: Path, step: int, nbytes: int = 100, *, generation: int = 0, rank: int = 0, world: int = 2) -> Found:
    """Save a state whose bytes are its step."""
    slots = SlotPair(prefix)
    meta = b"m%d" % step
    _, memory = slots.begin(nbytes, len(meta))
    memory[HEADER_NBYTES : HEADER_NBYTES + nbytes] = bytes([step]) * nbytes
    slots.commit(Label(generation, step, world, rank, sharded=True), nbytes, meta)
    slots.close()
    return find(prefix)[0]


def is_whole(found: Found) -> bool:
    copy = found.copy()
    return copy is not None and set(copy.data) <= {found.label.step} and copy.meta == b"m%d" % found.label.step


def steps(prefix: Path) -> list[int]:
    assert all(is_whole(one) for one in find(prefix))
    return [one.label.step for one in find(prefix)]


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.005)


# --- Which state is chosen. ---

labels = st.builds(
    Label, st.integers(0, 2), st.integers(0, 3), st.integers(1, 3), st.integers(0, 2), sharded=st.just(True)
).filter(lambda label: label.rank < label.world)


@given(st.lists(st.tuples(st.lists(labels, max_size=4), st.lists(labels, max_size=4)), min_size=1, max_size=4))
def test_the_newest_state_that_is_whole_is_chosen_and_owners_come_first(
    offers: list[tuple[list[Label], list[Label]]],
) -> None:
    own, replicas = [one for one, _ in offers], [one for _, one in offers]
    choice = choose(own, replicas)
    everything = [label for row in (*own, *replicas) for label in row]
    whole = {
        state
        for state in map(stamp_of, everything)
        if {label.rank for label in everything if stamp_of(label) == state} == set(range(state[2]))
    }
    assert (choice is None) == (not whole)
    if choice is None:
        return
    assert (choice.generation, choice.step, choice.world) == max(whole)
    owned = {label.rank for row in own for label in row if stamp_of(label) == max(whole)}
    assert choice.from_replicas == (owned != set(range(choice.world)))
    for part, holder in enumerate(choice.holders):
        givers = own if part in owned else replicas
        assert any(choice.matches(label, part) for label in givers[holder])
    for source, part in zip(choice.sources, choice.parts, strict=bool(choice.sources)):
        givers = own if part in owned else replicas
        assert any(choice.matches(label, part) for label in givers[source])


# --- What is kept. ---


def test_workers_keep_a_state_when_it_is_wanted_and_all_that_are_kept_were_sent(tmp_path: Path) -> None:
    folder = ReplicaFolder(tmp_path / "replicas")
    folder.path.mkdir()
    keeping = Keeping(tmp_path / "slots-0", folder)
    assert not keeping.wanted()
    folder.want(NOTHING)
    assert keeping.wanted()
    keep(keeping.slots.prefix, 3)
    assert not keeping.wanted()
    folder.want((0, 3, 2))
    assert keeping.wanted()
    keep(keeping.slots.prefix, 6)
    keeping.went_on_from((0, 5, 2))
    assert keeping.wanted(), "step 6 was given up"
    assert steps(keeping.slots.prefix) == [3]
    folder.want(None)
    assert not keeping.wanted()
    keeping.close()


def test_the_newest_state_that_all_workers_of_a_node_kept_is_found(tmp_path: Path) -> None:
    one, other = tmp_path / "a", tmp_path / "b"
    assert newest_common([]) == []
    keep(one, 3)
    assert newest_common([find(one), find(other)]) == []
    keep(other, 3, rank=1)
    keep(one, 5)
    assert [found.label.rank for found in newest_common([find(one), find(other)])] == [0, 1]
    assert newest_common([find(one), find(other)])[0].label.step == 3


# --- When what is sent. ---

ONE, TWO = (0, 1, 2), (0, 2, 2)


def test_a_state_is_sent_once_and_the_next_one_wanted_after_the_interval() -> None:
    course = Course(ReplicaPace(interval_s=10, share=0.1, retry_s=5))
    course.begin(same_peer=False)
    assert course.next(0, NOTHING, NOTHING) is Act.WANT
    assert course.next(1, ONE, ONE) is Act.SEND
    course.failed(2)
    assert [course.next(now, ONE, ONE) for now in (3, 7)] == [Act.WAIT, Act.SEND]
    course.sent(ONE, 7, 9)
    assert [course.next(now, ONE, ONE) for now in (9, 26.9, 27)] == [Act.WAIT, Act.WAIT, Act.WANT]
    course.begin(same_peer=True)
    assert course.next(10, ONE, ONE) is Act.WANT, "the first state of a new world is kept at once"
    course.begin(same_peer=False)
    assert course.next(10, ONE, ONE) is Act.SEND, "a new peer has none"


def test_a_state_that_some_worker_does_not_keep_is_passed_over_in_the_end() -> None:
    course = Course(ReplicaPace(patience_s=30))
    course.sent(ONE, 0, 0)
    assert [course.next(now, ONE, TWO) for now in (20, 49)] == [Act.WAIT, Act.WAIT]
    assert course.next(49, TWO, TWO) is Act.SEND
    assert course.next(50, ONE, TWO) is Act.WANT


@settings(max_examples=200)
@given(st.lists(st.tuples(st.floats(0.0, 3.0), st.floats(0.0, 5.0), st.booleans()), min_size=1, max_size=30))
def test_transfers_take_no_more_than_their_share(turns: list[tuple[float, float, bool]]) -> None:
    """Workers keep a state as soon as it is wanted; transfers take as long as they take, and may fail."""
    course = Course(ReplicaPace(interval_s=2.0, share=0.25, retry_s=1.0))
    course.begin(same_peer=False)
    now, kept, sent = 0.0, NOTHING, []
    for wait_s, took_s, works in turns:
        now += wait_s
        act = course.next(now, kept, kept)
        if act is Act.WANT:
            kept = (0, kept[1] + 1, 2)
        elif act is Act.SEND:
            began, now = now, now + took_s
            if works:
                course.sent(kept, began, now)
                sent.append((began, now))
            else:
                course.failed(now)
    for (began, ended), (following, _) in pairwise(sent):
        assert following - began >= max(2.0, 4 * (ended - began)) - 1e-6


@pytest.mark.parametrize("wrong", [{"share": 0.0}, {"share": 1.5}, {"interval_s": -1.0}])
def test_a_pace_that_cannot_be_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(SettingsError):
        ReplicaPace(**wrong)


def test_the_peer_is_the_next_member_that_takes_replicas() -> None:
    members = [Member(name, "h", 1, 1, rank, port) for rank, (name, port) in enumerate([("a", 5), ("b", 0), ("c", 7)])]
    world = World(0, State.RUNNING, tuple(members))
    assert [getattr(peer_of(world, name), "id", None) for name in "abcd"] == ["c", "c", "a", None]
    assert peer_of(World(0, State.RUNNING, tuple(members[:2])), "a") is None


# --- Transfers. ---


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def server(tmp_path: Path, said: list[str]) -> Iterator[ReplicaServer]:
    folder = ReplicaFolder(tmp_path / "replicas")
    folder.path.mkdir()
    server = ReplicaServer(folder, lambda: SECRET, said.append, operation_s=1.0)
    yield server
    server.close()


def send(server: ReplicaServer, *states: Found, secret: bytes = SECRET, node: str = "other.host-1") -> None:
    send_states(("127.0.0.1", server.port), secret, node, states, operation_s=10.0)


def test_the_last_two_states_of_each_worker_are_there(tmp_path: Path, server: ReplicaServer) -> None:
    for step in (1, 2, 3):
        send(server, *(keep(tmp_path / f"kept-{rank}", step, 3_000_000 * rank, rank=rank) for rank in range(2)))
    folder = ReplicaFolder(tmp_path / "replicas")
    for rank in range(2):
        prefix = folder.pair("other.host-1", rank)
        assert steps(prefix) == [3, 2]
        assert find(prefix)[0].label == find(tmp_path / f"kept-{rank}")[0].label
    assert folder.prefixes() == [folder.pair("other.host-1", rank) for rank in range(2)]
    send(server, find(tmp_path / "kept-0")[0])
    assert steps(folder.pair("other.host-1", 0)) == [3, 2], "the same once more costs nothing"


def test_a_state_that_was_given_up_makes_way_before_an_older_one(tmp_path: Path, server: ReplicaServer) -> None:
    kept = tmp_path / "kept"
    for step in (1, 2):
        send(server, keep(kept, step))
    pair = SlotPair(kept)
    pair.keep_only(pair.find()[1])
    send(server, keep(kept, 2, generation=1))
    found = find(ReplicaFolder(tmp_path / "replicas").pair("other.host-1", 0))
    assert [stamp_of(one.label) for one in found] == [(1, 2, 2), (0, 1, 2)]


def test_states_of_nodes_that_are_gone_stay_until_they_are_not_needed(tmp_path: Path, server: ReplicaServer) -> None:
    send(server, keep(tmp_path / "gone", 1), node="gone")
    folder, here = ReplicaFolder(tmp_path / "replicas"), []
    for step in (2, 3):
        send(server, keep(tmp_path / "kept", step), node="there")
        here.append([prefix.name for prefix in folder.prefixes()])
    assert here == [["gone-0", "there-0"], ["there-0"]]


def test_who_does_not_know_the_secret_is_refused(tmp_path: Path, server: ReplicaServer, said: list[str]) -> None:
    with pytest.raises((ProtocolError, TemporaryError)):
        send(server, keep(tmp_path / "kept", 1), secret=b"x" * 32)
    until(lambda: said, "the server said why")
    assert "does not know the secret" in said[0]
    assert SECRET.decode() not in said[0]
    assert ReplicaFolder(tmp_path / "replicas").prefixes() == []


def test_a_receiver_that_does_not_know_the_secret_gets_nothing(tmp_path: Path) -> None:
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
def test_whoever_says_something_else_disturbs_nobody(tmp_path: Path, server: ReplicaServer, noise: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(noise)
    send(server, keep(tmp_path / "kept", 1))
    assert steps(ReplicaFolder(tmp_path / "replicas").pair("other.host-1", 0)) == [1]


def test_whatever_is_changed_on_the_way_the_state_before_it_stays(tmp_path: Path, server: ReplicaServer) -> None:
    """A proxy that damages one byte somewhere, or cuts the connection there."""
    rng, prefix = random.Random(3), ReplicaFolder(tmp_path / "replicas").pair("other.host-1", 0)
    send(server, keep(tmp_path / "kept", 1, 50_000))
    for attempt in range(30):
        state = keep(tmp_path / f"kept-{attempt}", 2, 50_000)
        refused = contextlib.suppress(TemporaryError, ProtocolError, Refused)
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


def test_a_sender_killed_half_way_leaves_the_state_before(tmp_path: Path, said: list[str]) -> None:
    state = keep(tmp_path / "kept", 2, 40_000_000)
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        send_states(("127.0.0.1", int.from_bytes(os.read(told, 4), "little")), SECRET, "n", [state])
        os._exit(0)
    folder = ReplicaFolder(tmp_path / "replicas")
    folder.path.mkdir()
    prefix = folder.pair("n", 0)
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


def test_a_receiver_killed_half_way_has_the_state_before(tmp_path: Path) -> None:
    folder = ReplicaFolder(tmp_path / "replicas")
    folder.path.mkdir()
    prefix = folder.pair("n", 0)
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


def test_a_state_that_is_overwritten_while_it_is_sent_does_not_arrive(tmp_path: Path, server: ReplicaServer) -> None:
    state = keep(tmp_path / "kept", 1, 3_000_000)

    def overwrite() -> bool:
        for step in (2, 3):
            keep(tmp_path / "kept", step, 3_000_000)
        return False

    with pytest.raises(TemporaryError, match="overwritten"):
        send_states(("127.0.0.1", server.port), SECRET, "n", [state], stopping=overwrite)
    assert ReplicaFolder(tmp_path / "replicas").found() == []


def test_more_than_there_is_room_for_is_refused(tmp_path: Path, said: list[str]) -> None:
    folder = ReplicaFolder(tmp_path / "replicas")
    folder.path.mkdir()
    server = ReplicaServer(folder, lambda: SECRET, said.append, share_of_free=1e-12)
    with pytest.raises(Refused, match="free in memory"):
        send(server, keep(tmp_path / "kept", 1, 1000))
    server.close()
    assert folder.prefixes() == []


@given(st.binary(max_size=300))
def test_what_is_no_announcement_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        Announcement.decode(data)


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
    right = Announcement("n", 0, 0, 1, 2, 1, 100, 10, NOTHING)
    assert Announcement.decode(right.encode()) == right
    with pytest.raises(ProtocolError):
        Announcement.decode(replace(right, **wrong).encode())  # type: ignore[arg-type]


# --- Agents. ---


def world_of(generation: int, agents: dict[str, Replication]) -> World:
    members = [Member(name, "127.0.0.1", 0, 1, rank, one.port) for rank, (name, one) in enumerate(agents.items())]
    return World(generation, State.RUNNING, tuple(members))


@pytest.fixture
def agents(tmp_path: Path, said: list[str]) -> Iterator[dict[str, Replication]]:
    made = {
        name: Replication(
            name, tmp_path / name, [tmp_path / f"slots-{name}"], lambda: SECRET, said.append, ReplicaPace(0)
        )
        for name in "abc"
    }
    yield made
    for one in made.values():
        one.close()


def replica(tmp_path: Path, of: str, at: str) -> list[Stamp]:
    return [stamp_of(one.label) for one in find(ReplicaFolder(tmp_path / at).pair(of, 0)) if is_whole(one)]


def test_agents_send_what_is_kept_to_the_next_one_and_to_its_successor(
    tmp_path: Path, agents: dict[str, Replication], said: list[str]
) -> None:
    keep(kept_prefix(tmp_path / "slots-a"), 1)
    for one in agents.values():
        one.world_changed(world_of(0, agents))
    until(lambda: replica(tmp_path, "a", "b") == [(0, 1, 2)], "b has it")
    until(lambda: ReplicaFolder(tmp_path / "a").wanted() == (0, 1, 2), "the next one is wanted")
    keep(kept_prefix(tmp_path / "slots-a"), 2)
    until(lambda: replica(tmp_path, "a", "b") == [(0, 2, 2), (0, 1, 2)], "b has the next one")
    agents.pop("b").close()
    agents["a"].world_changed(world_of(1, agents))
    until(lambda: replica(tmp_path, "a", "c") == [(0, 2, 2)], "c has it")
    agents["a"].world_changed(World(2, State.RUNNING, world_of(1, agents).nodes[:1]))
    assert ReplicaFolder(tmp_path / "a").wanted() is None, "nobody is there to send anything to"
    assert said == []


def test_a_peer_that_does_not_answer_costs_a_line(
    tmp_path: Path, agents: dict[str, Replication], said: list[str]
) -> None:
    world = world_of(0, agents)
    agents.pop("b").close()
    keep(kept_prefix(tmp_path / "slots-a"), 1)
    agents["a"].world_changed(world)
    until(lambda: said, "it is said")
    assert "b did not take a replica" in said[0]
    assert ReplicaFolder(tmp_path / "a").wanted() is None


def test_who_leaves_gives_the_newest_state_away(tmp_path: Path, agents: dict[str, Replication]) -> None:
    for one in agents.values():
        one.world_changed(world_of(0, agents))
    keep(kept_prefix(tmp_path / "slots-a"), 1)
    keep(tmp_path / "slots-a", 4)
    until(agents["a"].hand_over, "it was handed over")
    assert replica(tmp_path, "a", "b")[0] == (0, 4, 2)
    until(agents["c"].hand_over, "who has nothing may go at once")


def test_all_agents_of_a_job_know_one_secret(tmp_path: Path) -> None:
    with open_store(f"sqlite:///{tmp_path}/store") as store:
        assert len({JobSecret(store, "job")() for _ in range(3)}) == 1
        assert len(JobSecret(store, "job")()) == 32
        assert JobSecret(store, "other")() != JobSecret(store, "job")()
