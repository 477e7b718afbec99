"""The ready file of a teacher whose registry takes long: it is not there while the teacher is not ready."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest

from edl.discovery import Instance
from edl.settings import Credentials, LoadSettings
from edl_serving.monitoring.probes import HealthProbes
from edl_serving.registration.ready_file import ReadyFile
from edl_serving.registration.reconciler import InstanceReconciler
from edl_serving.registration.settings import RegistrationSettings
from edl_serving.registration.teacher import TeacherRegistration

WAIT_S = 60.0
ENDS: dict[str, Callable[[TeacherRegistration], None]] = {
    "unhealthy": lambda registration: registration._on_health_change(False),
    "draining": lambda registration: registration.start_draining(),
}


@pytest.mark.parametrize("end", ENDS)
def test_late_registration_writes_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    """A registry that answers late shows an instance of a teacher that is not ready any more."""
    asked, answered = SimpleQueue[Instance | None](), threading.Event()
    publish = InstanceReconciler._publish

    def publish_late(reconciler: InstanceReconciler, desired: Instance | None) -> None:
        asked.put(desired)
        assert answered.wait(WAIT_S)
        publish(reconciler, desired)

    monkeypatch.setattr(InstanceReconciler, "_publish", publish_late)
    url = f"sqlite:///{tmp_path}/discovery.sqlite"
    settings = RegistrationSettings("s", url, load=LoadSettings(publish=False))
    path = tmp_path / "ready"
    with ReadyFile(str(path)) as file, TeacherRegistration(settings, "127.0.0.1", 0.0, file) as registration:
        registration._instance = instance = settings.instance("127.0.0.1", 1, "m", {})
        reconciler = registration._reconciler
        assert reconciler is not None
        reconciler.set_desired(instance)
        assert asked.get(timeout=WAIT_S) == instance
        ENDS[end](registration)
        answered.set()
        assert asked.get(timeout=WAIT_S) != instance, "the next change comes when the first one is done"
        assert not path.exists(), "it says that the teacher is ready"
        if end == "unhealthy":
            registration._on_health_change(True)
            assert asked.get(timeout=WAIT_S) == instance
            assert reconciler.wait_until_current(WAIT_S)
            assert path.exists()


@pytest.mark.parametrize("in_discovery", [True, False])
def test_ready_file_follows_readyz(tmp_path: Path, in_discovery: bool) -> None:
    """Who waits for the file finds `/readyz` passed, though `register` has not returned yet."""
    probes, found = HealthProbes(), SimpleQueue[Any]()
    probes.add_check("/readyz", "discovery", lambda: "not registered yet")  # of `serve`, which waits for `register`

    class ObservedFile(ReadyFile):
        def write(self, content: Mapping[str, Any]) -> None:
            found.put(probes.answer("/readyz"))
            super().write(content)

    server: Any = SimpleNamespace(
        port=1,
        metrics_port=None,
        load=lambda: (),
        metrics=SimpleNamespace(probes=probes, add_gauge=lambda *_: None),
        model=SimpleNamespace(instance_meta={}),
        settings=SimpleNamespace(model="m", drain_timeout_s=1.0, uds=None, credentials=Credentials()),
        watch_ready=lambda callback: None,
    )
    url = f"sqlite:///{tmp_path}/discovery.sqlite" if in_discovery else None
    settings = RegistrationSettings("s", url, load=LoadSettings(publish=False))
    with (
        ObservedFile(str(tmp_path / "ready")) as file,
        TeacherRegistration(settings, "127.0.0.1", 0.0, file) as teacher,
    ):
        teacher.register(server)
        passed, lines = found.get(timeout=WAIT_S)
    assert passed, lines
