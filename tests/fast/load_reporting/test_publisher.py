"""Records come, follow the counters and go; and a Store that is away is nobody's concern."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from edl.discovery import open_store
from edl.discovery.common.renewal import RenewedLease
from edl.errors import DiscoveryError
from edl.load_reporting import LoadPublisher, LoadSource, ServiceLoad, read_service
from edl.load_reporting import publisher as module
from edl.settings import LoadSettings
from tests.waiting import DEADLINE_S, wait_until

QUICK = LoadSettings(interval_s=0.02, window_s=600.0, ttl_s=600.0)
"""A test may stand still for seconds: nothing lapses meanwhile, and a rate that was above 0 stays so."""
Publish = Callable[..., LoadPublisher]


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/store.sqlite"


class Counted:
    """Counters that a test sets."""

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
def publish(url: str, counted: Counted, caplog: pytest.LogCaptureFixture) -> Iterator[Publish]:
    """Starts publishers, which are closed at the end."""
    caplog.set_level(logging.INFO, "edl.load_reporting")
    started: list[LoadPublisher] = []

    def start(*sources: LoadSource, to: str = url) -> LoadPublisher:
        started.append(LoadPublisher(to, sources or [counted.source()], QUICK))
        return started[-1]

    yield start
    for publisher in started:
        publisher.close(DEADLINE_S)


def load(url: str, service: str = "s") -> ServiceLoad:
    with open_store(url) as store:
        return read_service(store, service)


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


def test_store_that_comes_back_is_used(
    publish: Publish, url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = tmp_path / "later"
    place.write_text("a file where the folder is to be")
    publish(to=f"sqlite:///{place}/store.sqlite")
    wait_until(lambda: "not published" in caplog.text)
    place.unlink()
    wait_until(place.exists)
    wait_until(lambda: load(f"sqlite:///{place}/store.sqlite").students)
    wait_until(lambda: "published again" in caplog.text)


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
    assert publisher._loop is not None
    assert not publisher._loop.wait_ended(0), "it waited for the store"
    answers.set()
    assert publisher._loop.wait_ended(DEADLINE_S)


@pytest.mark.parametrize("lose", [RenewedLease.close, RenewedLease.forfeit])
def test_lost_lease_is_taken_again(
    publish: Publish, url: str, counted: Counted, lose: Callable[[RenewedLease], None], caplog: pytest.LogCaptureFixture
) -> None:
    """Also where a process that stood still takes it for lost before the Store does, which has the records under it."""
    publisher = publish()
    wait_until(lambda: load(url).students)
    lease = publisher._lease
    assert isinstance(lease, RenewedLease)
    lose(lease)
    counted.rows = 1
    wait_until(lambda: publisher._lease is not lease)
    wait_until(lambda: [student.rows_asked for student in load(url).students] == [1])
    assert "not published" not in caplog.text


def test_process_without_threads_goes_on(
    publish: Publish, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        publisher = publish()
    publisher.publish_soon()
    publisher.close()
    assert "load is not published: can't start new thread" in caplog.text
