"""What real students and teachers publish: who waits for what, who is idle, and who says nothing."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edl.discovery import open_store
from edl.distill import DistillReader, Options, Teachers
from edl.errors import ClosedError
from edl.load_reporting import LoadPublisher, ServiceLoad, StudentRate, read_service, read_services
from edl.settings import LoadSettings
from edl.testing import LocalTeacher


def lasting(patch: Callable[..., None]) -> None:
    """Give records an hour, so that what is gone sooner was removed, and their removal the time of a slow machine."""
    of = LoadSettings.of
    patch(LoadSettings, "of", lambda *args: replace(of(*args), ttl_s=3600.0))
    patch(LoadPublisher.close, "__defaults__", (90.0,))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDL_LOAD_INTERVAL_S", "0.1")
    monkeypatch.setenv("EDL_LOAD_WINDOW_S", "1")
    lasting(monkeypatch.setattr)


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    url = f"sqlite:///{tmp_path}/discovery.sqlite"
    monkeypatch.setenv("EDL_DISCOVERY", url)
    return url


def load(url: str, service: str = "s") -> ServiceLoad:
    with open_store(url) as store:
        return read_service(store, service)


def until(holds: Callable[[], Any], within_s: float = 100.0) -> Any:
    deadline = time.monotonic() + within_s
    while not (found := holds()):
        assert time.monotonic() < deadline, f"not within {within_s} s"
        time.sleep(0.05)
    return found


class Training:
    """Takes batches in a thread, until it is closed."""

    def __init__(self, reader: DistillReader, step_s: float = 0.0, source_s: float = 0.0) -> None:
        self._source_s = source_s
        self._step_s = step_s
        self.reader = reader.set_batch_generator(self._batches)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._train)
        self._thread.start()

    def _batches(self) -> Iterator[tuple[np.ndarray]]:
        while True:
            time.sleep(self._source_s)
            yield (np.ones((8, 4), np.float32),)

    def _train(self) -> None:
        with contextlib.suppress(ClosedError):
            for _ in self.reader():
                if self._ended.wait(self._step_s):
                    return

    def __enter__(self) -> Training:
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self.reader.close()
        self._thread.join(60)


def reader_of(*services: str, **options: Any) -> DistillReader:
    groups = [Teachers(service) for service in services]
    return DistillReader(["x"], ["y"], teachers=groups, options=Options(**options))


def student(url: str, holds: Callable[[StudentRate], bool], service: str = "s") -> StudentRate:
    def found() -> StudentRate | None:
        return next((rate for rate in load(url, service).students if rate.seconds > 0.8 and holds(rate)), None)

    return until(found)  # type: ignore[no-any-return]


def test_waits_are_told_apart(url: str) -> None:
    """More teachers help a student that waits for labels, and not a student whose own data is late."""
    teacher = LocalTeacher("echo", service="s", discovery=url, delay_s=0.1, max_batch=8)
    with teacher, Training(reader_of("s"), step_s=0.02):
        slow = student(
            url,
            lambda rate: (
                rate.wait_share > 0.6
                and rate.source_wait_share < 0.1
                and rate.demand is not None
                and rate.demand > 2 * rate.rows_per_s
            ),
        )
        assert slow.teachers == tuple(teacher.teacher for teacher in load(url).teachers)
    with LocalTeacher("echo", service="t", discovery=url), Training(reader_of("t"), step_s=0.01, source_s=0.3):
        student(
            url,
            lambda rate: (
                rate.source_wait_share > 0.5
                and rate.wait_share < 0.3
                and rate.demand is not None
                and rate.demand < 1.5 * rate.rows_per_s
            ),
            "t",
        )
    until(lambda: not load(url).students and not load(url, "t").students)


def test_first_teacher_is_waited_for(url: str) -> None:
    """A wait counts while it lasts: a student without teachers is not idle."""
    with Training(reader_of("s")):
        waiting = student(url, lambda rate: rate.wait_share > 0.9)
        assert (waiting.idle, waiting.demand) == (False, None)
        with LocalTeacher("echo", service="s", discovery=url, delay_s=0.01):
            assert student(url, lambda rate: bool(rate.demand)).teachers


def test_readers_and_services_are_apart(url: str) -> None:
    """Two readers of a process, of which one asks two services."""
    with (
        LocalTeacher("echo", service="s", discovery=url),
        LocalTeacher("echo", service="t", discovery=url),
        Training(reader_of("s", "t"), step_s=0.02),
        Training(reader_of("s"), step_s=0.02),
    ):
        until(lambda: len(load(url).students) == 2 and len(load(url, "t").students) == 1)
        student(url, lambda rate: rate.rows_per_s > 0, "t")
        with open_store(url) as store:
            keys = [entry.key for entry in store.list("load/") if "/students/" in entry.key]
            assert len(set(keys)) == 3
            values = b"".join(entry.value for entry in store.list("load/"))
            assert url.partition("///")[2].encode() not in values, "no path of a file"
    until(lambda: not load(url).students and not load(url, "t").students)


def test_job_is_named(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "my-run")
    with Training(reader_of("s")):
        assert student(url, lambda rate: True).job == "my-run"


@pytest.mark.parametrize("how", ["option", "environment", "endpoints"])
def test_publishing_can_be_off(url: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if how == "environment":
        monkeypatch.setenv("EDL_PUBLISH_LOAD", "0")
    serve = {"publish-load": False} if how == "option" else {}
    with LocalTeacher("echo", service="s", discovery=url, serve=serve) as teacher:
        if how == "endpoints":
            monkeypatch.setenv("EDL_PUBLISH_LOAD", "1")
            reader = DistillReader(["x"], ["y"], teachers=[teacher.endpoint])
        else:
            reader = reader_of("s", publish_load=False if how == "option" else None)
        with Training(reader, step_s=0.02) as training:
            until(lambda: training.reader.stats().rows_received > 100)
            assert training.reader._session is not None
            assert training.reader._session._load_publishers == []
            with open_store(url) as store:
                found = read_services(store).get("s", ServiceLoad("s"))
                assert found.students == ()
                assert how == "endpoints" or found.teachers == ()


_WAITS = """
import pathlib, time
from edl.testing.models import Model
def build(folder):
    folder = pathlib.Path(folder)
    def answer(inputs):
        while (folder / "hold").exists():
            (folder / "computing").touch()
            time.sleep(0.02)
        return {"y": inputs["x"]}
    while not (folder / "load").exists():
        time.sleep(0.02)
    return Model(answer, ["x:float32[4]"], ["y:float32[4]"], delay_s=0.001)
