"""Events: written once, counted when they repeat, and never in a look's way."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from edl.errors import AccessDeniedError, KubernetesError, QuotaExceededError
from edl.kube.resource_types import ELASTIC_JOBS, EVENTS
from edl.master.kube.operator import events
from edl.master.kube.operator.events import EventRecorder
from edl.master.kube.plan import EventNote
from tests.fast.master.kube.operator.in_memory_api import InMemoryApi

JOB = {"metadata": {"name": "digits", "namespace": "lab", "uid": "u-1", "resourceVersion": "7"}}
NOTE = EventNote("Warning", "WorkerFailed", "worker 0 failed", "digits-worker-0-0")


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def only_event(api: InMemoryApi) -> dict[str, Any]:
    (name,) = api.names(EVENTS)
    return api.objects["events", "lab", name]


def test_event_as_kubectl_shows_it() -> None:
    api = InMemoryApi()
    recorder = EventRecorder(api)
    recorder.record(ELASTIC_JOBS, JOB, NOTE)
    recorder.close()
    event = only_event(api)
    assert event["involvedObject"] == {
        "apiVersion": "edl.io/v1alpha1",
        "kind": "ElasticJob",
        "name": "digits",
        "namespace": "lab",
        "uid": "u-1",
        "resourceVersion": "7",
    }
    assert (event["type"], event["reason"], event["message"], event["count"]) == (
        *("Warning", "WorkerFailed"),
        NOTE.message,
        1,
    )
    assert event["related"]["name"] == NOTE.pod


def test_events_have_the_servers_time() -> None:
    """Conditions and pods do: another clock's times would tell the story out of order."""
    api = InMemoryApi()
    recorder = EventRecorder(api, lambda: 1_000_000_000.0)
    recorder.record(ELASTIC_JOBS, JOB, NOTE)
    recorder.close()
    assert only_event(api)["firstTimestamp"] == "2001-09-09T01:46:40Z"


def test_repeated_event_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    api = InMemoryApi()
    recorder = EventRecorder(api)
    for _ in range(5):
        recorder.record(ELASTIC_JOBS, JOB, NOTE)
    wait_for(lambda: not recorder._waiting)
    assert only_event(api)["count"] == 1
    assert len(api.calls) == 1, "what repeats at once is not worth a write each"
    monkeypatch.setattr(events, "_QUIET_S", 0.0)
    recorder.record(ELASTIC_JOBS, JOB, NOTE)
    wait_for(lambda: not recorder._waiting)
    recorder.close()
    assert only_event(api)["count"] == 6
    after_restart = EventRecorder(api)
    after_restart.record(ELASTIC_JOBS, JOB, NOTE)
    after_restart.close()
    assert only_event(api)["count"] == 7


def test_events_wait_for_the_server() -> None:
    class Away(InMemoryApi):
        away = True

        def create(self, *args: Any, **kwargs: Any) -> Any:
            if self.away:
                raise KubernetesError("away")
            return super().create(*args, **kwargs)

    api = Away()
    recorder = EventRecorder(api)
    recorder.record(ELASTIC_JOBS, JOB, NOTE)
    recorder.record(ELASTIC_JOBS, JOB, EventNote("Normal", "Scaled", "1 to 2"))
    time.sleep(0.1)
    assert api.names(EVENTS) == []
    api.away = False
    wait_for(lambda: len(api.names(EVENTS)) == 2)
    assert len(api.made) == 2
    recorder.close()


def test_operator_that_may_not_write_events(caplog: pytest.LogCaptureFixture) -> None:
    class Denied(InMemoryApi):
        def create(self, *args: Any, **kwargs: Any) -> Any:
            raise AccessDeniedError("create events: not allowed")

    recorder = EventRecorder(Denied())
    for number in range(3):
        recorder.record(ELASTIC_JOBS, JOB, EventNote("Normal", "Scaled", str(number)))
    wait_for(lambda: not recorder._waiting)
    recorder.close()
    assert caplog.text.count("not allowed") == 1


def test_quota_on_events_blocks_nothing() -> None:
    class Full(InMemoryApi):
        def create(self, kind: Any, obj: Any, namespace: Any = None) -> Any:
            if "first" in obj["message"]:
                raise QuotaExceededError("exceeded quota: count/events")
            return super().create(kind, obj, namespace)

    api = Full()
    recorder = EventRecorder(api)
    for message in ("the first", "the second"):
        recorder.record(ELASTIC_JOBS, JOB, EventNote("Normal", "Scaled", message))
    wait_for(lambda: not recorder._waiting)
    recorder.close()
    assert only_event(api)["message"] == "the second"
