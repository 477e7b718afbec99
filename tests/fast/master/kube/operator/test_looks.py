"""What makes the operator look at a resource, the queue of such looks, and the events that they write: each once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from edl.errors import (
    AccessDeniedError,
    ConflictError,
    EDLError,
    InvalidObjectError,
    KubernetesError,
    QuotaExceededError,
)
from edl.kube.objects import Object
from edl.kube.resource_types import ELASTIC_JOBS, EVENTS, PODS
from edl.kube.responses import NotServedError
from edl.master.kube.observation import EventNote
from edl.master.kube.operator import looks as looks_module
from edl.master.kube.operator.events import EventRecorder
from edl.master.kube.operator.looks import ResourceWatches, WorkQueue
from edl.master.kube.operator.monitoring import OperatorHealth
from tests.fast.master.kube.operator.in_memory_api import InMemoryApi
from tests.waiting import wait_until

JOB = {"metadata": {"name": "digits", "namespace": "lab", "uid": "u-1", "resourceVersion": "7"}}
NOTE = EventNote("Warning", "WorkerFailed", "worker 0 failed", "digits-worker-0-0")


def only_event(api: InMemoryApi) -> dict[str, Any]:
    (name,) = api.names(EVENTS)
    return api.objects["events", "lab", name]


def test_repeated_event_is_counted() -> None:
    api: Any = InMemoryApi()
    for _ in range(2):  # the second recorder is that of an operator that was started again
        recorder = EventRecorder(api)
        for _ in range(2):
            recorder.record(ELASTIC_JOBS, JOB, NOTE)
        recorder.close()
    assert only_event(api)["count"] == 4


def test_events_wait_for_the_server() -> None:
    class Away(InMemoryApi):
        away = True
        refused = 0

        def create(self, *args: Any, **kwargs: Any) -> Any:
            if self.away:
                self.refused += 1
                raise KubernetesError("away")
            return super().create(*args, **kwargs)

    api: Any = Away()
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

    api: Any = Refusing()
    recorder = EventRecorder(api)
    for message in ("refused", "also refused", "the third"):
        recorder.record(ELASTIC_JOBS, JOB, EventNote("Normal", "Scaled", message))
    wait_until(lambda: not recorder._waiting)
    recorder.close()
    assert only_event(api)["message"] == "the third"
    assert caplog.text.count(str(error)) == said


JOB_KEYS = ["elasticjobs/lab/a", "elasticjobs/lab/b"]


class GivenWatch:
    """A watch whose events a test hands over itself."""

    def __init__(self, *args: object, on_change: Callable[[str, Object | None], None], label_selector: str) -> None:
        self.tell = on_change
        self.objects: dict[str, Object] = {}
        self.error: EDLError | None = None
        self.listed = False

    @property
    def stale(self) -> str:
        return str(self.error or "")

    def list(self, *listed: Object) -> None:
        self.objects = {obj["metadata"]["name"]: obj for obj in listed}
        self.error, self.listed = None, True
        self.tell("LISTED", None)

    def close(self) -> None:
        """Nothing goes on."""


class Looks:
    """Watches of jobs and pods in `lab`, and the looks that they ask for. `own` is the operator's own status."""

    def __init__(self) -> None:
        self.keys: list[str] = []
        self.own: Object = {}
        self.health = OperatorHealth(lambda: 0.0)
        nothing: Any = None
        self.watches = ResourceWatches(
            nothing,
            [ELASTIC_JOBS],
            ["lab"],
            lambda key, delay_s: self.keys.append(key),
            lambda key, status: status == self.own,
            self.health,
        )
        self.jobs, self.pods = (self.watches._watches[kind, "lab"] for kind in (ELASTIC_JOBS, PODS))

    def taken(self) -> list[str]:
        """Return what was to be looked at since the last call."""
        found, self.keys[:] = sorted(set(self.keys)), []
        return found

    def wait(self, *keys: str) -> None:
        wait_until(lambda: set(keys) <= set(self.keys), f"looks at {keys}, not {self.keys}")
        assert self.taken() == sorted(keys)


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(looks_module, "KubeWatch", GivenWatch)
    found = Looks()
    yield found
    found.watches.close()


def job(name: str, **status: Any) -> Object:
    metadata = {"name": name, "namespace": "lab", "uid": f"u-{name}", "generation": 1}
    return {"metadata": metadata, "status": status}


def pod(name: str) -> Object:
    return {"metadata": {"name": f"{name}-worker-0-0", "namespace": "lab", "labels": {"edl.io/job": name}}}


def test_own_status_asks_for_no_look(looks: Any) -> None:
    looks.jobs.list(job("a"))
    looks.wait(JOB_KEYS[0])
    looks.own = {"phase": "Running"}
    looks.jobs.tell("MODIFIED", job("a", phase="Running"))
    assert looks.taken() == []
    looks.jobs.tell("MODIFIED", job("a", phase="Succeeded"))
    assert looks.taken() == [JOB_KEYS[0]], "somebody else has written it"
    edited = job("a", phase="Running")
    edited["metadata"]["generation"] = 2
    looks.jobs.tell("MODIFIED", edited)
    looks.jobs.tell("DELETED", edited)
    assert looks.keys == [JOB_KEYS[0]] * 2


