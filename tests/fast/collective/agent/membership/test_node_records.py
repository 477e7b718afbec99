"""Records of nodes and of hosts that are left out, in a store: and what others may believe after it was away."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from edl.collective.agent.context import AgentContext
from edl.collective.agent.join import _is_excluded
from edl.collective.agent.membership.excluded_hosts import Exclusions, host_key
from edl.collective.agent.membership.node_records import Membership
from edl.collective.agent.shutdown import ShutdownState
from edl.collective.goodput.records import read_job
from edl.collective.job_records import Exclusion, JobState, Member, Node, World
from edl.discovery.sqlite.store import SqliteStore
from edl.errors import DiscoveryError, ProtocolError

TTL_S = 3.0
BACK_S = TTL_S + 2.0
"""Until when a member without a record may only be late."""
WORLD = World(0, JobState.RUNNING, tuple(Member(name, "host", 1, 1, rank) for rank, name in enumerate("ab")))


class FakeLease:
    """A lease that lapses when the test says so."""

    def __init__(self, asked: Callable[[], bool]) -> None:
        self.lapsed, self.late_at, self._asked = False, -math.inf, asked

    @property
    def lost(self) -> bool:
        return self._asked() or self.lapsed

    def close(self) -> None:
        self.lapsed = True


class FakeStore(SqliteStore):
    """A store that can be away, in simulated time."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self.now_s, self.away = 100.0, False
        self.leases: list[FakeLease] = []
        self.asked: Callable[[], bool] = lambda: False

    def lease(self, ttl_s: float) -> Any:
        self.leases.append(FakeLease(lambda: self.asked()))
        return self.leases[-1]

    def put(self, key: str, value: bytes, lease: Any = None) -> Any:
        if self.away:
            raise DiscoveryError("away")
        return super().put(key, value)

    def lapse(self, *names: str) -> None:
        for name in names:
            self.delete(f"jobs/job/nodes/{name}")


@pytest.fixture
def store(stack: ExitStack, tmp_path: Path) -> FakeStore:
    return stack.enter_context(FakeStore(tmp_path / "store.sqlite"))


@pytest.fixture
def members(store: FakeStore, stack: ExitStack) -> tuple[Membership, Membership]:
    one, other = (
        Membership(store, "job", Node(name, "host", 1, 1), TTL_S, lambda: None, clock=lambda: store.now_s)
        for name in "ab"
    )
    for each in (one, other):
        stack.callback(each.close)
        assert each.without_lease_s == 0.0, "it has not joined"
        each.join()
    assert one.propose_world(WORLD, None)
    store.now_s += BACK_S  # since they joined
    assert (set(one.read_records().nodes), one.read_records().late) == ({"a", "b"}, frozenset())
    return one, other


def test_untaken_change_is_written_later(store: FakeStore, members: tuple[Membership, Membership]) -> None:
    one, other = members
    store.away = True
    with pytest.raises(DiscoveryError):
        one.update_node(finished=3)
    store.away = False
    assert other.read_records().nodes["a"].finished == -1
    one.read_records()
    assert other.read_records().nodes["a"].finished == 3


def test_first_node_back_waits_for_others(store: FakeStore, members: tuple[Membership, Membership]) -> None:
    one, other = members
    for lease in store.leases:
        lease.close()
    store.lapse("a", "b")
    store.now_s += 10.0
    assert one.without_lease_s == 10.0
    records = one.read_records()
    assert (set(records.nodes), records.late, one.without_lease_s) == ({"a", "b"}, {"b"}, 0.0)
    store.now_s += BACK_S - 0.1
    assert one.read_records().late == {"b"}, "b has not had the time to come back"
    store.now_s += 0.2
    assert (set(one.read_records().nodes), one.read_records().late) == ({"a"}, frozenset())
    other.read_records()
    assert set(one.read_records().nodes) == {"a", "b"}