"""


def test_states_of_a_teacher_are_seen(url: str, tmp_path: Path) -> None:
    """It starts, is ready, drains while a request is computed, and is gone."""
    (tmp_path / "slow.py").write_text(_WAITS)
    serve = {"drain-timeout": "100s", "ttl": "60s"}
    with LocalTeacher(
        f"{tmp_path}/slow.py:build", service="s", discovery=url, wait=False, serve=serve, folder=str(tmp_path)
    ) as it:
        assert until(lambda: load(url).starting) == 1
        (starting,) = load(url).teachers
        assert (starting.state, starting.teacher, starting.rate) == ("starting", "", None)
        (tmp_path / "load").touch()
        it.wait_ready()
        until(lambda: load(url).live == 1)
        (ready,) = load(url).teachers
        assert (ready.id, ready.teacher != "", ready.endpoint) == (starting.id, True, it.endpoint)
        (tmp_path / "hold").touch()
        with Training(reader_of("s")):
            until((tmp_path / "computing").exists)
            it.terminate()
            until(lambda: [teacher.state for teacher in load(url).teachers] == ["draining"])
            (tmp_path / "hold").unlink()
            until(lambda: load(url).teachers == ())


_STUDENT = """
import numpy as np, sys, time
from tests.fast.load_reporting.test_reader_load import lasting
lasting(setattr)
from edl.distill import DistillReader
reader = DistillReader(["x"], ["y"], teachers="s")
reader.set_batch_generator(lambda: ((np.ones((8, 4), np.float32),) for _ in iter(int, 1)))
for _ in reader():
    time.sleep(0.02)
    if sys.stdin in __import__("select").select([sys.stdin], [], [], 0)[0]:
        break
"""


def test_program_that_ends_leaves_no_record(url: str) -> None:
    """Without a word to the reader: it neither closes it nor waits."""
    with LocalTeacher("echo", service="s", discovery=url):
        environment = {**os.environ, "EDL_DISCOVERY": url}
        process = subprocess.Popen([sys.executable, "-c", _STUDENT], stdin=subprocess.PIPE, env=environment)
        try:
            until(lambda: load(url).students)
            process.communicate(b"\n", timeout=100)
            assert process.returncode == 0
            assert load(url).students == ()
        finally:
            process.kill()
            process.wait()
