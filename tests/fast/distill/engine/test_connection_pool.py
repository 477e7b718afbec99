"""Which teachers a student keeps, as discovery says that they come, lapse, are forgotten, drain and leave."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, cast

import pytest

from edl.discovery.registry import Instance, Snapshot
from edl.distill.dispatch.dispatcher import Dispatcher
from edl.distill.dispatch.policy import Policy
from edl.distill.engine.connection import TeacherConnection
from edl.distill.engine.connection_pool import ConnectionPool


@dataclass
class FakeConnection:
    """In place of a connection: up for as long as `spec` is not None."""

    instance: Instance
    spec: object | None = None
    lapsed: bool = False
    state: str = "connecting"
    why: str = "refused"


class World:
    """`ConnectionPool` over fakes."""

    def __init__(self) -> None:
        self.made: list[FakeConnection] = []
        self.on_dropped: list[TeacherConnection] = []
        self.dispatcher = Dispatcher(Policy())
        self.pool = ConnectionPool("s", self.dispatcher, self._connect, self.on_dropped.append, self._spawn)

    def see(self, *ready: str, lapsed: str = "", revoked: str = "", draining: str = "", port: int = 1) -> None:
        """A new snapshot, of teachers with one letter each."""
        instances = [_teacher(name, port) for name in ready]
        instances += [_teacher(name, port, "draining") for name in draining]
        gone = tuple(_teacher(name, port) for name in lapsed)
        self.pool.apply_snapshot(Snapshot("s", tuple(instances), lapsed=gone, revoked=frozenset(revoked)))

    def up(self, name: str) -> FakeConnection:
        """The teacher of that name is connected."""
        connection = self.connection(name)
        assert connection is not None
        connection.spec, connection.state, connection.why = object(), "ready", ""
        self.dispatcher.teacher_up(name, 0.0)
        return connection

    def down(self, name: str) -> None:
        """Its connection breaks."""
        connection = self.connection(name)
        assert connection is not None
        connection.spec, connection.state, connection.why = None, "connecting", "reset"
        self.pool.connection_lost(cast(TeacherConnection, connection))

    def connection(self, name: str) -> FakeConnection | None:
        return cast("FakeConnection | None", self.pool.connections.get(name))

    @property
    def is_usable(self) -> str:
        """Teachers that the dispatcher would give work."""
        return "".join(sorted(name for name, state in self.dispatcher.teachers.items() if state.is_usable(1.0)))

    def _connect(self, instance: Instance) -> TeacherConnection:
        self.made.append(FakeConnection(instance))
        return cast(TeacherConnection, self.made[-1])

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        coroutine.close()
        task: asyncio.Future[None] = asyncio.Future(loop=asyncio.new_event_loop())
        task.get_loop().close()
        return cast("asyncio.Task[None]", task)


def _teacher(name: str, port: int, state: Any = "ready") -> Instance:
    return Instance("s", name, "h", port, state=state)


@pytest.fixture
def world() -> World:
    world = World()
    world.see("a", "b")
    world.up("a")
    world.up("b")
    return world


def test_one_that_the_registry_forgot_stays(world: World) -> None:
    world.see("b", lapsed="a")
    world.see("b")
    assert world.is_usable == "ab", "Consul forgets in a minute what it cannot be told"
    world.see("b", "a")
    assert world.is_usable == "ab"
    world.see("b")
    assert world.is_usable == "b", "registered again, it left on purpose"


def test_forgotten_teacher_loses_connection(world: World) -> None:
    world.see("b", lapsed="a")
    world.see("b")
    world.down("a")
    assert world.is_usable == "b"
    assert world.connection("a") is None
    assert world.on_dropped


def test_renewed_teacher_is_tried_at_once(world: World) -> None:
    world.see("b", lapsed="a")
    world.down("a")
    world.see("a", "b")
    assert len(world.made) == 3, "not when the long pause of a lapsed one is over"
    connection = world.connection("a")
    assert connection is not None
    assert not connection.lapsed


def test_drain_and_revocation_end_lapsed(world: World) -> None:
    world.see(lapsed="ab")
    world.see(draining="a", revoked="b")
    assert world.is_usable == ""
    world.see(lapsed="a")
    assert world.is_usable == "", "it said that it drains"


def test_one_that_moved_is_connected_anew(world: World) -> None:
    world.see(lapsed="ab", port=2)
    assert world.is_usable == ""
    assert [connection.instance.port for connection in world.made] == [1, 1, 2, 2]