def test_pods_have_their_job_looked_at(looks: Any) -> None:
    for change in ("ADDED", "MODIFIED", "DELETED"):
        looks.pods.tell(change, pod("a"))
        assert looks.taken() == [JOB_KEYS[0]]


def test_what_went_between_lists(looks: Any) -> None:
    """It is not in the new list, and nothing else tells so."""
    looks.jobs.list(job("a"), job("b"))
    looks.wait(*JOB_KEYS)
    looks.jobs.list(job("a"))
    looks.wait(*JOB_KEYS)
    looks.jobs.tell("ADDED", job("b"))
    looks.taken()
    looks.pods.list(pod("c"))
    looks.wait(*JOB_KEYS, "elasticjobs/lab/c")


def test_what_the_watches_wait_for(looks: Any, caplog: pytest.LogCaptureFixture) -> None:
    def settle(error: EDLError | None) -> str:
        looks.pods.error = error
        looks.watches._step()
        return str(looks.health.check_ready())

    looks.jobs.list()
    assert settle(None) == "the watches have not started"
    looks.pods.list()
    assert settle(None) == ""
    assert settle(KubernetesError("away")) == "", "which requests tell, once it lasts"
    looks.jobs.error = NotServedError("not found")
    assert "elasticjobs.edl.io/v1alpha1: install the CRD" in settle(None)
    looks.jobs.error = None
    assert settle(AccessDeniedError("list pods: not allowed")) == "list pods: not allowed"
    assert settle(None) == ""


KEYS = st.sampled_from("abcd")


class ScheduleMachine(RuleBasedStateMachine):
    """Against a model: key -> earliest time that was asked for since it was last taken."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.queue = WorkQueue(lambda key: None, workers=0, backoff_s=(1.0, 8.0), clock=lambda: self.now_s)
        self.wanted: dict[str, float] = {}
        self.active: set[str] = set()

    @rule(key=KEYS, delay_s=st.floats(0, 20))
    def add(self, key: str, delay_s: float) -> None:
        self.queue.add(key, delay_s)
        self.wanted[key] = min(self.wanted.get(key, float("inf")), self.now_s + delay_s)

    @rule(seconds=st.floats(0, 10))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @rule()
    def take(self) -> None:
        due = {key: at_s for key, at_s in self.wanted.items() if key not in self.active and at_s <= self.now_s}
        key = self.queue.take()
        assert (key is None) == (not due), f"{key} is given out, due are {due}"
        if key is not None:
            assert due[key] == min(due.values()), f"{key} is not the first of {due}"
            self.active.add(key)
            del self.wanted[key]

    @rule(failed=st.booleans(), requeue_s=st.none() | st.floats(0, 30))
    def finish(self, failed: bool, requeue_s: float | None) -> None:
        if not self.active:
            return
        key = min(self.active)
        self.active.discard(key)
        self.queue.finish(key, failed=failed, requeue_s=requeue_s)
        if requeue_s is not None:
            self.wanted[key] = min(self.wanted.get(key, float("inf")), self.now_s + requeue_s)
        if failed:  # the wait has chance in it: what the schedule says is checked for its bounds, and taken over
            due_s = self.queue._due[key]
            assert due_s <= min(self.wanted.get(key, float("inf")), self.now_s + 8.0)
            assert due_s >= min(self.wanted.get(key, float("inf")), self.now_s + 0.8)
            self.wanted[key] = due_s

    @invariant()
    def counts(self) -> None:
        assert len(self.queue) == len(self.wanted.keys() | self.active)


ScheduleMachine.TestCase.settings = settings(max_examples=25, stateful_step_count=30)
TestSchedule = ScheduleMachine.TestCase


def test_errors_are_repeated_and_reported() -> None:
    """A bug for a key stops no other, and no error ends a worker."""
    results: list[tuple[str, str]] = []
    errors = [KubernetesError("away"), ConflictError("changed")]

    def work(key: str) -> float | None:
        if key == "bug":
            raise ZeroDivisionError
        if errors:
            raise errors.pop(0)
        return None

    def note(key: str, seconds: float, error: Exception | None) -> None:
        results.append((key, type(error).__name__))

    queue = WorkQueue(work, workers=2, on_result=note, backoff_s=(0.01, 0.02))
    try:
        queue.add("a")
        wait_until(lambda: len(results) == 3, "success")
        assert [name for _, name in results] == ["KubernetesError", "ConflictError", "NoneType"]
        queue.add("bug")
        wait_until(lambda: ("bug", "ZeroDivisionError") in results, "the bug")
        queue.add("b")
        wait_until(lambda: ("b", "NoneType") in results, "another key")
        assert len(queue) == 1, "the bad key is tried again"
    finally:
        queue.close()


def test_same_refusal_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    ends: list[str] = []
    texts = ["no, 1", "no, 1", "no, 1", "no, 2", "", "no, 2"]

    def work(key: str) -> float | None:
        if text := texts[len(ends) % len(texts)]:
            raise InvalidObjectError(text)
        return 0.0

    queue = WorkQueue(
        work, workers=1, on_result=lambda key, seconds, error: ends.append(str(error)), backoff_s=(0.001, 0.001)
    )
    try:
        queue.add("a")
        wait_until(lambda: len(ends) >= 6, "all of them")
    finally:
        queue.close()
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert said[:3] == ["a: no, 1", "a: no, 2", "a: no, 2"]
