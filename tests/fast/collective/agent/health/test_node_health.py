"""Nodes that are checked before they join; what agents learn from their connections: that a process is gone."""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import queue
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore

from edl import discovery
from edl.collective.agent.health import node_check, node_probe, peer_monitor
from edl.collective.agent.health.node_check import (
    CheckRoundResult,
    Groups,
    NodeCheckResult,
    NodeCheckSettings,
    check_nodes,
    first_groups,
    second_groups,
    summarize_rounds,
)
from edl.collective.agent.health.node_probe import check_copies, check_products, check_sum
from edl.collective.agent.health.peer_monitor import Address, PeerConnections, choose_peers
from edl.collective.job_records import JobState, Member, World
from edl.errors import EDLError
from edl.protocol.tls import PeerTLS
from edl.settings import Credentials
from tests.certificates import Authority
from tests.waiting import DEADLINE_S, wait_until

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _little_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_probe, "_SIZE", {"cpu": 96})
    monkeypatch.setattr(node_probe, "_COPIED", 5000)
    monkeypatch.setattr(node_probe, "_REDUCED", 5000)


def spoiled(function: Callable[..., Any], at_call: int) -> Callable[..., Any]:
    """A fake of a function of torch's, of whose results one has a wrong number: the one it returns or writes to."""
    calls = 0

    def fake(first: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        result = function(first, *args, **kwargs)
        calls += 1
        if calls == at_call:
            (first if result is None else result).view(-1)[17] += 1
        return result

    return fake


def test_wrong_product_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_products(CPU) > 0
    monkeypatch.setattr(torch, "matmul", spoiled(torch.matmul, at_call=20))
    with pytest.raises(EDLError, match=r"^cpu: a matrix product has 1 of 9216 numbers wrong$"):
        check_products(CPU)


def test_wrong_copy_names_both_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU three times in the place of three GPUs."""
    check_copies([CPU] * 3)
    monkeypatch.setattr(torch.Tensor, "copy_", spoiled(torch.Tensor.copy_, at_call=6))
    with pytest.raises(EDLError, match=r"^GPU 2 to GPU 1: a copy has 1 of 5000 numbers wrong$"):
        check_copies([CPU] * 3)


def test_wrong_sum_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_sum(HashStore(), 0, 1, [], 60.0) > 0
    assert not dist.is_initialized()
    monkeypatch.setattr(dist, "all_reduce", spoiled(dist.all_reduce, at_call=4))
    try:
        with pytest.raises(EDLError, match=r"^cpu: a sum over 1 nodes has 1 of 5000 numbers wrong$"):
            check_sum(HashStore(), 0, 1, [], 60.0)
    finally:
        dist.destroy_process_group()


GOOD = CheckRoundResult("cpu", 1.0, 0.1)
FACTOR = 2.0


def simulate(nodes: list[str], faulty: set[str], silent: set[str]) -> list[tuple[Groups, dict[str, CheckRoundResult]]]:
    """Both rounds, where a group with a faulty or silent node fails for all of its members."""
    rounds: list[tuple[Groups, dict[str, CheckRoundResult]]] = []
    groups = first_groups(nodes)
    for _ in range(2):
        results = {}
        for group in groups:
            works = not (faulty | silent) & set(group) or len(group) == 1
            for node in set(group) - silent:
                results[node] = GOOD if works else CheckRoundResult("cpu", 1.0, None, "could not reduce")
        rounds.append((groups, results))
        groups = second_groups(nodes, results, FACTOR)
    return rounds


@given(st.integers(4, 9).filter(lambda count: count != 5), st.integers(0, 8), st.booleans())
def test_one_bad_node_is_named(count: int, which: int, silent: bool) -> None:
    nodes = [f"n{number}" for number in range(count)]
    bad = {nodes[which % count]}
    found = summarize_rounds(nodes, simulate(nodes, set() if silent else bad, bad if silent else set()), FACTOR)
    assert set(found.faulty) == bad
    assert found.slow == {}


def test_a_silent_node_among_three_is_named() -> None:
    nodes = list("abc")
    assert summarize_rounds(nodes, simulate(nodes, set(), {"c"}), FACTOR) == NodeCheckResult({"c": "no answer"})


def test_slow_node_is_named_by_its_own_time() -> None:
    first = {"a": GOOD, "b": CheckRoundResult("cpu", 3.0, 0.5), "c": GOOD, "d": GOOD}
    first["a"] = CheckRoundResult("cpu", 1.0, 0.5)  # it waited for b
    again = second_groups("abcd", first, FACTOR)
    assert {frozenset(group) for group in again} in (
        {frozenset("da"), frozenset("cb")},
        {frozenset("ca"), frozenset("db")},
    )
    partner = next(name for group in again if "b" in group for name in group if name != "b")
    second = {
        **dict.fromkeys("acd", GOOD),
        "b": CheckRoundResult("cpu", 3.1, 0.5),
        partner: CheckRoundResult("cpu", 1.0, 0.5),
    }
    found = summarize_rounds("abcd", [(first_groups("abcd"), first), (again, second)], FACTOR)
    assert found.faulty == {}
    assert found.slow == {
        "b": "compute on cpu took 3 s, the median of all nodes is 1 s; "
        "reduce on cpu took 0.5 s, the median of all nodes is 0.1 s"
    }


def test_devices_are_compared_with_alike() -> None:
    results = {
        "a": CheckRoundResult("cuda", 0.01, 0.1),
        "b": CheckRoundResult("cuda", 0.01, 0.1),
        "c": CheckRoundResult("cpu", 9.0, 0.1),
    }
    assert summarize_rounds("abc", [(first_groups("abc"), results)], FACTOR) == NodeCheckResult()


@pytest.mark.parametrize("silent", [True, False])
def test_silent_node_is_named(store: discovery.Store, monkeypatch: pytest.MonkeyPatch, silent: bool) -> None:
    """It is the first of its group. It may also say where to meet, and then fall silent."""
    tasks: list[Mapping[str, Any]] = []

    def run(task: Mapping[str, Any], *_: object) -> dict[str, Any]:
        tasks.append(task)
        return {"device": "cpu", "compute_s": 1.0, "reduce_s": 0.1 if task["world_size"] == 1 else None, "error": ""}

    now = itertools.count(1000.0)
    monkeypatch.setattr(node_check, "_run_process", run)
    monkeypatch.setattr(node_check, "time", SimpleNamespace(monotonic=lambda: next(now), sleep=lambda seconds: None))
    if not silent:
        store.put("check/1/meet/a", b'{"host": "10.0.0.1", "port": 7}')
    found = check_nodes(store, "check", "b", "10.0.0.2", "ab", NodeCheckSettings(timeout_s=60.0))
    assert found == NodeCheckResult({"a": "no answer"}, {})
    met = {"rank": 1, "world_size": 2, "host": "10.0.0.1", "port": 7}
    assert [{**task, "timeout_s": 0} for task in tasks] == [
        {"world_size": 1} | ({} if silent else met) | {"timeout_s": 0},
        {"world_size": 1, "timeout_s": 0},
    ]


@pytest.mark.parametrize(
    ("hangs", "words"), [(True, "hangs"), (False, "could not compute: the probe ended with status -11")]
)
def test_dead_or_undying_probe_is_a_fault(monkeypatch: pytest.MonkeyPatch, hangs: bool, words: str) -> None:
    """SIGKILL does not end a process that waits for a driver; SIGSEGV leaves no words."""
    killed = threading.Event()

    def communicate() -> tuple[bytes, bytes]:
        if hangs:
            killed.wait(DEADLINE_S)
        return b"", b""

    process = SimpleNamespace(communicate=communicate, kill=lambda: None, returncode=-11)
    monkeypatch.setattr(node_check.subprocess, "Popen", lambda *_, **__: process)
    monkeypatch.setattr(node_check, "_KILL_TIMEOUT_S", 0.01)
    reported = node_check._run_process({"timeout_s": 1.0}, 0.0 if hangs else math.inf, lambda: None)
    killed.set()
    assert words in reported["error"]


def test_waiting_nodes_are_checked_together(store: discovery.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str, tuple[str, ...]]] = []

    def check(
        store: object, prefix: str, node: str, host: str, nodes: list[str], settings: NodeCheckSettings
    ) -> NodeCheckResult:
        asked.append((prefix, node, tuple(nodes)))
        return NodeCheckResult({}, {})

    monkeypatch.setattr(node_check, "check_nodes", check)
    for name in "bc":  # wait already when the first one looks
        store.put(f"jobs/job/check/waiting/{name}", b"")
    for name in ("a", "b", "c", "late"):
        node_check.check_before_joining(store, "job", name, "127.0.0.1", 0.0, NodeCheckSettings())
    assert asked[:3] == [("jobs/job/check/runs/0", name, ("a", "b", "c")) for name in "abc"]
    assert asked[3] == ("jobs/job/check/runs/1", "late", ("late",))


OTHER = """
import signal, sys
from edl.collective.agent.health.peer_monitor import PeerConnections
print(PeerConnections(sys.argv[1], print).port, flush=True)
signal.pause()
"""
CA = Authority()
NAME = "agents.example"


class Peers(PeerConnections):
    """An agent's connections, and the nodes that it was told are gone."""

    def __init__(self, name: str = "me", tls: PeerTLS | None = None) -> None:
        self.gone: queue.SimpleQueue[str] = queue.SimpleQueue()
        super().__init__(name, self.gone.put, tls)

    @property
    def address(self) -> Address:
        return ("127.0.0.1", self.port)

    def next_gone(self) -> str:
        return self.gone.get(timeout=DEADLINE_S)

    def wait_connected(self, *nodes: str) -> None:
        wait_until(lambda: self.heard.issuperset(nodes), f"{nodes} are connected")


@pytest.fixture
def agent(stack: ExitStack) -> Callable[..., Peers]:
    """Make agents in this process; to close one looks to others as if its process had ended."""
    return lambda name="me", tls=None: stack.enter_context(closing(Peers(name, tls)))


@contextmanager
def other_process(name: str) -> Iterator[tuple[Popen[str], Address]]:
    with Popen([sys.executable, "-c", OTHER, name], stdout=PIPE, stderr=DEVNULL, text=True) as process:
        try:
            yield process, ("127.0.0.1", int(process.stdout.readline()))
        finally:
            process.kill()


def test_killed_is_gone_stopped_is_not(agent: Callable[..., Peers]) -> None:
    peers = agent()
    with other_process("a") as (a, to_a), other_process("b") as (b, to_b):
        peers.set_peers({"a": to_a, "b": to_b})
        peers.wait_connected("a", "b")
        os.kill(b.pid, signal.SIGSTOP)
        a.kill()
        assert peers.next_gone() == "a"
        b.kill()  # stopped or not
        assert peers.next_gone() == "b"
    peers.set_peers({})
    wait_until(lambda: not peers._watches, "nobody is followed any more")
    assert peers.gone.empty(), "each is told once"


def test_unknown_address_proves_nothing(agent: Callable[..., Peers]) -> None:
    """A firewall refuses, a port belongs to somebody else now, a node was told a wrong --local-addr."""
    peers, somebody, known = agent(), agent("somebody else"), agent("known")
    with socket.create_server(("127.0.0.1", 0)) as closed:
        refused = closed.getsockname()[:2]
    addresses = {"a": refused, "b": somebody.address, "c": ("node..example", 4000), "d": ("x" * 70, 4000)}
    peers.set_peers(addresses | {"known": known.address})
    peers.wait_connected("known")
    wait_until(lambda: somebody._accepted, "somebody else has been asked")
    somebody.close()
    known.close()
    assert peers.next_gone() == "known", "and nobody before it"
    assert peers.gone.empty()


def test_one_refusal_is_not_a_death(agent: Callable[..., Peers], monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands between may begin anew, and refuse until it has."""
    attempts = iter(["a", "no", "no", "a", "no", "away", "no", "no", "", "no", "no"])

    async def connect(address: Address) -> tuple[asyncio.StreamReader, Any]:
        match next(attempts):
            case "no":
                raise ConnectionRefusedError
            case "away":
                raise TimeoutError
            case said:
                reader = asyncio.StreamReader()
                reader.feed_data(said.encode())
                reader.feed_eof()
                return reader, SimpleNamespace(transport=SimpleNamespace(abort=lambda: None))

    peers = agent()
    monkeypatch.setattr(peers, "_connect", connect)
    for name in ("_REFUSED_RETRY_S", "_UNREACHED_RETRY_S"):
        monkeypatch.setattr(peer_monitor, name, 0.0)
    peers.set_peers({"a": ("proxy", 1)})
    assert peers.next_gone() == "a"
    assert list(attempts) == ["no"], "three refusals in a row, and none since"


def test_ring_ties_to_those_behind() -> None:
    def world(size: int) -> World:
        members = tuple(Member(str(rank), "h", 1, 1, rank, tether_port=rank % 9 and 100 + rank) for rank in range(size))
        return World(0, JobState.RUNNING, members)

    assert choose_peers(world(1), 0) == {}
    assert choose_peers(world(3), 1) == {"2": ("h", 102)}, "0 has no port: it is of an older version"
    assert [*choose_peers(world(20), 15)] == ["16", "17", "19", "1", "2", "3"]


def tls_of(folder: Path, name: str = NAME, issuer: Authority = CA) -> PeerTLS:
    folder.mkdir(exist_ok=True)
    return PeerTLS(Credentials(ca=CA.save(folder), **issuer.issue(name).save(folder), server_name=NAME))


def test_close_repeats_a_lost_cancellation() -> None:
    """Before Python 3.12, `asyncio.wait_for` loses one that comes in the moment of its success."""

    class Losing(Peers):
        async def _watch(self, node: str, address: Address) -> None:
            self.heard.add(node)
            with suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
            await asyncio.Event().wait()

    peers = Losing()
    peers.set_peers({"other": peers.address})
    peers.wait_connected("other")
    peers.close()


def test_death_is_seen_through_tls(tmp_path: Path, agent: Callable[..., Peers]) -> None:
    """Whichever strangers connect beside it: these are told nothing, and hold nobody up."""
    peers, other = agent(tls=tls_of(tmp_path / "mine")), agent("a", tls_of(tmp_path / "a"))
    with socket.create_connection(peers.address), socket.create_connection(peers.address, DEADLINE_S) as stranger:
        peers.set_peers({"a": other.address})
        peers.wait_connected("a")
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        heard = b""
        with suppress(ConnectionResetError):
            while more := stranger.recv(100):
                heard += more
        assert b"me" not in heard
        other.close()
        assert peers.next_gone() == "a"


@pytest.mark.parametrize("wrong", ["name", "CA", "plain"])
def test_impostor_is_not_believed(
    tmp_path: Path, agent: Callable[..., Peers], wrong: str, caplog: pytest.LogCaptureFixture
) -> None:
    issuer, name = Authority() if wrong == "CA" else CA, "other.example" if wrong == "name" else NAME
    peers = agent(tls=tls_of(tmp_path / "mine"))
    impostor = agent("a", None if wrong == "plain" else tls_of(tmp_path / "a", name, issuer))
    with caplog.at_level("DEBUG", peer_monitor.__name__):
        peers.set_peers({"a": impostor.address})
        wait_until(lambda: "no connection to the agent of a" in caplog.text, "the handshake fails")
    impostor.close()
    assert not peers.heard
    assert peers.gone.empty(), "its death proves nothing of the agent's"
