"""What `edl teachers --watch` says about two snapshots."""

from __future__ import annotations

from dataclasses import replace

from edl.cli._changes import Change, brief_meta, changes, printable
from edl.discovery import Instance, Snapshot
from edl.discovery.registry import Rejected

ONE = Instance("digits", "one", "10.0.0.1", 8500, model="resnet", capacity=2.0)
TWO = Instance("digits", "two", "10.0.0.2", 8500)


def snapshot(*instances: Instance, rejected: tuple[Rejected, ...] = (), stale: str = "") -> Snapshot:
    return Snapshot("digits", instances, rejected, stale)


def test_the_first_snapshot_is_all_joins() -> None:
    assert list(changes(None, snapshot(ONE, TWO))) == [
        Change("joined", "digits", "one", "10.0.0.1:8500, model resnet, capacity 2"),
        Change("joined", "digits", "two", "10.0.0.2:8500, capacity 1"),
    ]


def test_what_differs_is_said() -> None:
    after = replace(ONE, state="draining", capacity=1.0, meta={"gpu": "T4"}, tags=("a", "b"))
    (change,) = changes(snapshot(ONE), snapshot(after))
    assert change.kind == "changed"
    assert change.detail == "ready -> draining, capacity 2 -> 1, tags  -> a,b, meta  -> gpu=T4"
    assert list(changes(snapshot(ONE), snapshot(ONE))) == []
    found = list(changes(snapshot(ONE), snapshot(TWO)))
    assert [(change.kind, change.id) for change in found] == [("left", "one"), ("joined", "two")]
    assert printable("a\x1b[2Jb\rc\x07") == "a�[2Jb�c�", "escape sequences do not reach the terminal"
    assert brief_meta({"b": "2", "a": "1"}) == "a=1 b=2"
    assert len(brief_meta({"key": "x" * 500})) == 48


def test_missing_registry_is_said_once() -> None:
    """A registry that is away is said once, and again when it is back."""
    away = snapshot(ONE, stale="connection refused")
    assert list(changes(snapshot(ONE), away)) == [Change("stale", "digits", detail="connection refused")]
    assert list(changes(away, replace(away, stale="connection refused again"))) == []
    assert list(changes(away, snapshot(ONE))) == [Change("fresh", "digits")]


def test_nonsense_is_said_once() -> None:
    bad = snapshot(rejected=(Rejected("bad", "port -1"),))
    assert list(changes(snapshot(), bad)) == [Change("rejected", "digits", "bad", "port -1")]
    assert list(changes(bad, bad)) == []
