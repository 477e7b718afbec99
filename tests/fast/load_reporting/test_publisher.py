"""Records come, follow the counters and go; and a Store that is away is nobody's concern."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from edl.discovery import open_store
from edl.discovery.common.renewal import RenewedLease
from edl.errors import DiscoveryError
from edl.load_reporting import LoadPublisher, LoadSource, ServiceLoad, read_service
from edl.load_reporting import publisher as module
from edl.settings import LoadSettings

QUICK = LoadSettings(interval_s=0.05, window_s=60.0, ttl_s=60.0)
"""A test may stand still for seconds: nothing lapses meanwhile, and a rate that was above 0 stays so."""


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/store.sqlite"


class Counted:
    """Counters that a test sets."""

    def __init__(self, rows: int = 0) -> None:
        self.rows = rows
        self.reads = 0

    def source(self, service: str = "s") -> LoadSource:
        return LoadSource(service, "students", self._read, lambda: {"job": "j\n", "teachers": ["t"]})

    def _read(self) -> dict[str, float]:
        self.reads += 1
        return {"rows_asked": self.rows, "wait_s": 0.0, "source_wait_s": 0.0}


def until(condition: Callable[[], object], within_s: float = 90.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {within_s} s"
        time.sleep(0.02)


def load(url: str, service: str = "s") -> ServiceLoad:
    with open_store(url) as store:
        return read_service(store, service)


def test_record_follows_and_goes_at_once(url: str) -> None:
    counted = Counted()
    publisher = LoadPublisher(url, [counted.source(), counted.source("other")], QUICK)
    until(lambda: load(url).students)
    counted.rows = 100
    until(lambda: load(url).rows_per_s > 0)
    (student,) = load(url).students
    assert student.job == "j\\n", "what does not print is escaped"
    assert load(url, "other").students[0].id != student.id
    publisher.close()
    until(lambda: not load(url).students and not load(url, "other").students, QUICK.ttl_s / 2)
    publisher.close()


def test_nothing_is_written_without_a_change(url: str) -> None:
    counted = Counted()
    publisher = LoadPublisher(url, [counted.source()], QUICK)
    until(lambda: load(url).students)
    with open_store(url) as store:
        (before,) = store.list("load/")
        reads = counted.reads
        until(lambda: counted.reads >= reads + 4)  # each comes before a write: three have had theirs
        assert store.list("load/") == [before]
        counted.rows = 1
        until(lambda: store.list("load/")[0].version > before.version)
    publisher.close()


def test_idle_rate_after_a_restart(url: str) -> None:
    """Its first counters after a restart have nothing to compare with; the next ones, all alike, have."""
    counts: list[float | None] = [0.0]
    source = LoadSource(
        "s",
        "teachers",
        lambda: {"rows": counts[0], "compute_s": counts[0], "queue_rows": None},
        lambda: {"teacher": "t", "model": "m", "state": "ready", "workers": 1},
    )
    publisher = LoadPublisher(url, [source], QUICK)
    until(lambda: [teacher.rows_per_s for teacher in load(url).teachers] == [0.0])
    counts[0] = None
    until(lambda: [teacher.rows_per_s for teacher in load(url).teachers] == [None])
    counts[0] = 0.0
    until(lambda: [teacher.rows_per_s for teacher in load(url).teachers] == [0.0])
    publisher.close()


def test_short_life_publishes_nothing(url: str, tmp_path: Path) -> None:
    LoadPublisher(url, [Counted().source()], LoadSettings(interval_s=60.0, window_s=60.0)).close()
    assert not (tmp_path / "store.sqlite").exists()


def test_store_that_is_away_costs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """It is logged once."""
    with caplog.at_level(logging.INFO, "edl.load_reporting"):
        publisher = LoadPublisher("etcd://127.0.0.1:1", [Counted().source()], QUICK)
        until(lambda: publisher._backoff.failures > 1)
        publisher.close()
    assert len([entry for entry in caplog.records if "not published" in entry.getMessage()]) == 1


def test_close_does_not_wait_for_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Store that does not answer holds nobody's end up."""
    asked, answers = threading.Event(), threading.Event()

    def open_slowly(url: str, timeout_s: float) -> None:
        asked.set()
        answers.wait(90)
        raise DiscoveryError("the store is away")

    monkeypatch.setattr(module, "open_store", open_slowly)
    publisher = LoadPublisher("etcd://store.example:1", [Counted().source()], QUICK)
    assert asked.wait(90)
    publisher.close()
    assert publisher._loop is not None
    assert not publisher._loop.wait_ended(0), "it waited for the store"
    answers.set()
    assert publisher._loop.wait_ended(90)


