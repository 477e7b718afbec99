"""Services as the page shows them, and what happened between two looks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edl.dashboard.state.schema import ServiceStatus, StudentStatus, TeacherStatus
from edl.dashboard.state.service_changes import find_changes
from edl.dashboard.state.services import ServiceReader
from edl.discovery import Instance, open_registry, open_store
from edl.discovery.registry import Snapshot


@pytest.mark.parametrize(("state", "cause"), [("draining", "drained"), ("ready", "closed"), ("starting", "killed")])
def test_teacher_that_left_has_a_cause(state: str, cause: str) -> None:
    before = ServiceStatus("s", (TeacherStatus("t", "", "", "", state),), ())
    (event,) = find_changes([before], [], 5.0)
    assert (event.kind, cause in event.cause) == ("leave", True)


def test_student_that_went_has_a_cause() -> None:
    before = ServiceStatus("s", (), (StudentStatus("r", ""),))
    (event,) = find_changes([before], [], 5.0)
    assert "killed or stood still for longer than its lease (10 s by default)" in event.cause


def test_lapsed_teacher_has_no_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"sqlite:///{tmp_path}/store.sqlite"
    teacher = {
        "v": 1, "id": "t-1", "teacher": "t1", "model": "m", "version": "1", "endpoint": "127.0.0.1:1",
        "state": "ready", "t": 20.0, "rows": 2000, "compute_s": 10.0, "workers": 1, "queue_rows": 3, "note": "",
        "since": {"t": 10.0, "rows": 1000, "compute_s": 5.0},
    }  # fmt: skip
    instance = Instance("s", "t1", "127.0.0.1", 1)
    with open_store(url) as store, open_registry(url) as registry:
        store.put("load/s/teachers/t-1", json.dumps(teacher).encode())
        for live in (True, False):
            found = {"instances": (instance,)} if live else {"lapsed": (instance,)}
            monkeypatch.setattr(registry, "services", lambda: ["s"])
            snapshot = Snapshot("s", **{"instances": (), "lapsed": (), **found})  # type: ignore[arg-type]
            monkeypatch.setattr(registry, "snapshot", lambda name, snapshot=snapshot: snapshot)
            ((service,), _, _) = ServiceReader(store, registry).read()
            (status,) = service.teachers
            assert (status.state, status.rows_per_s) == (("ready", 100.0) if live else ("lapsed", None))
            assert (status.compute_share is None, status.queue_rows) == ((False, 3) if live else (True, None))
