"""What real students and teachers publish: who waits for what, who is there, and who says nothing."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from edl.background import start_call
from edl.discovery import Instance, open_registry, open_store
from edl.discovery.store import Lease
from edl.distill import DistillReader, Options, Teachers
from edl.distill.pipeline.session import load_publishers
from edl.errors import ClosedError, DiscoveryError, SettingsError
from edl.load_reporting import LoadPublisher, LoadSource, ServiceLoad, read_service
from edl.load_reporting import publisher as module
from edl.settings import LoadSettings
from edl.testing import LocalTeacher
from edl_serving.registration import TeacherCounts, TeacherLoad
from tests.waiting import DEADLINE_S, wait_until

Rows = tuple[np.ndarray]


def lasting(patch: Callable[..., None]) -> None:
    """Give records an hour, so that what is gone sooner was removed, and their removal the time of a slow machine."""
    of = LoadSettings.of
    patch(LoadSettings, "of", lambda *args, **rest: replace(of(*args, **rest), ttl_s=3600.0))
    patch(LoadPublisher.close, "__defaults__", (DEADLINE_S,))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDL_LOAD_INTERVAL_S", "0.05")
    monkeypatch.setenv("EDL_LOAD_WINDOW_S", "0.5")
    lasting(monkeypatch.setattr)


@pytest.fixture
def url(url: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("EDL_DISCOVERY", url)
    return url


def load(url: str, service: str = "s") -> ServiceLoad:
    with open_store(url) as store:
        return read_service(store, service)


@contextmanager
def training(*services: str, source: Callable[[], Iterator[Rows]]) -> Iterator[None]:
    reader = DistillReader(["x"], ["y"], teachers=[Teachers(service) for service in services])
    reader.set_batch_generator(source)
    ended = start_call("edl-test", lambda: deque(reader(), maxlen=0))
    try:
        yield
    finally:
        reader.close()
    if not isinstance(ended.exception(DEADLINE_S), ClosedError | None):
        ended.result()


def endless() -> Iterator[Rows]:
    while True:
        os.sched_yield()
        yield (np.ones((8, 4), np.float32),)


def test_waits_are_told_apart(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """More teachers help a student that waits for labels, and not one whose own data is late. Waits count at once."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "my-run")
    ended = threading.Event()

    def late() -> Iterator[Rows]:
        ended.wait(DEADLINE_S)
        yield from ()

    with training("s", source=endless), training("t", source=late):
        wait_until(lambda: any(rate.wait_share > 0.9 for rate in load(url).students))
        (waiting,) = load(url).students
        assert (waiting.idle, waiting.demand, waiting.job) == (False, None, "my-run")
        wait_until(lambda: any(rate.source_wait_share > 0.9 for rate in load(url, "t").students))
        assert load(url, "t").students[0].wait_share < 0.1
        ended.set()
    assert load(url).students == load(url, "t").students == (), "who has ended leaves no record"


def test_students_and_teachers_are_seen(url: str) -> None:
    """Two readers of a process, of which one asks two services; and nothing that is nobody's business."""
    with LocalTeacher("echo", service="s", discovery=url) as teacher, open_registry(url) as registry:
        host, _, port = teacher.endpoint.rpartition(":")
        registry.register(Instance("t", "same", host, int(port)), 600.0)
        with training("s", "t", source=endless), training("s", source=endless):
            wait_until(lambda: len(load(url).students) == 2 and len(load(url, "t").students) == 1)
            wait_until(lambda: all(rate.rows_per_s > 0 for rate in (*load(url).students, *load(url, "t").students)))
            wait_until(lambda: load(url).teachers[0].rows_per_s)
            names = tuple(teacher.teacher for teacher in load(url).teachers)
            assert [student.teachers for student in load(url).students] == [names] * 2
            with open_store(url) as store:
                entries = store.list("load/")
            assert len({entry.key for entry in entries if "/students/" in entry.key}) == 3
            assert url.partition("///")[2].encode() not in b"".join(entry.value for entry in entries)
        assert load(url).students == load(url, "t").students == ()
        subprocess.run([sys.executable, "-c", _STUDENT, url], timeout=DEADLINE_S, check=True)
        assert load(url).students == (), "it neither closed its reader nor waited"
        teacher.terminate()
        wait_until(lambda: load(url).teachers == ())


_STUDENT = """
import numpy as np, sys
from tests.fast.load_reporting.test_published import endless, load, lasting
lasting(setattr)
from edl.distill import DistillReader
reader = DistillReader(["x"], ["y"], teachers="s")
for _ in reader.set_batch_generator(endless)():
    if load(sys.argv[1]).students:
        break
"""


def test_states_of_a_teacher_are_seen(url: str) -> None:
    counts = TeacherCounts(rows=5, compute_s=0.1, workers=2, queue_rows=3)
    teacher = TeacherLoad(url, "s", LoadSettings.of())
    wait_until(lambda: load(url).starting == 1)
    (starting,) = load(url).teachers
    assert (starting.state, starting.teacher, starting.rate) == ("starting", "", None)
    teacher.set_ready(Instance("s", "t0", "127.0.0.1", 8000, model="m", meta={"version": "3"}), lambda: counts)
    wait_until(lambda: load(url).live == 1)
    (ready,) = load(url).teachers
    assert (ready.id, ready.teacher, ready.endpoint) == (starting.id, "t0", "127.0.0.1:8000")
    assert (ready.model, ready.version, ready.workers, ready.queue_rows, ready.rows) == ("m", "3", 2, 3, 5)
    teacher.set_state("draining")
    wait_until(lambda: load(url).teachers[0].state == "draining")
    teacher.close()
    assert load(url).teachers == ()
    teacher = TeacherLoad(url, "s", LoadSettings.of())
    teacher.set_ready(Instance("s", "t0", "unix:/secret/socket", 0), lambda: counts)
    wait_until(lambda: load(url).live == 1)
    assert load(url).teachers[0].endpoint == "", "the path of a Unix socket says nothing to others"
    teacher.close()


