"""Threads that others wait for go on after an error that nobody foresaw."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from edl.discovery import open_registry
from edl.discovery.registry import Instance, Snapshot
from edl.distill.engine.teacher_watcher import TeacherWatcher
from edl.distill.teachers import Teachers

WAIT_S = 30.0


def test_teachers_are_followed_after_a_bug(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    url = f"sqlite:///{tmp_path}/discovery.sqlite"
    seen: list[Snapshot] = []
    failed, again = threading.Event(), threading.Event()

    def changed(snapshot: Snapshot) -> None:
        seen.append(snapshot)
        if snapshot.stale:
            failed.set()
        elif failed.is_set():
            again.set()
        elif snapshot.instances:
            raise KeyError("a bug")

    with open_registry(url) as registry, registry.register(Instance("s", "a", "127.0.0.1", 1), 60.0):
        following = TeacherWatcher(Teachers("s", discovery=url), changed)
        assert again.wait(WAIT_S), "the thread that follows the teachers is dead"
        following.close()
    (stale,) = [snapshot for snapshot in seen if snapshot.stale]
    assert [each.id for each in stale.instances] == ["a"], "a teacher that is there is not dropped meanwhile"
    assert any("not foreseen" in record.getMessage() for record in caplog.records)


def test_failing_registry_drops_no_teacher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from edl.errors import DiscoveryError

    url = f"sqlite:///{tmp_path}/discovery.sqlite"
    known, stale = threading.Event(), threading.Event()
    seen: list[Snapshot] = []

    def changed(snapshot: Snapshot) -> None:
        seen.append(snapshot)
        (stale if snapshot.stale else known).set()

    with open_registry(url) as registry, registry.register(Instance("s", "a", "127.0.0.1", 1), 60.0):
        following = TeacherWatcher(Teachers("s", discovery=url), changed)
        assert known.wait(WAIT_S)
        passed_on = following._pass_on

        def broken(get: Any) -> None:
            monkeypatch.setattr(following, "_pass_on", passed_on)
            raise DiscoveryError("cannot be reached")

        monkeypatch.setattr(following, "_pass_on", broken)
        watching = threading.Thread(target=following._follow, daemon=True)
        watching.start()
        assert stale.wait(WAIT_S)
        following.close()
        watching.join(WAIT_S)
    assert all(each.instances for each in seen), "the teachers last known stay while the registry does not answer"