def test_read_only_store_loses_nobody(store: FakeStore, members: tuple[Membership, Membership]) -> None:
    one, _ = members
    store.leases[0].late_at = store.now_s  # its own renewal was late as well
    store.lapse("b")
    assert one.read_records().late == {"b"}
    store.now_s += BACK_S - 0.1
    assert one.read_records().late == {"b"}
    store.now_s += 0.2
    assert set(one.read_records().nodes) == {"a"}


def test_lapsed_member_is_gone_at_once(store: FakeStore, members: tuple[Membership, Membership]) -> None:
    one, other = members
    store.lapse("b")
    assert (set(one.read_records().nodes), one.read_records().late) == ({"a"}, frozenset())
    other.delete_node("a")
    assert set(other.read_records().nodes) == {"b"}
    assert set(one.read_records().nodes) == {"a", "b"}, "who was taken for dead by mistake is back"


def test_lease_lived_when_it_was_asked(store: FakeStore, members: tuple[Membership, Membership]) -> None:
    """A process that is stopped behind the look at its lease does not count as having had it until it goes on."""

    def stop() -> bool:
        store.now_s += 0.5
        return False

    store.asked = stop
    assert members[0].without_lease_s == 0.5


def test_lost_job_is_believed_after_a_while(store: FakeStore, members: tuple[Membership, Membership]) -> None:
    """A store that has just started again may seem empty."""
    one, _ = members
    store.delete("jobs/job/world")
    for wait_s in (0.0, 7.9):
        store.now_s += wait_s
        with pytest.raises(DiscoveryError, match="does not know the job any more"):
            one.read_records()
    store.now_s += 0.2
    records = one.read_records()
    assert (records.version, records.world.message) == (None, "the store lost the job's record")


FAULT = "rank 1: RuntimeError: CUDA error: unspecified launch failure"


def test_excluded_host_stays_out(store: FakeStore) -> None:
    here, there = Exclusions(store, "job", "a"), Exclusions(store, "job", "b")
    broken = Exclusion("node-a", "rank 0: ECC", True, 7, 1.0)
    here.add(broken)
    assert (here.own_exclusion(), there.own_exclusion()) == (broken, None)
    assert Exclusions(store, "another", "a").own_exclusion() is None
    assert read_job(store, "job").exclusions == (broken,)
    here.remove()
    assert here.own_exclusion() is None


@pytest.mark.parametrize(
    ("step", "clear", "same"), [(7, False, True), (5, False, True), (8, False, False), (7, True, False)]
)
def test_fault_at_one_step_is_the_scripts(store: FakeStore, step: int, clear: bool, same: bool) -> None:
    here, there = Exclusions(store, "job", "a"), Exclusions(store, "job", "b")
    first = Exclusion("node-a", FAULT, clear, 7)
    here.add(first)
    assert here.find_same_elsewhere(first) is None, "its own record is not another host"
    found = there.find_same_elsewhere(Exclusion("node-b", FAULT, False, step))
    assert found == (first if same else None)
    there.remove_unclear()
    assert (here.own_exclusion() is None) is not clear


def test_host_key_is_of_a_boot_and_its_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    first = host_key()
    assert first == host_key(), "the same from process to process"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    assert host_key() != first


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"{}", b'{"node": 3, "reason": ""}', b'{"node": "a", "reason": "b", "at_s": ""}']
)
def test_odd_record_is_an_error(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="left out"):
        Exclusion.decode(data)


def test_readmit_lets_a_host_join_again(store: FakeStore, caplog: pytest.LogCaptureFixture) -> None:
    exclusions = Exclusions(store, "job", host_key())
    exclusions.add(Exclusion("node-a", FAULT))

    def left_out(*, readmit: bool) -> bool:
        spec = SimpleNamespace(job="job", readmit=readmit)
        return _is_excluded(
            cast(AgentContext, SimpleNamespace(store=store, spec=spec, id="node-b", shutdown=ShutdownState()))
        )

    assert left_out(readmit=False)
    assert f"leaves this host out ({FAULT})" in caplog.messages[-1]
    assert "`edl run --readmit`" in caplog.messages[-1]
    assert not left_out(readmit=True)
    assert not left_out(readmit=False), "it need be said once only"
