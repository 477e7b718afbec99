"""A registration that ran out is told apart from one that was taken back."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from edl.discovery import Registry, Snapshot
from tests.fast.discovery.conformance.backends import eventually, teacher
from tests.fast.discovery.conformance.processes import Member

Start = Callable[..., Member]


def lapsed(snapshot: Snapshot) -> list[str]:
    return [instance.id for instance in snapshot.lapsed]


def test_only_the_dead_are_lapsed(registry: Registry, service: str, member: Start) -> None:
    dead, left = member("register", service, "dead", "0.6"), member("register", service, "left", "60")
    assert [dead.hear(), left.hear()] == ["ready", "ready"]
    with registry.watch(service) as watch:
        history = [watch.get(10) or pytest.fail("nothing came")]
        while [entry.id for entry in history[-1].instances] != ["dead", "left"]:
            history.append(watch.get(10) or pytest.fail("they are not seen"))
        left.say("end")
        dead.kill()
        while not history[-1].lapsed or history[-1].instances:
            history.append(watch.get(20) or pytest.fail("nobody lapses"))
        assert all("left" not in lapsed(snapshot) for snapshot in history), "it took its registration back"
        assert lapsed(history[-1]) == ["dead"]
        assert eventually(lambda: registry.snapshot(service) == history[-1])
        assert service in registry.services(), "somebody may still answer there"


def test_who_registers_again_is_not_lapsed(registry: Registry, service: str, member: Start) -> None:
    process = member("register", service, "a", "0.6")
    assert process.hear() == "ready"
    process.kill()
    assert eventually(lambda: lapsed(registry.snapshot(service)) == ["a"])
    with registry.register(teacher(service, "a", 9001)):
        assert eventually(lambda: [entry.port for entry in registry.snapshot(service).instances] == [9001])
        assert not registry.snapshot(service).lapsed, "the one of that name is there"


def test_who_lapses_while_draining_has_left(registry: Registry, service: str, member: Start) -> None:
    process = member("register", service, "a", "0.6", "draining")
    assert process.hear() == "ready"
    assert eventually(lambda: registry.snapshot(service).instances)
    process.kill()
    assert eventually(lambda: not registry.snapshot(service).instances)
    assert not registry.snapshot(service).lapsed


def test_a_paused_process_lapses_and_is_back(registry: Registry, service: str, member: Start) -> None:
    process = member("register", service, "a", "0.6")
    assert process.hear() == "ready"
    assert eventually(lambda: registry.snapshot(service).instances)
    process.pause()
    assert eventually(lambda: lapsed(registry.snapshot(service)) == ["a"])
    process.resume()

    def is_back() -> bool:
        snapshot = registry.snapshot(service)
        return [entry.id for entry in snapshot.instances] == ["a"] and not snapshot.lapsed

    assert eventually(is_back)