def test_publishing_can_be_off(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert LoadSettings.of(environ={}).publish
    assert not LoadSettings.of(environ={"EDL_PUBLISH_LOAD": "0"}).publish
    assert LoadSettings.of(True, {"EDL_PUBLISH_LOAD": "0"}).publish
    with pytest.raises(SettingsError, match="no longer than the window"):
        LoadSettings.of(environ={"EDL_LOAD_INTERVAL_S": "60"})
    service, fixed = Teachers("s"), Teachers(endpoints=("127.0.0.1:1",))
    for group, publish in ((service, False), (fixed, True)):
        labeller = SimpleNamespace(request=SimpleNamespace(teachers=[group]))
        assert load_publishers(labeller, lambda: (0.0, 0.0), LoadSettings(publish=publish)) == []  # type: ignore[arg-type]
    asked: list[LoadSettings] = []
    monkeypatch.setattr("edl.distill.pipeline.session.load_publishers", lambda *args: asked.append(args[-1]) or [])
    reader = DistillReader(["x"], ["y"], teachers="s", options=Options(publish_load=False))
    with reader.set_batch_generator(lambda: iter(())):
        assert list(reader()) == []
    assert [settings.publish for settings in asked] == [False]
    TeacherLoad(url, "s", LoadSettings(publish=False)).close()
    assert not Path(url.removeprefix("sqlite://")).exists() or load(url).teachers == ()


QUICK = LoadSettings(interval_s=0.02, window_s=600.0, ttl_s=600.0)
"""A test may stand still for seconds: nothing lapses meanwhile, and a rate that was above 0 stays so."""
Publish = Callable[..., LoadPublisher]


class Counted:
    def __init__(self) -> None:
        self.rows = 0
        self.reads = 0

    def source(self, service: str = "s") -> LoadSource:
        return LoadSource(service, "students", self._read, lambda: {"job": "j\n", "teachers": ["t"]})

    def _read(self) -> dict[str, float]:
        self.reads += 1
        return {"rows_asked": self.rows, "wait_s": 0.0, "source_wait_s": 0.0}


@pytest.fixture
def counted() -> Counted:
    return Counted()


@pytest.fixture
def publish(url: str, counted: Counted, stack: ExitStack, caplog: pytest.LogCaptureFixture) -> Publish:
    caplog.set_level(logging.INFO, "edl.load_reporting")

    def start(*sources: LoadSource, to: str = url) -> LoadPublisher:
        publisher = LoadPublisher(to, sources or [counted.source()], QUICK)
        stack.callback(publisher.close, DEADLINE_S)
        return publisher

    return start


def test_record_follows_and_goes_at_once(publish: Publish, url: str, counted: Counted) -> None:
    """And nothing is written without a change."""
    publisher = publish(counted.source(), counted.source("other"))
    wait_until(lambda: load(url).students)
    with open_store(url) as store:
        before = wait_until(lambda: len(found := store.list("load/")) == 2 and found)
        reads = counted.reads
        wait_until(lambda: counted.reads >= reads + 8)  # two sources, each read before a write: three have had theirs
        assert store.list("load/") == before
    counted.rows = 100
    wait_until(lambda: load(url).rows_per_s > 0)
    (student,) = load(url).students
    assert student.job == "j\\n", "what does not print is escaped"
    assert load(url, "other").students[0].id != student.id
    publisher.close(DEADLINE_S)
    assert load(url).students == load(url, "other").students == ()
    publisher.close()


def test_close_does_not_wait_for_the_store(publish: Publish, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Store that does not answer holds nobody's end up."""
    asked, answers = threading.Event(), threading.Event()

    def open_slowly(url: str, timeout_s: float) -> None:
        asked.set()
        answers.wait(DEADLINE_S)
        raise DiscoveryError("the store is away")

    monkeypatch.setattr(module, "open_store", open_slowly)
    publisher = publish()
    assert asked.wait(DEADLINE_S)
    publisher.close(0.0)
    assert not publisher._loop.wait_ended(0), "it waited for the store"
    answers.set()
    assert publisher._loop.wait_ended(DEADLINE_S)


def test_lost_lease_is_taken_again(
    publish: Publish, url: str, counted: Counted, caplog: pytest.LogCaptureFixture
) -> None:
    """A process that stood still takes it for lost before the Store does, which has the records under it."""
    publisher = publish()
    wait_until(lambda: load(url).students)
    lease = publisher._lease
    assert isinstance(lease, Lease)
    lease.forfeit()
    counted.rows = 1
    wait_until(lambda: publisher._lease is not lease)
    wait_until(lambda: [student.rows_asked for student in load(url).students] == [1])
    assert "not published" not in caplog.text
