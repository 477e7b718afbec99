"""Events: written once, counted when they repeat, and never in a look's way."""

from __future__ import annotations

from typing import Any

import pytest

from edl.errors import AccessDeniedError, EDLError, KubernetesError, QuotaExceededError
from edl.kube.resource_types import ELASTIC_JOBS, EVENTS
from edl.master.kube.operator import events
from edl.master.kube.operator.events import EventRecorder
from edl.master.kube.plan import EventNote
from tests.fast.master.kube.operator.in_memory_api import InMemoryApi
from tests.waiting import wait_until

JOB = {"metadata": {"name": "digits", "namespace": "lab", "uid": "u-1", "resourceVersion": "7"}}
NOTE = EventNote("Warning", "WorkerFailed", "worker 0 failed", "digits-worker-0-0")


def only_event(api: InMemoryApi) -> dict[str, Any]:
    (name,) = api.names(EVENTS)
    return api.objects["events", "lab", name]


def test_repeated_event_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    api = InMemoryApi()
    recorder = EventRecorder(api)
    for _ in range(5):
        recorder.record(ELASTIC_JOBS, JOB, NOTE)
    wait_until(lambda: not recorder._waiting)
    assert only_event(api)["count"] == 1
    assert len(api.calls) == 1, "what repeats at once is not worth a write each"
    monkeypatch.setattr(events, "_QUIET_S", 0.0)
    recorder.record(ELASTIC_JOBS, JOB, NOTE)
    wait_until(lambda: not recorder._waiting)
    recorder.close()
    assert only_event(api)["count"] == 6
    after_restart = EventRecorder(api)
    after_restart.record(ELASTIC_JOBS, JOB, NOTE)
    after_restart.close()
    assert only_event(api)["count"] == 7


def test_events_wait_for_the_server() -> None:
    class Away(InMemoryApi):
        away = True
        refused = 0

        def create(self, *args: Any, **kwargs: Any) -> Any:
            if self.away:
                self.refused += 1
                raise KubernetesError("away")
            return super().create(*args, **kwargs)

    api = Away()
    recorder = EventRecorder(api)
    recorder.record(ELASTIC_JOBS, JOB, NOTE)
    recorder.record(ELASTIC_JOBS, JOB, EventNote("Normal", "Scaled", "1 to 2"))
    wait_until(lambda: api.refused, "an attempt")
    assert api.names(EVENTS) == []
    api.away = False
    wait_until(lambda: len(api.names(EVENTS)) == 2)
    assert len(api.made) == 2
    recorder.close()


@pytest.mark.parametrize(
    ("error", "said"),
    [(AccessDeniedError("create events: not allowed"), 1), (QuotaExceededError("exceeded quota: count/events"), 0)],
)
def test_refused_events_block_nothing(error: EDLError, said: int, caplog: pytest.LogCaptureFixture) -> None:
    class Refusing(InMemoryApi):
        def create(self, kind: Any, obj: Any, namespace: Any = None) -> Any:
            if "refused" in obj["message"]:
                raise error
            return super().create(kind, obj, namespace)

    api = Refusing()
    recorder = EventRecorder(api)
    for message in ("refused", "also refused", "the third"):
        recorder.record(ELASTIC_JOBS, JOB, EventNote("Normal", "Scaled", message))
    wait_until(lambda: not recorder._waiting)
    recorder.close()
    assert only_event(api)["message"] == "the third"
    assert caplog.text.count(str(error)) == said