def test_store_that_comes_back_is_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    place = tmp_path / "later"
    place.write_text("a file where the folder is to be")
    counted = Counted()
    url = f"sqlite:///{place}/store.sqlite"
    with caplog.at_level(logging.INFO, "edl.load_reporting"):
        publisher = LoadPublisher(url, [counted.source()], QUICK)
        until(lambda: "not published" in caplog.text)
        place.unlink()
        until(place.exists)
        until(lambda: load(url).students)
        until(lambda: "published again" in caplog.text)
    publisher.close()


def test_lost_lease_is_taken_again(url: str) -> None:
    counted = Counted()
    publisher = LoadPublisher(url, [counted.source()], QUICK)
    until(lambda: load(url).students)
    lease = publisher._lease
    assert lease is not None
    lease.close()
    counted.rows = 1
    until(lambda: load(url).students and publisher._lease is not lease)
    publisher.close()


def test_lease_the_store_keeps_is_given_up(url: str, caplog: pytest.LogCaptureFixture) -> None:
    """A process that stood still takes its lease for lost before the Store does: its records are under it yet."""
    counted = Counted()
    publisher = LoadPublisher(url, [counted.source()], QUICK)
    until(lambda: load(url).students)
    lease = publisher._lease
    assert isinstance(lease, RenewedLease)
    lease.forfeit()
    counted.rows = 1
    until(lambda: publisher._lease is not lease)
    until(lambda: [student.rows_asked for student in load(url).students] == [1], QUICK.ttl_s / 2)
    publisher.close()
    assert "not published" not in caplog.text


def test_wrong_url_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "edl.load_reporting"):
        publisher = LoadPublisher("nonsense://x", [Counted().source()], QUICK)
        until(lambda: publisher._backoff.failures > 1)
        publisher.close()
    assert caplog.text.count("not published") == 1


def test_process_without_threads_goes_on(
    url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "edl.load_reporting"):
        patch.setattr(threading.Thread, "start", start)
        publisher = LoadPublisher(url, [Counted().source()], QUICK)
    publisher.publish_soon()
    publisher.close()
    assert "load is not published: can't start new thread" in caplog.text


def test_forked_child_publishes_nothing(url: str) -> None:
    counted = Counted()
    publisher = LoadPublisher(url, [counted.source()], QUICK)
    until(lambda: load(url).students)
    child = os.fork()
    if not child:
        publisher.publish_soon()
        publisher.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    (student,) = load(url).students
    assert f"-{os.getpid()}-" in student.id
    counted.rows = 10
    until(lambda: load(url).rows_per_s > 0)
    publisher.close()


_PUBLISHES = """
import sys, time
from edl.load_reporting import LoadPublisher, LoadSource
from edl.settings import LoadSettings
read = lambda: {"rows_asked": time.monotonic(), "wait_s": 0.0, "source_wait_s": 0.0}
source = LoadSource("s", "students", read, lambda: {"job": "", "teachers": []})
LoadPublisher(sys.argv[1], [source], LoadSettings(interval_s=0.05, window_s=0.5, ttl_s=1.0))
time.sleep(600)
"""


def test_killed_process_is_soon_gone(url: str) -> None:
    process = subprocess.Popen([sys.executable, "-c", _PUBLISHES, url])
    try:
        until(lambda: load(url).students)
    finally:
        process.kill()
        process.wait()
    until(lambda: not load(url).students)
